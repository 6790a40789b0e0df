"""A model over HTTP, for programs that know OpenAI's API or vLLM's: what it samples there is trained.

    POST /v1/chat/completions      messages in, a message out, with tools; `return_token_ids` adds the ids
    POST /inference/v1/generate    token ids in, token ids and log-probabilities out, with the weights that sampled them
    GET  /v1/models                the one model, and how long a conversation may be

It listens on the loopback address alone. A key says which trajectory asks, as a bearer token or, before that, in the
header X-API-Key, which proxies leave alone; without a valid one nothing is answered. How
tokens are sampled is the run's to say, and never the caller's: training needs the log-probabilities of exactly that
distribution. So temperature and the like are accepted there and have no effect; in `stretto serve`, temperature and
seed have one.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from stretto.engines.base import Completion
from stretto.environments.addresses import Caller
from stretto.environments.base import Reply
from stretto.environments.wire import BadRequest, ChatCall, TokenCall, chat_call, token_call
from stretto.errors import MODEL_FAILURES, RolloutError, StrettoError

LARGEST = 8 << 20
"""Bytes of a request."""
MOST = 64
"""Requests of one key that may wait at the same time."""
NAME = "policy"
"""What the model is called; the name in a request is not read."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """The server of a process."""

    def __init__(self, callers: Mapping[str, Caller], *, vocabulary: int) -> None:
        """`callers` are the keys that are valid, which may change at any time."""
        self.callers, self.vocabulary = callers, vocabulary
        app = web.Application(client_max_size=LARGEST, middlewares=[self._answer])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/inference/v1/generate", self._generate)
        self.runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        self.url = ""

    async def start(self, port: int = 0) -> None:
        """Listens; 0 is whichever port is free."""
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        host, number = self.runner.addresses[0][:2]
        self.url = f"http://{host}:{number}"

    async def close(self) -> None:
        """Ends every connection."""
        await self.runner.cleanup()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets nobody in without a key, and turns what is wrong into a status and a sentence."""
        if (caller := self._caller(request)) is None:
            return _error(401, "the API key is not one of a trajectory that runs now", "invalid_api_key")
        try:
            with _counted(caller):
                return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, error.reason or "refused", "invalid_request_error")
        except BadRequest as error:
            return _error(error.status, str(error), error.code)
        except MODEL_FAILURES as error:
            caller.fail(error)
            return _error(503, f"the run cannot answer any more: {type(error).__name__}", "unavailable")
        except (RolloutError, ValueError) as error:
            code = "context_length_exceeded" if "context" in str(error) else "invalid_request_error"
            return _error(400, str(error), code)
        except StrettoError as error:
            return _error(500, str(error), "internal_error")

    def _caller(self, request: web.Request) -> Caller | None:
        """Whose key the request has."""
        if (key := request.headers.get("X-API-Key")) is not None:
            return self.callers.get(key)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self.callers.get(key.strip()) if scheme.lower() == "bearer" else None

    def _known(self, request: web.Request) -> Caller:
        """The same for a request that was let in."""
        caller = self._caller(request)
        assert caller is not None
        return caller

    async def _models(self, request: web.Request) -> web.Response:
        caller = self._known(request)
        card = {"id": NAME, "object": "model", "owned_by": "stretto", "max_model_len": caller.model.context}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        caller = self._known(request)
        call = chat_call(await _body(request), caller.replies)
        model = caller.model.at(call.wish)
        reply = await model.chat(call.messages, max_new_tokens=call.max_new_tokens, tools=call.tools)
        answer = _chat_answer(call, reply, model.sampled(reply), caller)
        return await _streamed(request, answer) if call.stream else web.json_response(answer)

    async def _generate(self, request: web.Request) -> web.Response:
        caller = self._known(request)
        call = token_call(await _body(request), vocabulary=self.vocabulary)
        completion = await caller.model.at(call.wish).complete(call.tokens, max_new_tokens=call.max_new_tokens)
        return web.json_response(_token_answer(call, completion))


@contextmanager
def _counted(caller: Caller) -> Iterator[None]:
    """A request under way, which ends with its trajectory."""
    if len(caller.requests) >= MOST:
        raise BadRequest(f"{MOST} requests of this key wait already", status=429, code="rate_limit_exceeded")
    task = asyncio.current_task()
    assert task is not None
    caller.requests.add(task)
    try:
        yield
    finally:
        caller.requests.discard(task)


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


def _error(status: int, message: str, code: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)


def _chat_answer(
    call: ChatCall, reply: Reply, sampled: tuple[list[int], list[float]], caller: Caller
) -> dict[str, Any]:
    """A reply as OpenAI's API has it."""
    context, logprobs = sampled
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    calls = []
    for wanted in reply.tool_calls:
        if wanted.error or not wanted.name:
            continue  # no call that anybody could make: it stands in the text
        name = f"call_{uuid.uuid4().hex[:24]}"
        caller.remember(name, reply)
        arguments = json.dumps(dict(wanted.arguments))
        calls.append({"id": name, "type": "function", "function": {"name": wanted.name, "arguments": arguments}})
    finish = "length" if reply.stop == "length" else "stop"
    if calls:
        message["tool_calls"], finish = calls, "tool_calls"
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if call.logprobs:
        choice["logprobs"] = {"content": _logprobs(reply.tokens, logprobs)}
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": NAME,
        "choices": [choice],
        "usage": _usage(len(context), len(reply.tokens)),
    }
    if call.token_ids:
        answer["prompt_token_ids"] = context
        choice["token_ids"] = list(reply.tokens)
    return answer


def _token_answer(call: TokenCall, completion: Completion) -> dict[str, Any]:
    """A completion as vLLM has it."""
    tokens = completion.tokens.tolist()
    choice = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": "length" if completion.stop == "length" else "stop",
        "logprobs": {"content": _logprobs(tokens, completion.logprobs.tolist())} if call.logprobs else None,
        "weight_versions": [{"version": str(completion.version), "start": 0, "end": len(tokens)}],
    }
    return {
        "request_id": call.request_id or uuid.uuid4().hex,
        "choices": [choice],
        "usage": _usage(len(call.tokens), len(tokens)),
    }


def _logprobs(tokens: Sequence[int], values: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(tokens, values, strict=True)
    ]


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The answer as a stream of one piece, for clients that know no other way."""
    choice = answer["choices"][0]
    delta = {**choice["message"]}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **each} for place, each in enumerate(delta["tool_calls"])]
    piece = {**answer, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}
    del piece["choices"][0]["message"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response
