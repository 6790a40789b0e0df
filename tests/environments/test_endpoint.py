"""Programs that reach a trajectory's model over HTTP: what they sample is recorded to the id, nobody else gets in,
and no request of a stranger disturbs anything."""

import asyncio
import gc
import io
import json
import os
import random
import string
import sys
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import aiohttp
import pytest

from stretto.engines.scripted import ScriptedEngine
from stretto.environments import endpoint
from stretto.environments.addresses import REMEMBERED, Addresses, Caller
from stretto.environments.base import Address
from stretto.environments.program import ProgramEnvironment, executable
from stretto.environments.render import Renderer
from stretto.environments.tool_calls import ToolCall
from stretto.environments.wire import BadRequest, Given, SentReply, chat_call, token_call
from stretto.errors import EngineError, WeightsError, WorkerLost
from stretto.runtime.serve import OpenModel
from stretto.types import Outcome, Prompt
from talking import Talk

from .test_trajectory import STOP, ZERO, collected, launches, user

VOCABULARY = 20
CHAT = "/v1/chat/completions"
TOKENS = "/inference/v1/generate"


@pytest.fixture
def play(tokenizer):
    """Runs an environment for launches, with a server; gives the trajectories."""

    def run(environment, *, count=1, engine=None, **rest):
        async def all_of_it():
            addresses = Addresses(vocabulary=VOCABULARY)
            renderer = Renderer(tokenizer, stop=frozenset({STOP}))
            answers = engine or ScriptedEngine(lambda request: [ZERO, STOP])
            try:
                return await collected(
                    launches(count), answers, environment=environment, renderer=renderer, addresses=addresses, **rest
                )
            finally:
                await addresses.close()

        return asyncio.run(all_of_it())

    return run


async def post(address, path, body, *, key=None, method="POST"):
    """(status, JSON) of a request; `body` is bytes or what is written as JSON."""
    headers = {"Authorization": f"Bearer {address.key if key is None else key}"}
    data = body if isinstance(body, bytes | io.BytesIO) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, address.url + path, data=data, headers=headers) as answer,
    ):
        return answer.status, json.loads(await answer.read())


def test_two_turns_over_http_are_one_conversation_with_the_engines_ids(play):
    async def agent(prompt, model):
        address = await model.address()
        said = [dict(message) for message in prompt.messages]
        for turn in "12":
            asked = {"messages": said, "return_token_ids": True, "logprobs": True}
            status, answer = await post(address, CHAT, {**asked, "return_tokens_as_token_ids": turn == "2"})
            assert status == 200
            (choice,) = answer["choices"]
            assert choice["token_ids"] == [ZERO, STOP]
            told = choice["logprobs"]["content"]
            assert [each["token"] for each in told] == {"1": ["0", "<|end|>"], "2": ["token_id:7", "token_id:0"]}[turn]
            assert all(bytes(each["bytes"]).decode() == each["token"] for each in told)
            assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
            said += [choice["message"], user(turn)]
        return Outcome(answer=choice["message"]["content"])

    (trajectory,) = play(agent)
    assert trajectory.failure is None
    (talk,) = trajectory.conversations
    assert talk.trained.sum() == 4 and talk.tokens[talk.trained].tolist() == [ZERO, STOP, ZERO, STOP]
    assert len(talk.turns) == 2


def test_token_ids_go_in_and_come_out_and_branches_share_their_prefix(play):
    async def agent(prompt, model):
        address = await model.address()
        contexts, ask = [[5, 6]], {"sampling_params": {"logprobs": 1, "max_tokens": 4}, "request_id": "r1"}
        for more in ([8], [9]):
            status, answer = await post(address, TOKENS, {"token_ids": contexts[-1], **ask})
            assert status == 200 and answer["request_id"] == "r1"
            (choice,) = answer["choices"]
            assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
            assert all(each["logprob"] <= 0 for each in choice["logprobs"]["content"])
            contexts.append([*contexts[-1], *choice["token_ids"], *more])
        other = [*contexts[1][:-1], 10]  # goes on from the first answer in another way
        assert (await post(address, TOKENS, {"token_ids": other}))[0] == 200
        return Outcome(answer="")

    (trajectory,) = play(agent)
    trunk, branch = trajectory.conversations
    assert trunk.tokens.tolist() == [5, 6, ZERO, STOP, 8, ZERO, STOP]
    assert branch.tokens.tolist() == [5, 6, ZERO, STOP, 10, ZERO, STOP] and branch.parent == (0, 4)
    assert branch.trained.tolist() == [False] * 5 + [True] * 2  # what the trunk has sampled is trained there alone


def test_a_context_that_is_full_is_cut_off_and_one_prompt_too_long_is_refused(play):
    async def agent(prompt, model):
        address = await model.address()
        status, answer = await post(address, TOKENS, {"token_ids": [5] * 30})
        assert status == 200
        status, answer = await post(address, TOKENS, {"token_ids": [5] * 30 + answer["choices"][0]["token_ids"]})
        assert (status, answer["choices"][0]["token_ids"]) == (200, [])
        assert answer["choices"][0]["finish_reason"] == "length"
        for path, body in ((CHAT, {"messages": [user("1" * 50)]}), (TOKENS, {"token_ids": [5] * 50})):
            status, answer = await post(address, path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        return Outcome(answer="")

    (trajectory,) = play(agent, context=32)
    assert trajectory.failure is None and trajectory.full == 1


def test_a_wrong_key_gets_401_and_a_key_ends_with_its_trajectory(play):
    seen = []

    async def agent(prompt, model):
        address = await model.address()
        for key in ("", "nonsense", address.key[:-1], address.key + "x", *(each.key for each in seen)):
            assert (await post(address, CHAT, {"messages": [user("1")]}, key=key))[0] == 401
            assert (await post(address, "/v1/models", b"", key=key, method="GET"))[0] == 401
        for header, value in (("X-API-Key", address.key), ("X-API-Key", "nonsense")):  # a proxy leaves it alone
            headers = {header: value, "Authorization": "Bearer EMPTY"}
            async with (
                aiohttp.ClientSession() as session,
                session.get(address.base_url + "/models", headers=headers) as found,
            ):
                assert found.status == (200 if value == address.key else 401)
        status, answer = await post(address, "/v1/models", b"", method="GET")
        assert (status, answer["data"][0]["max_model_len"]) == (200, 256)
        assert await post(address, "/v1/models/policy", b"", method="GET") == (200, answer["data"][0])
        await model.chat(prompt.messages)
        seen.append(address)
        return Outcome(answer="")

    async def twice(prompt, model):
        return await agent(prompt, model)

    assert all(trajectory.failure is None for trajectory in play(twice, count=1) + play(twice, count=1))
    assert len({address.key for address in seen}) == 2
    assert all(address.url.startswith("http://127.0.0.1:") for address in seen)


GOOD = {"messages": [{"role": "user", "content": "1"}]}
UNWANTED = {
    "top_p": 0.5, "top_k": 3, "min_p": 0.1, "frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.1,
    "min_tokens": 2, "ignore_eos": True, "top_logprobs": 2, "stop_token_ids": [5], "bad_words": ["a"],
    "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True,
}  # fmt: skip
"""What would change how tokens are drawn."""
MALFORMED = [
    (CHAT, body)
    for body in (
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"messages": ' + b"[" * 5000,
        {}, {"messages": None}, {"messages": []}, {"messages": "hi"}, {"messages": [1]}, {"messages": [{}]},
        {"messages": [{"role": "robot", "content": "x"}]}, {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {**GOOD, "stop": [""]}, {**GOOD, "stop": 5}, {**GOOD, "stop": ["x"] * 17}, {**GOOD, "logit_bias": {"3": 1.0}},
        {**GOOD, "response_format": {"type": "json_object"}},
        {**GOOD, "n": 0}, {**GOOD, "n": 65}, {**GOOD, "n": "1"}, {**GOOD, "max_tokens": 0}, {**GOOD, "max_tokens": -5},
        {**GOOD, "max_tokens": 1e9}, {**GOOD, "max_tokens": "8"}, {**GOOD, "stream": "yes"}, {**GOOD, "tools": {}},
        {**GOOD, "tools": [{"type": "function"}]}, {**GOOD, "tools": [{"type": "web"}]},
        {**GOOD, "tool_choice": "required"}, {**GOOD, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        *({**GOOD, key: value} for key, value in UNWANTED.items()),
    )
] + [
    (TOKENS, body)
    for body in (
        {}, {"token_ids": []}, {"token_ids": [VOCABULARY]}, {"token_ids": [-1]}, {"token_ids": [1.5]},
        {"token_ids": ["1"]}, {"token_ids": 5}, {"token_ids": [True]}, {"token_ids": [10**30]}, {"token_ids": [[1]]},
        {"token_ids": [1], "stream": True}, {"token_ids": [1], "sampling_params": {"n": 4}},
        {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, {"token_ids": [1], "sampling_params": 5},
        {"token_ids": [1], "sampling_params": {"logprobs": 20}},
        *({"token_ids": [1], "sampling_params": {key: value}} for key, value in UNWANTED.items()),
    )
]  # fmt: skip


def test_malformed_requests_get_4xx_and_disturb_nothing(play):
    noise = random.Random(0)
    garbage = [bytes(noise.randrange(256) for _ in range(noise.randrange(400))) for _ in range(20)]
    words = [json.dumps({noise.choice(string.ascii_letters): noise.random()}).encode() for _ in range(10)]

    async def agent(prompt, model):
        address = await model.address()
        cases = [*MALFORMED, *((path, body) for path in (CHAT, TOKENS) for body in (*garbage, *words))]
        for path, body in cases:
            status, answer = await post(address, path, body)
            assert 400 <= status < 500, (path, body, answer)
            message = answer["error"]["message"]
            assert message and "instance of" not in message and "[_" not in message
        for path, method in (("/v1/nothing", "POST"), (CHAT, "GET"), (CHAT, "DELETE"), ("/../etc/passwd", "GET")):
            status, answer = await post(address, path, b"", method=method)
            assert 400 <= status < 500 and f"there are: POST {CHAT}" in answer["error"]["message"]
        assert (await post(address, CHAT, io.BytesIO(b" " * (9 << 20))))[0] == 413
        neutral = dict(zip(UNWANTED, [1.0, -1, 0.0, 0, 0, 1.0, None, False, 0, [STOP], [], {}, False], strict=True))
        assert (await post(address, CHAT, {**GOOD, **neutral, "stop": [], "n": 1}))[0] == 200
        return Outcome(answer="fine")

    (trajectory,) = play(agent)
    assert trajectory.failure is None and trajectory.outcome.answer == "fine"
    assert len(MALFORMED) >= 45 and len(trajectory.conversations) == 1


def test_a_stream_is_the_answer_in_one_piece(play):
    async def agent(prompt, model):
        address = await model.address()
        headers = {"Authorization": f"Bearer {address.key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(address.url + CHAT, json={**GOOD, "stream": True}, headers=headers) as answer,
        ):
            lines = [line for line in (await answer.text()).split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        (choice,) = json.loads(lines[0].removeprefix("data: "))["choices"]
        assert choice["delta"]["content"] == "0" and choice["finish_reason"] == "stop"
        return Outcome(answer="")

    assert play(agent)[0].failure is None


def test_a_reply_with_tool_calls_is_known_again_by_their_ids():
    reply = {"role": "assistant", "content": "<tool_call>…"}
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = [user("1"), message, {"role": "tool", "content": "2"}]
    sent = {"call_7": SentReply(reply=reply, message=message)}
    found = chat_call({"messages": [*said, {"role": "developer", "content": "Add."}]}, sent).messages
    assert found[3] == {"role": "system", "content": "Add."}, "templates know it by this name"
    assert found[1] is reply and found[2] == {"role": "tool", "content": "2"}
    other = chat_call({"messages": said}, {}).messages[1]
    assert other["tool_calls"][0]["function"]["arguments"] == {"a": 1}

    def again(content, **function):
        calls = [{**call, "function": {**call["function"], **function}}]
        (found,) = chat_call({"messages": [{**message, "content": content, "tool_calls": calls}]}, sent).messages
        return found

    assert again(" ", arguments='{ "a":1 }') is reply
    assert again("I add.") == {**other, "content": "I add."}, "what a client has changed is not what was said"
    assert again(None, name="sub") is not reply and again(None, arguments='{"a": 2}') is not reply
    assert again(None, arguments="")["tool_calls"][0]["function"]["arguments"] == {}
    nothing = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    (tool,) = chat_call({"messages": said, "tools": [nothing]}, {}).tools
    assert tool["function"] == {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    deep = "[" * 40 + "]" * 40
    with pytest.raises(BadRequest, match="nested"):
        call["function"]["arguments"] = deep
        chat_call({"messages": said}, {})
    assert token_call({"token_ids": [3]}, vocabulary=4).tokens == [3]


def test_what_a_model_has_anyway_may_be_asked_for_and_anything_cuts_what_is_greedy():
    own = Given(top_p=0.9, top_k=5, template={"enable_thinking": False, "tone": "dry"})
    for wish in ({"top_p": 0.9}, {"top_k": 5}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert chat_call({**GOOD, **wish}, {}, given=own).choices == 1
        with pytest.raises(BadRequest, match="the recipe decides"):
            chat_call({**GOOD, **wish}, {}, given=Given(top_p=0.8))
    assert chat_call({**GOOD, "top_p": 0.1, "min_p": 0.2}, {}, given=Given(greedy=True)).choices == 1
    with pytest.raises(BadRequest, match="logit_bias"):
        chat_call({**GOOD, "logit_bias": {"1": 2}}, {}, given=Given(greedy=True))


def test_a_request_may_end_its_answer_at_a_text_and_ask_for_several():
    talk = Talk(Prompt(id="p", messages=()), lambda text: "look\nObs:" if talk.request.stop_texts else "done")

    async def agent(address):
        _, answer = await post(address, CHAT, {**GOOD, "stop": "\nObs:", "return_token_ids": True})
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("look", "stop")
        assert len(choice["token_ids"]) == len("look\nObs:") + 1, "what was sampled"
        said = [*GOOD["messages"], choice["message"], user("5")]
        _, answer = await post(address, CHAT, {"messages": said, "n": 2, "logprobs": True})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["completion_tokens"] == 2 * len(answer["choices"][0]["logprobs"]["content"])
        await post(address, TOKENS, {"token_ids": [5], "sampling_params": {"stop": ["a", "b"]}})
        assert talk.request.stop_texts == ("a", "b")
        talk.sampling = replace(talk.sampling, stop_texts=None)
        status, answer = await post(address, CHAT, {**GOOD, "stop": ["x"]})
        assert (status, "this engine" in answer["error"]["message"]) == (400, True)

    asyncio.run(served(talk, agent))
    assert [text.startswith("look\nObs:<|end|>") for text in talk.trained()] == [True, False, True]
    assert talk.trained()[0].endswith("done<|end|>") and talk.trained()[1] == "done<|end|>"
    assert talk.rewritten == 0 and talk.conversations()[1].parent is not None, "given back as it came, it goes on"


def test_a_server_that_runs_for_long_forgets_the_oldest_tool_calls():
    caller = Caller(model=None, trajectory=None, key="key")
    for number in range(REMEMBERED + 3):
        caller.remember(f"call_{number}", {"role": "assistant", "content": str(number)})
    assert len(caller.replies) == REMEMBERED and "call_2" not in caller.replies
    assert caller.replies[f"call_{REMEMBERED + 2}"]["content"] == str(REMEMBERED + 2)


def test_what_a_client_makes_of_a_reply_is_not_trained_as_the_models_and_is_counted():
    tools = [
        {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {}}}}}
    ]

    async def agent(address, edit):
        _, answer = await post(address, CHAT, {**GOOD, "tools": tools})
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        (call,) = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9 and json.loads(call["function"]["arguments"]) == {"q": "a"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "b"}
        said = [*GOOD["messages"], {**choice["message"], **edit}, result]
        assert (await post(address, CHAT, {"messages": said, "tools": tools}))[0] == 200

    for edit, conversations in (({}, 1), ({"content": "EDITED"}, 2)):
        talk = Talk(Prompt(id="p", messages=()), ["find(a)", "done"])
        asyncio.run(served(talk, lambda address, edit=edit: agent(address, edit)))
        assert (len(talk.texts()), talk.rewritten) == (conversations, conversations - 1)
        assert talk.trained()[0].startswith("find(a)<|end|>") and talk.trained()[-1].endswith("done<|end|>")


def test_a_server_answers_at_the_length_and_temperature_of_a_request(monkeypatch):
    talk, asked = Talk(Prompt(id="p", messages=()), lambda text: "1"), []

    async def generate(self, request):
        asked.append((request.max_new_tokens, request.temperature))
        return await talk.generate(request)

    async def agent(address):
        for more in ({"max_tokens": 1000, "temperature": 1e-320}, {"max_tokens": 9000}, {"temperature": 0.5}):
            assert (await post(address, CHAT, {**GOOD, **more}))[0] == 200
        assert (await post(address, TOKENS, {"token_ids": [5], "sampling_params": {"max_tokens": 1000}}))[0] == 200

    monkeypatch.setattr(OpenModel, "_generate", generate)
    parts = SimpleNamespace(context=talk.context, renderer=talk.renderer)
    asyncio.run(served(OpenModel(parts, talk.sampling, numbers=count()), agent))
    assert asked == [(1000, 0.0), (talk.context - len("u1a"), 1.0), (400, 0.5), (1000, 1.0)]


@pytest.mark.parametrize(
    ("named", "status"), [(None, 200), ("policy", 200), ("gpt-4o", 404), ("", 404), ("policy ", 404), (5, 404)]
)
def test_a_server_refuses_the_name_of_another_model(monkeypatch, named, status):
    talk = Talk(Prompt(id="p", messages=()), lambda text: "1")

    async def generate(self, request):
        return await talk.generate(request)

    async def agent(address):
        found = [await post(address, CHAT, {**GOOD, "model": named})]
        found.append(await post(address, TOKENS, {"token_ids": [5], "model": named}))
        if named:
            found.append(await post(address, f"/v1/models/{named}", b"", method="GET"))
        assert [code for code, _ in found] == [status] * len(found)
        for _, answer in found if status == 404 else ():
            assert answer["error"]["code"] == "model_not_found" and answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["message"] == f"The model `{named}` does not exist; this server has `policy`"

    monkeypatch.setattr(OpenModel, "_generate", generate)
    parts = SimpleNamespace(context=talk.context, renderer=talk.renderer)
    asyncio.run(served(OpenModel(parts, talk.sampling, numbers=count()), agent))


def test_a_trajectory_answers_whatever_its_model_is_called(play):
    async def agent(prompt, model):
        status, answer = await post(await model.address(), CHAT, {"messages": [user("1")], "model": "gpt-4o"})
        return Outcome(answer=f"{status} {answer['model']}")

    (trajectory,) = play(agent)
    assert trajectory.outcome.answer == "200 policy"


async def served(model, agent):
    """Lets an agent ask a model at an address."""
    addresses = Addresses(vocabulary=VOCABULARY)
    try:
        with addresses.running(model):
            await agent(await addresses.open(model))
    finally:
        await addresses.close()


def test_who_hangs_up_leaves_nothing_to_train_and_nothing_in_the_terminal(monkeypatch, capfd):
    monkeypatch.setattr(endpoint, "READING", 0.2)
    talk, slow = Talk(Prompt(id="p", messages=()), ["1", "2"]), asyncio.Event()
    generate = talk.generate

    async def waits(request):
        if not slow.is_set():
            slow.set()
            await asyncio.sleep(60)
        return await generate(request)

    talk.generate = waits

    async def half_sent(address, hang_up):
        port = int(address.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {address.key}\r\nContent-Length: 9\r\n\r\n["
        writer.write(head.encode())
        await writer.drain()
        answer = b"" if hang_up else await reader.readline()
        writer.close()
        return answer

    async def agent(address):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await post(address, CHAT, GOOD)
        status, answer = await post(address, CHAT, GOOD)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "1")
        await half_sent(address, hang_up=True)
        assert b"408" in await half_sent(address, hang_up=False)
        monkeypatch.setattr(talk, "chat", None)
        status, answer = await post(address, CHAT, GOOD)
        assert (status, answer["error"]["code"]) == (500, "internal_error")

    asyncio.run(served(talk, agent))
    assert talk.trained() == ["1<|end|>"]
    assert capfd.readouterr().err == ""


HALF = {
    "nothing": b"",
    "half a line": b"GET /v1/mod",
    "headers without an end": b"GET / HTTP/1.1\r\nX: ",
    "a wrong key, and half a body": b"POST /v1/models HTTP/1.1\r\nX-API-Key: no\r\nContent-Length: 99\r\n\r\n[",
}


async def connected(address, sent):
    """A connection on which some bytes were sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.url.rpartition(":")[2]))
    writer.write(sent)
    await writer.drain()
    return reader, writer


def test_a_connection_without_a_whole_request_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(endpoint, "READING", 0.3)
    talk = Talk(Prompt(id="p", messages=()), lambda text: "1")

    async def agent(address):
        key = f"Authorization: Bearer {address.key}\r\nHost: x\r\n"
        whole = f"GET /v1/models HTTP/1.1\r\n{key}\r\n".encode()
        after = [whole, whole + b"GET / HTTP/1.1\r\nX: "]  # a valid key keeps a connection open for one request alone
        for sent in (*HALF.values(), *after):
            reader, writer = await connected(address, sent)
            async with asyncio.timeout(15):
                await reader.read()  # up to the end
            writer.close()
        assert (await post(address, CHAT, GOOD))[0] == 200

    asyncio.run(served(talk, agent))


@pytest.mark.parametrize("sent", [b"", HALF["headers without an end"]])
def test_connections_without_a_key_keep_nobody_out(monkeypatch, sent):
    monkeypatch.setattr(endpoint, "MOST_UNPROVED", 16)
    talk = Talk(Prompt(id="p", messages=()), lambda text: "1")

    async def agent(address):
        held = []
        for _ in range(60):
            held.append(await connected(address, sent))
            if len(held) % 20 == 0:
                assert (await post(address, CHAT, GOOD))[0] == 200
        await asyncio.sleep(0.1)
        assert sum(not reader.at_eof() for reader, _ in held) <= 16
        for _, writer in held:
            writer.close()

    asyncio.run(served(talk, agent))


def test_a_connection_whose_key_was_valid_outlasts_others_and_slow_answers(monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_UNPROVED", 16)
    monkeypatch.setattr(endpoint, "READING", 0.3)
    talk = Talk(Prompt(id="p", messages=()), lambda text: "1")
    generate = talk.generate

    async def slow(request):
        await asyncio.sleep(1)
        return await generate(request)

    talk.generate = slow

    async def agent(address):
        asked = asyncio.ensure_future(post(address, CHAT, GOOD))
        await asyncio.sleep(0.1)
        held = [await connected(address, b"") for _ in range(40)]
        assert (await asked)[0] == 200
        for _, writer in held:
            writer.close()

    asyncio.run(served(talk, agent))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_body_that_is_not_encoded_as_it_says_gets_400(encoding, cut):
    talk = Talk(Prompt(id="p", messages=()), lambda text: "1")
    packed = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    whole = packed.compress(json.dumps(GOOD).encode()) + packed.flush()

    async def agent(address):
        headers = {"X-API-Key": address.key, "Content-Encoding": encoding}
        for body, status in ((whole[: len(whole) // 2] if cut else b"no such thing", 400), (whole, 200)):
            async with (
                aiohttp.ClientSession() as session,
                session.post(address.url + CHAT, data=body, headers=headers) as answer,
            ):
                assert answer.status == status, await answer.text()

    asyncio.run(served(talk, agent))


@pytest.mark.parametrize("turns", [1, 3])
def test_a_text_that_no_context_could_hold_is_not_tokenized(turns, monkeypatch):
    read, talk = [], Talk(Prompt(id="p", messages=()), lambda text: "1", context=64)
    encode = talk.renderer.tokenizer.encode
    monkeypatch.setattr(
        talk.renderer.tokenizer, "encode", lambda text, **rest: read.append(len(text)) or encode(text, **rest)
    )

    async def agent(address):
        said = [user("1"), {"role": "assistant", "content": "1"}] * (turns // 2)
        if said:
            assert (await post(address, CHAT, {"messages": said[:1]}))[0] == 200
        long = json.dumps({"messages": [*said, user("1" * 1_900_000)]}).encode()
        status, answer = await post(address, CHAT, io.BytesIO(long))
        if said:  # a conversation that goes on is cut off, as with fewer words
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        else:
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    asyncio.run(served(talk, agent))
    assert max(read, default=0) < 100


@pytest.mark.parametrize("error", [WorkerLost("cell", "gone"), EngineError("it broke"), WeightsError("not it")])
def test_what_ends_a_run_ends_it_from_inside_a_request_too(play, error):
    class Broken(ScriptedEngine):
        def step(self, budget_seconds):
            raise error

    async def agent(prompt, model):
        address = await model.address()
        with suppress(Exception):
            await post(address, CHAT, GOOD)
        await asyncio.sleep(60)

    with pytest.raises(type(error)):
        play(agent, engine=Broken(lambda request: [ZERO, STOP]))


def test_an_address_is_refused_once_its_trajectory_has_ended(play):
    kept = []

    async def agent(prompt, model):
        await model.chat(prompt.messages)
        kept.append((model, await model.address()))
        return Outcome(answer="")

    async def late(prompt, model):
        return await agent(prompt, model)

    play(late)
    _, address = kept[0]
    with suppress(OSError):  # the server is gone, or does not know the key
        status, _ = asyncio.run(post(address, CHAT, GOOD))
        assert status == 401


# Programs ---------------------------------------------------------------------------------------------------------

AGENT = """
import json, os, sys
import openai
prompt = json.load(sys.stdin)
client = openai.OpenAI()
said = prompt["messages"]
for turn in range(2):
    answer = client.chat.completions.create(model="any", messages=said, temperature=0.3)
    said = [*said, answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "1"}]
print(answer.choices[0].message.content)
"""


def program(code, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(code)
    return ProgramEnvironment([sys.executable, str(path)], root=tmp_path)


def test_a_program_with_the_openai_client_is_an_environment(play, tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):  # nobody listens there
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    trajectories = play(program(AGENT, tmp_path), count=2)
    assert [each.failure for each in trajectories] == [None, None]
    assert all(each.outcome.answer == "0" and len(each.conversations) == 1 for each in trajectories)
    assert all(each.conversations[0].trained.sum() == 4 for each in trajectories)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import nothing_like_this", "No module named 'nothing_like_this'"),
        ("print('x' * (3 << 20))", "more than"),
        ("print('I asked nobody')", "without calling the model"),
    ],
)
def test_a_program_that_fails_is_a_failure_and_not_an_answer(play, tmp_path, code, said):
    (trajectory,) = play(program(code, tmp_path))
    assert said in trajectory.failure


def test_a_program_that_leaves_something_behind_has_ended_all_the_same(play, tmp_path):
    code = "import subprocess; subprocess.Popen(['sleep', '600'])\n" + AGENT
    (trajectory,) = play(program(code, tmp_path), outside=20.0)
    assert trajectory.failure is None and trajectory.outcome.answer == "0"


def test_a_call_that_is_none_stands_in_the_text_alone(play, monkeypatch):
    monkeypatch.setattr(Renderer, "tool_calls", lambda self, tokens, tools: (ToolCall(name="", error="no JSON"),))

    async def agent(prompt, model):
        address = await model.address()
        tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
        _, answer = await post(address, CHAT, {**GOOD, "tools": tools})
        (choice,) = answer["choices"]
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
        strange = {"id": "a", "type": "function", "function": {"name": "", "arguments": "{}"}}
        said = [*GOOD["messages"], {"role": "assistant", "content": None, "tool_calls": [strange]}]
        assert (await post(address, CHAT, {"messages": [*said, {"role": "tool", "content": "?"}]}))[0] == 200
        return Outcome(answer="")

    (trajectory,) = play(agent)
    assert trajectory.failure is None


def test_a_program_past_its_deadline_ends_with_what_it_started(play, tmp_path):
    mark = tmp_path / "child"
    code = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '600']); "
        f"open({str(mark)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    (trajectory,) = play(program(code, tmp_path), outside=2.0)
    assert "not finished within" in trajectory.failure
    state = f"/proc/{mark.read_text()}/stat"
    with suppress(FileNotFoundError), open(state) as stat:
        assert stat.read().split()[2] == "Z"


def test_a_program_is_found_beside_the_recipe_beside_python_and_on_path(tmp_path, monkeypatch):
    mine = tmp_path / "agent"
    mine.write_text("#!/bin/sh\nexit 0\n")
    assert executable("agent", tmp_path) is None, "it is not executable"
    mine.chmod(0o755)
    assert executable("agent", tmp_path) == executable("./agent", tmp_path) == str(mine)
    assert executable("python", tmp_path) == os.path.join(os.path.dirname(sys.executable), "python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert executable("agent", tmp_path / "elsewhere") == str(mine)
    assert executable("sub/agent", tmp_path) is None


def test_a_command_that_does_not_exist_is_said(play, tmp_path):
    (trajectory,) = play(ProgramEnvironment(["/no/such/agent"], root=tmp_path))
    assert "/no/such/agent cannot be started" in trajectory.failure


def test_canceled_program_leaves_no_exception_to_log(tmp_path):
    """`stretto task play` cancels an episode at the end of its input."""
    lost = []
    code = "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(600)\n"

    class Reached:
        async def address(self):
            return Address(url="http://127.0.0.1:1", key="key")

    async def canceled():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context["message"]))
        prompt = Prompt(id="p", messages=({"role": "user", "content": "0"},))
        episode = asyncio.ensure_future(program(code, tmp_path)(prompt, Reached()))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        episode.cancel()
        await asyncio.wait([episode])
        del episode
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(canceled())
    assert lost == []
