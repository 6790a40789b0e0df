"""Whatever an environment does with the model, every sampled token is trained exactly once, in the context it saw."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.engines.base import Completion, noise_key
from stretto.environments.chat import ModelHandle, Sampling
from stretto.environments.render import Renderer
from stretto.errors import EngineError, RolloutError
from stretto.models.scratch import character_tokenizer
from stretto.types import KeptTokens, Prompt

TOKENIZER = character_tokenizer("0123456789+= ab<think>/")
END = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def user(text):
    return {"role": "user", "content": text}


class Talk:
    """A model handle, what it asked of the engine, and what the engine said: by default the number of the call."""

    def __init__(self, *, say=None, context=200, limit=8, template=None, **who):
        self.asked, self.sampled = [], 0
        self.say = say or (lambda request: [*ids(str(len(self.asked))), END])
        renderer = Renderer(TOKENIZER, stop=frozenset({END}))
        if template:
            renderer.tokenizer = character_tokenizer("0123456789+= ab<think>/")
            renderer.tokenizer.chat_template = template
        self.handle = ModelHandle(
            prompt=Prompt(id="p", messages=(user("1"),)),
            **{"visit": 0, "attempt": 0, **who},
            sampling=Sampling(seed=0, temperature=1.0, max_new_tokens=limit, context=context),
            renderer=renderer,
            generate=self._generate,
        )

    async def _generate(self, request):
        self.asked.append(request)
        number = len(self.asked)
        tokens = self.say(request)[: request.max_new_tokens]
        self.sampled += len(tokens)
        await asyncio.sleep(0)
        stop = "stop" if tokens and tokens[-1] == END else "length"
        return Completion(
            key=request.key,
            tokens=np.array(tokens, dtype=np.int64),
            logprobs=-0.5 - np.arange(len(tokens)) - 100 * number,
            stop=stop,
            version=number,
        )

    def chat(self, messages, **keywords):
        return asyncio.run(self.handle.chat(messages, **keywords))

    @property
    def conversations(self):
        return self.handle.conversations()

    def texts(self):
        return [TOKENIZER.decode(c.tokens.tolist()) for c in self.conversations]


def assert_trained_once(talk):
    """Every sampled token is trained in exactly one place, behind exactly the context that the engine saw."""
    found = {}
    for place, conversation in enumerate(talk.conversations):
        tokens, trained = conversation.tokens, conversation.trained
        assert len(tokens) == len(trained) == len(conversation.logprobs)
        assert not conversation.logprobs[~trained].any()
        for at in np.flatnonzero(trained):
            number, offset = divmod(-conversation.logprobs[at] - 0.5, 100)
            assert (number, offset) not in found, "a token is trained twice"
            found[number, offset] = True
            request = talk.asked[int(number) - 1]
            context = len(request.tokens)
            assert at == context + offset
            assert tokens[:context].tolist() == request.tokens.tolist()
        if conversation.parent is not None:
            parent, shared = conversation.parent
            assert 0 <= parent < place
            assert talk.conversations[parent].tokens[:shared].tolist() == tokens[:shared].tolist()
            assert not trained[:shared].any()
    return found


def test_one_call_is_one_conversation():
    talk = Talk()
    reply = talk.chat([user("1+1=")])
    assert (reply, reply.text, reply.tokens, reply.stop) == (
        {"role": "assistant", "content": "1"},
        "1",
        (*ids("1"), END),
        "stop",
    )
    (conversation,) = talk.conversations
    assert conversation.tokens.tolist() == ids("<|user|>1+1=<|assistant|>1<|end|>")
    assert conversation.trained.tolist() == [False] * 6 + [True] * 2
    assert conversation.logprobs.tolist() == [0.0] * 6 + [-100.5, -101.5]
    assert (conversation.stop, conversation.version, conversation.parent) == ("stop", 1, None)


def test_a_handle_that_was_never_asked_has_no_conversations():
    assert Talk().conversations == ()


@pytest.mark.parametrize("same", ["the objects", "equal copies", "with another list type"])
def test_a_list_that_starts_with_a_conversation_continues_it(same):
    talk = Talk()
    first = [user("1")]
    reply = talk.chat(first)
    match same:
        case "the objects":
            talk.chat([*first, reply, user("2")])
        case "equal copies":
            talk.chat([dict(first[0]), {"role": "assistant", "content": reply.text}, user("2")])
        case _:
            talk.chat((first[0], reply, user("2")))
    assert talk.texts() == ["<|user|>1<|assistant|>1<|end|><|user|>2<|assistant|>2<|end|>"]
    assert len(assert_trained_once(talk)) == 4


@pytest.mark.parametrize("other", ["another word", "another role", "fewer messages", "nothing new"])
def test_a_list_that_does_not_start_with_a_conversation_opens_one(other):
    talk = Talk()
    reply = talk.chat([user("1"), user("2")])
    match other:
        case "another word":
            talk.chat([user("1"), user("3"), reply, user("4")])
        case "another role":
            talk.chat([user("1"), {"role": "system", "content": "2"}, reply, user("4")])
        case "fewer messages":
            talk.chat([user("1")])
        case _:
            talk.chat([user("1"), user("2")])
    assert len(talk.conversations) == 2
    assert talk.conversations[1].parent is None
    assert len(assert_trained_once(talk)) == 4
    assert talk.handle.rewritten == other.startswith("another"), "what gives the reply back continues nothing"


def test_examples_that_open_every_conversation_are_not_counted_as_words_of_the_model_in_another_form():
    talk = Talk()
    examples = [user("0"), {"role": "assistant", "content": "0"}]
    for question in "12":
        talk.chat([*examples, user(question)])
    reply = talk.chat([*examples, user("3")])
    assert talk.handle.rewritten == 0
    talk.chat([*examples, user("3"), {**reply, "content": "4"}, user("5")])
    assert talk.handle.rewritten == 1


def test_a_call_that_was_left_behind_leaves_no_context_behind():
    talk = Talk()
    generate, calls = talk.handle.generate, []

    async def waits(request):
        calls.append(request)
        if len(calls) == 2:
            await asyncio.sleep(60)
        return await generate(request)

    async def agent():
        reply = await talk.handle.chat([user("1")])
        again = [user("1"), reply, user("2")]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await talk.handle.chat(again)
        await talk.handle.chat(again)

    talk.handle.generate = waits
    asyncio.run(agent())
    assert talk.texts() == ["<|user|>1<|assistant|>1<|end|><|user|>2<|assistant|>2<|end|>"]
    assert_trained_once(talk)


def test_a_message_that_was_changed_in_place_is_not_the_message_that_was_said():
    talk = Talk()
    messages = [user("1")]
    messages.append(talk.chat(messages))
    messages[0]["content"] = "2"
    messages[1]["content"] = "5"
    talk.chat([*messages, user("3")])
    assert talk.texts() == [
        "<|user|>1<|assistant|>1<|end|>",
        "<|user|>2<|assistant|>5<|end|><|user|>3<|assistant|>2<|end|>",
    ]


def test_going_back_to_an_earlier_turn_branches_off_there():
    talk = Talk()
    first = [user("1")]
    one = talk.chat(first)
    two = talk.chat([*first, one, user("2")])
    talk.chat([*first, one, user("3")])
    talk.chat([*first, one, user("2"), two, user("4")])
    assert talk.texts() == [
        "<|user|>1<|assistant|>1<|end|><|user|>2<|assistant|>2<|end|><|user|>4<|assistant|>4<|end|>",
        "<|user|>1<|assistant|>1<|end|><|user|>3<|assistant|>3<|end|>",
    ]
    assert talk.conversations[1].parent == (0, len(ids("<|user|>1<|assistant|>1<|end|>")))
    assert len(assert_trained_once(talk)) == 8


@pytest.mark.parametrize("questions", [("2", "3"), ("2", "2")])
def test_parallel_calls_from_one_beginning_share_it(questions):
    talk = Talk()

    async def run():
        first = [user("1")]
        reply = await talk.handle.chat(first)
        both = await asyncio.gather(*(talk.handle.chat([*first, reply, user(q)]) for q in questions))
        return await asyncio.gather(
            *(
                talk.handle.chat([*first, reply, user(q), own, user("9")])
                for q, own in zip(questions, both, strict=True)
            )
        )

    asyncio.run(run())
    stem = "<|user|>1<|assistant|>1<|end|>"
    a, b = questions
    assert talk.texts() == [
        f"{stem}<|user|>{a}<|assistant|>2<|end|><|user|>9<|assistant|>4<|end|>",
        f"{stem}<|user|>{b}<|assistant|>3<|end|><|user|>9<|assistant|>5<|end|>",
    ]
    assert talk.conversations[1].parent == (0, len(ids(stem)))
    assert len(assert_trained_once(talk)) == 10


def test_of_replies_with_equal_words_the_very_one_given_back_is_continued():
    talk = Talk(say=lambda request: [*ids("7"), *([END] if len(talk.asked) != 1 else [])])
    first = [user("1")]
    cut, ended = talk.chat(first), talk.chat(first)
    assert cut == ended
    talk.chat([*first, ended, user("2")])
    talk.chat([*first, cut, user("3")])
    assert talk.texts() == [
        "<|user|>1<|assistant|>7<|end|><|user|>3<|assistant|>7<|end|>",
        "<|user|>1<|assistant|>7<|end|><|user|>2<|assistant|>7<|end|>",
    ]
    cut_off, whole = talk.conversations
    assert [int(cut_off.trained[4]), int(whole.trained[4])] == [0, 1], "only one model said the end of its turn"
    assert len(assert_trained_once(talk)) == 7


def test_equal_calls_draw_different_noise_and_other_trajectories_other_noise():
    keys = set()
    for who in ({}, {"visit": 1}, {"attempt": 1}):
        talk = Talk(**who)
        for _ in range(3):
            talk.chat([user("1")])
        keys |= {request.key for request in talk.asked}
    assert len(keys) == 9
    again = Talk()
    again.chat([user("1")])
    assert again.asked[0].key in keys


def test_noise_keys_tell_apart_whatever_may_differ():
    usual = {"seed": 0, "visit": 0, "prompt": "p", "attempt": 0, "context": np.arange(3), "occurrence": 0}
    others = [
        {"seed": 1},
        {"visit": 1},
        {"visit": -1},
        {"prompt": "p|0"},
        {"attempt": 1},
        {"context": np.arange(4)},
        {"context": np.array([0, 2, 1])},
        {"occurrence": 1},
    ]
    keys = [noise_key(**usual), *(noise_key(**{**usual, **other}) for other in others)]
    assert len(set(keys)) == len(keys)
    assert noise_key(**{**usual, "context": np.arange(3, dtype=np.int32)}) == keys[0]
    assert all(0 <= key < 1 << 64 for key in keys)


@pytest.mark.parametrize(("asked", "given"), [(None, 8), (3, 3), (8, 8), (100, 8)])
def test_a_call_may_ask_for_fewer_tokens_than_the_recipe_allows(asked, given):
    talk = Talk()
    talk.chat([user("1")], max_new_tokens=asked)
    assert talk.asked[0].max_new_tokens == given


@pytest.mark.parametrize(("temperature", "given"), [(0.0, 0.0), (1e-320, 0.0), (1e-7, 0.0), (0.5, 0.5)])
def test_a_temperature_next_to_0_is_0(temperature, given):
    talk = Talk()
    talk.handle.sampling = replace(talk.handle.sampling, temperature=temperature)
    talk.chat([user("1")])
    assert talk.asked[0].temperature == given


@pytest.mark.parametrize("asked", [0, -1])
def test_a_call_for_no_tokens_is_refused(asked):
    talk = Talk()
    with pytest.raises(ValueError, match="at least 1"):
        talk.chat([user("1")], max_new_tokens=asked)
    assert talk.conversations == ()


def test_an_answer_is_cut_where_the_context_ends_and_what_would_follow_is_cut_before_its_first_token():
    talk = Talk(say=lambda request: ids("1234567890"), context=10)
    reply = talk.chat([user("11")])
    assert (reply.stop, len(reply.tokens)) == ("length", 6)
    nothing = talk.chat([user("11"), reply, user("2")])
    assert (nothing.text, nothing.tokens, nothing.stop, dict(nothing)["content"]) == ("", (), "length", "")
    again = talk.chat([user("11"), reply, user("2"), nothing, user("3")])
    assert (again.stop, talk.handle.full, len(talk.asked)) == ("length", 2, 1)
    (conversation,) = talk.conversations
    assert (len(conversation.tokens), conversation.stop) == (10, "length"), "no token of what did not fit"
    assert len(assert_trained_once(talk)) == 6


@pytest.mark.parametrize("spoken", [False, True])
def test_a_prompt_that_does_not_fit_by_itself_is_a_failure_whatever_was_said_elsewhere(spoken):
    talk = Talk(context=10)
    if spoken:
        talk.chat([user("11")])
    with pytest.raises(RolloutError, match="leaves no room in a context of 10"):
        talk.chat([user("1234567890")])
    assert (len(talk.conversations), talk.handle.full) == (spoken, 0)


def test_a_conversation_that_ended_its_turn_and_has_no_room_for_another_is_truncated():
    talk = Talk(context=12)
    reply = talk.chat([user("1")])
    assert reply.stop == "stop"
    assert talk.conversations[0].stop == "stop"
    assert talk.chat([user("1"), reply, user("12345678")]).stop == "length"
    assert talk.conversations[0].stop == "length"
    short = talk.chat([user("1"), reply, user("2")])
    assert (short.stop, talk.conversations[0].stop) == ("stop", "stop"), "another question had room"
    assert talk.handle.full == 1
    assert_trained_once(talk)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_the_last_turn_gets_the_room_that_is_left_to_the_last_token(room):
    talk = Talk(say=lambda request: [*ids("1"), END], context=5 + 3 + room)
    reply = talk.chat([user("1")])
    assert len(talk.conversations[0].tokens) == 5
    last = talk.chat([user("1"), reply, user("2")])
    assert (len(last.tokens), last.stop) == (room, "stop" if room == 2 else "length")
    assert len(talk.conversations[0].tokens) <= 5 + 3 + room


def test_a_branch_without_room_leaves_the_conversation_as_it_is_and_is_counted():
    talk = Talk(context=20)
    first = talk.chat([user("1")])
    second = talk.chat([user("1"), first, user("2")])
    assert second.stop == "stop"
    branch = talk.chat([user("1"), first, user("123456789012345")])
    assert (branch.stop, branch.tokens, talk.handle.full) == ("length", (), 1)
    (conversation,) = talk.conversations
    assert conversation.stop == "stop"


def test_a_rewritten_conversation_without_room_is_truncated_and_not_counted_as_rewritten():
    talk = Talk(say=lambda request: [*ids("<think>b</think>4"), END], template=STRIPS, limit=30, context=23)
    reply = talk.chat([user("1")])
    assert reply.stop == "stop"
    assert talk.chat([user("1"), reply, user("123456789012345678")]).stop == "length"
    assert (talk.handle.rewritten, talk.handle.full, len(talk.conversations)) == (0, 1, 1)
    assert talk.conversations[0].stop == "length"


def test_an_environment_that_asks_for_ever_where_there_is_no_room_is_told_to_end():
    talk = Talk(say=lambda request: ids("1234567890"), context=10)
    messages = [user("11")]
    with pytest.raises(RolloutError, match=r"no room .* end the episode where reply.stop is 'length'"):
        while True:
            messages += [talk.chat(messages), user("2")]
    assert talk.handle.full == 100


def test_conversations_that_came_to_nothing_leave_no_gap():
    talk = Talk(context=20)
    with pytest.raises(RolloutError):
        talk.chat([user("1234567890123456789")])
    first = [user("1")]
    reply = talk.chat(first)
    talk.chat([*first, reply, user("2")])
    talk.chat([*first, reply, user("3")])
    assert [conversation.parent for conversation in talk.conversations] == [None, (0, 5)]
    assert_trained_once(talk)


def test_an_aborted_call_is_a_failure_and_nothing_of_it_is_trained():
    async def aborted(request):
        return Completion(key=request.key, tokens=np.array([5]), logprobs=np.array([-1.0]), stop="abort", version=0)

    talk = Talk()
    talk.handle.generate = aborted
    with pytest.raises(RolloutError, match="aborted"):
        talk.chat([user("1")])
    assert talk.conversations == ()


def test_a_turn_that_was_cut_off_is_ended_by_the_template_as_context():
    talk = Talk(say=lambda request: ids("77"), limit=2)
    reply = talk.chat([user("1")])
    talk.chat([user("1"), reply, user("2")])
    (conversation,) = talk.conversations
    assert talk.texts() == ["<|user|>1<|assistant|>77<|end|><|user|>2<|assistant|>77"]
    assert [conversation.tokens[at] == END for at in np.flatnonzero(~conversation.trained)].count(True) == 1
    assert (conversation.trained.sum(), conversation.stop) == (4, "length")
    assert_trained_once(talk)


STRIPS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'].split('</think>')[-1] if not loop.last"
    " else m['content']) }}{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_a_template_that_rewrites_what_was_said_starts_a_new_conversation_which_is_counted():
    talk = Talk(say=lambda request: [*ids("<think>b</think>4"), END], template=STRIPS, limit=30)
    reply = talk.chat([user("1")])
    talk.chat([user("1"), reply, user("2")])
    assert talk.texts() == [
        "<|user|>1<|assistant|><think>b</think>4<|end|>",
        "<|user|>1<|assistant|>4<|end|><|user|>2<|assistant|><think>b</think>4<|end|>",
    ]
    assert talk.handle.rewritten == 1
    assert talk.conversations[1].parent is None
    assert len(assert_trained_once(talk)) == 2 * (len(ids("<think>b</think>4")) + 1)


def test_what_the_model_said_is_never_encoded_again():
    odd = [*ids("<|user|>"), *ids("1"), END]
    talk = Talk(say=lambda request: odd)
    reply = talk.chat([user("1")])
    assert reply.text == "1", "the special token is not part of the words"
    talk.chat([user("1"), reply, user("2")])
    (conversation,) = talk.conversations
    assert conversation.tokens.tolist()[3:6] == odd
    assert_trained_once(talk)


STEP = st.tuples(st.integers(0, 20), st.sampled_from(["1", "2", "ab"]), st.sampled_from([1, 2, 9]), st.booleans())


@given(program=st.lists(STEP, min_size=1, max_size=9))
def test_random_programs_of_calls_train_every_token_once(program):
    """Each step goes on from some earlier state with some question, asks for few tokens or many, alone or in pairs."""
    talk = Talk(context=60)

    async def run():
        states = [[]]
        for where, question, limit, twice in program:
            messages = [*states[where % len(states)], user(question)]
            calls = [talk.handle.chat(messages, max_new_tokens=limit) for _ in range(1 + twice)]
            for reply in await asyncio.gather(*calls, return_exceptions=True):
                if not isinstance(reply, RolloutError):
                    states.append([*messages, reply])

    asyncio.run(run())
    found = assert_trained_once(talk)
    assert len(found) == talk.sampled
    assert len({request.key for request in talk.asked}) == len(talk.asked)


def test_what_tokens_were_drawn_from_follows_them_through_every_call():
    talk = Talk()
    plain, drawn = talk._generate, iter(([3, 4], [5], [6]))

    async def told(request):
        completion = await plain(request)
        ids = [np.array(next(drawn), dtype=np.int32)] * len(completion.tokens)
        counts = np.array([len(each) for each in ids], dtype=np.int32)
        return replace(completion, kept=KeptTokens(counts=counts, ids=np.concatenate(ids)))

    talk.handle.generate = told
    first = [user("1")]
    reply = talk.chat(first)
    talk.chat([*first, reply, user("2")])
    (conversation,) = talk.conversations
    assert conversation.kept.counts.tolist() == [2, 2, 1, 1]
    assert conversation.kept.ids.tolist() == [3, 4, 3, 4, 5, 5]
    assert conversation.trained.sum() == len(conversation.kept.counts)


def test_an_engine_that_cuts_and_does_not_say_what_it_kept_is_an_error():
    talk = Talk()
    talk.handle.sampling = replace(talk.handle.sampling, top_p=0.9)
    with pytest.raises(EngineError, match="does not say from which tokens"):
        talk.chat([user("1")])
