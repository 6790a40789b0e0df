"""The model as one trajectory sees it: chat calls in, conversations with exact token ids out.

A call continues the conversation whose messages its list starts with; only what is new is rendered. If it starts with
an earlier state of one, it branches off there and shares those tokens. Otherwise it opens a conversation of its own.
A sampled token is trained in the conversation whose call sampled it, and nowhere else.

A conversation may fill the model's context. That is the model's doing as much as anybody's, so it is no failure: the
turn that has no room is cut off before its first token, as one that runs out of room is cut off after some, and the
environment ends the episode with what there is. A prompt that does not fit by itself is a failure.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.engines.base import Completion, Request, earlier_first, noise_key
from stretto.environments.base import Address, Reply, Tool, messages_of, most_tokens, stop_texts, tools_of
from stretto.environments.open_conversation import OpenConversation
from stretto.environments.render import LongerThanContext, Renderer, Tokens
from stretto.environments.tool_calls import named
from stretto.errors import EngineError, RolloutError
from stretto.types import Conversation, Message, Prompt

if TYPE_CHECKING:
    from stretto.environments.wire import SamplingWish

MOST_FULL = 100
"""Turns without room that an environment is given to end its episode; one that asks until it hears a certain word would
ask for ever."""

COLDEST = 1e-6
"""Lowest temperature that is not 0: below it nothing but the likeliest token is left, and logits overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How every call of a trajectory is sampled."""

    seed: int
    """The run's seed."""
    temperature: float
    """0 is greedy, and so is what is next to it (COLDEST)."""
    max_new_tokens: int
    """Longest answer of one call, unless the call asks for less."""
    context: int
    """Longest conversation the model was made for."""
    stop_texts: tuple[str, ...] | None = ()
    """Texts that end an answer; none if the engine can end answers at tokens alone."""
    top_p: float = 1.0
    """Answers are drawn from the likeliest tokens that have this probability together."""
    top_k: int | None = None
    """Answers are drawn from so many of the likeliest tokens at most."""

    @property
    def truncated(self) -> bool:
        """True if answers are drawn from a part of the distribution, which then has to come with them."""
        return self.top_p < 1.0 or self.top_k is not None


class ModelHandle:
    """What an environment gets as `model`."""

    def __init__(
        self,
        *,
        prompt: Prompt,
        visit: int,
        attempt: int,
        sampling: Sampling,
        renderer: Renderer,
        generate: Callable[[Request], Awaitable[Completion]],
        reach: Callable[[ModelHandle], Awaitable[Address]] | None = None,
    ) -> None:
        """`reach` gives the handle an address."""
        self.reach = reach
        self.prompt, self.visit, self.attempt = prompt, visit, attempt
        self.sampling, self.renderer, self.generate = sampling, renderer, generate
        self.drafts: list[OpenConversation] = []
        self.rewritten = self.full = 0
        self.calls = 0
        self.seen: Counter[bytes] = Counter()

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Tool] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """The next assistant message."""
        messages, max_new_tokens = messages_of(messages), most_tokens(max_new_tokens)
        ends = self._possible_ends(stop)
        asked = [_copied(message) for message in messages]  # the environment may change its messages later
        told = deepcopy(tools_of(tools)) if tools else []
        draft = self._place(asked, messages, told)
        call, self.calls = self.calls, self.calls + 1
        if draft is None:
            await self._cut_off()
            return Reply(text="", tokens=(), stop="length", turn=call)
        completion = await self._speak(draft, max_new_tokens, call, ends)
        draft.opening = draft.opening or len(asked)
        tokens = completion.tokens.tolist()
        calls = named(self.renderer.tool_calls(tokens, told), call)
        reply = Reply(
            text=_before(ends, self.renderer.text(tokens)),
            tokens=tuple(tokens),
            stop=completion.stop,
            tool_calls=calls,
            turn=call,
            words=self.renderer.words(tokens) if calls else None,
            apart=self.renderer.calls_apart if calls else False,
        )
        draft.messages = [*asked, dict(reply)]
        draft.replies.append(reply)
        draft.turns.append((len(draft.messages), len(draft.tokens)))
        return reply

    async def complete(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """What the model says after tokens that a program has put together by itself.

        They continue the conversation whose tokens they start with up to the end of one of its calls.
        """
        ends = self._possible_ends(stop)
        draft = self._place_tokens(list(tokens))
        call, self.calls = self.calls, self.calls + 1
        if draft is None:
            await self._cut_off()
            nothing = np.zeros(0)
            return Completion(key=0, tokens=nothing.astype(np.int64), logprobs=nothing, stop="length", version=0)
        completion = await self._speak(draft, max_new_tokens, call, ends)
        draft.messages = []  # no list of messages continues it any more
        draft.turns.append((0, len(draft.tokens)))
        return completion

    def sampled(self, reply: Reply) -> tuple[list[int], list[float]]:
        """The tokens before a reply, and the log-probabilities of its own; nothing of one that had no room."""
        for draft in self.drafts:
            for said, (_, end) in zip(draft.replies, draft.turns, strict=False):
                if said is reply:
                    begin = end - len(reply.tokens)
                    return draft.tokens[:begin], draft.logprobs[begin:end]
        return [], []

    @property
    def named(self) -> bool:
        """False: agents name the model that they were written for, and a trajectory has one."""
        return False

    def at(self, wish: SamplingWish) -> ModelHandle:
        """Itself: what is trained is sampled as the run says."""
        return self

    @property
    def context(self) -> int:
        """Longest conversation in tokens."""
        return self.sampling.context

    async def address(self) -> Address:
        """Where programs reach this model."""
        if self.reach is None:
            raise RolloutError("this model is not served over HTTP; ask it with model.chat")
        return await self.reach(self)

    def _possible_ends(self, stop: str | Sequence[str]) -> tuple[str, ...]:
        """The texts that end a call. RolloutError where the engine does not look for any."""
        if (ends := stop_texts(stop)) and self.sampling.stop_texts is None:
            reason = "stop: this engine ends answers at tokens and at no texts"
            raise RolloutError(f"{reason}; cut the reply yourself, or use engine.kind: native")
        return ends

    async def _speak(
        self, draft: OpenConversation, max_new_tokens: int | None, call: int, ends: tuple[str, ...]
    ) -> Completion:
        """Samples what the model says next in a conversation, which grows by that."""
        try:
            completion = await self.generate(self._request(draft, max_new_tokens, ends))
            if completion.stop == "abort":
                raise RolloutError("the call was aborted before the model had finished")
        except BaseException:  # nobody waits for it any more, and a program may ask again
            draft.rewind()
            raise
        if self.sampling.truncated and completion.kept is None:
            raise EngineError("the engine draws from a part of the distribution and does not say from which tokens")
        first = not draft.calls
        draft.extend(completion.tokens.tolist(), completion.logprobs.tolist())
        draft.kept.append(completion.kept)
        draft.experts = completion.experts if first else earlier_first(draft.experts, completion.experts)
        draft.stop, draft.version = completion.stop, completion.version
        draft.calls.append((call, len(completion.tokens)))
        return completion

    async def _cut_off(self) -> None:
        """A turn that has no room."""
        if self.full >= MOST_FULL:
            raise RolloutError(
                f"it went on asking after {MOST_FULL} turns for which there was no room in a context of "
                f"{self.sampling.context}; end the episode where reply.stop is 'length'"
            )
        self.full += 1
        await asyncio.sleep(0)  # others run, and deadlines pass, where an environment asks nothing else

    def conversations(self) -> tuple[Conversation, ...]:
        """Every conversation in which the model has spoken."""
        spoken = [index for index, draft in enumerate(self.drafts) if draft.turns]
        places = {index: place for place, index in enumerate(spoken)}
        return tuple(self.drafts[index].finished(places) for index in spoken)

    def _place(
        self, messages: list[dict[str, Any]], given: Sequence[Message], tools: Sequence[Tool]
    ) -> OpenConversation | None:
        """The conversation this call speaks in, its context complete; none where one that goes on has no room."""
        index, turn = self._longest_match(messages, given, tools)
        if index is None:
            self.rewritten += self._changed(messages)
            opening = self.renderer.open(messages, tools=tools, context=self.context)
            return self._opened(opening.tolist(), parent=None, tools=tools)
        draft = self.drafts[index]
        count, length = draft.turns[turn]
        last = draft.tokens[length - 1]
        goes_on = turn == len(draft.turns) - 1 and len(draft.tokens) == length
        render, context = self.renderer, self.context
        try:
            delta = render.delta(draft.messages[:count], messages[count:], last=last, tools=tools, context=context)
            new = (render.open(messages, tools=tools, context=context) if delta is None else delta).tolist()
            before = draft.tokens[:length] if delta is not None else []
            fits = len(before) + len(new) < context
        except LongerThanContext:
            fits = False
        if not fits:
            if goes_on:
                draft.stop = "length"
            return None
        self.rewritten += delta is None or self._changed(messages[count:])
        if delta is None:
            return self._opened(new, parent=None, tools=tools)
        if goes_on:
            draft.extend(new)
            return draft
        return self._opened([*before, *new], parent=(index, length), tools=tools)

    def _changed(self, messages: Sequence[Message]) -> bool:
        """True if somebody gives back other words than the model's: they continue nothing that it said. Examples of a
        prompt were there from the beginning."""
        given = [message for draft in self.drafts for message in draft.messages[: draft.opening]]
        strange = (each["role"] == "assistant" and each not in given for each in messages)
        return any(draft.turns for draft in self.drafts) and any(strange)

    def _place_tokens(self, tokens: list[int]) -> OpenConversation | None:
        """The same for a call that brings its context as tokens."""
        ends = (
            (length, index, turn)
            for index, draft in enumerate(self.drafts)
            for turn, (_, length) in enumerate(draft.turns)
            if tokens[:length] == draft.tokens[:length]
        )
        length, index, turn = max(ends, default=(0, 0, 0))
        draft = self.drafts[index] if length else None
        goes_on = draft is not None and turn == len(draft.turns) - 1 and len(draft.tokens) == length
        if draft is not None and len(tokens) >= self.sampling.context:
            if goes_on:
                draft.stop = "length"
            return None
        if draft is not None and goes_on:
            draft.extend(tokens[length:])
            return draft
        return self._opened(tokens, parent=(index, length) if length else None, tools=())

    def _longest_match(
        self, messages: list[dict[str, Any]], given: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[int | None, int]:
        """(conversation, turn) whose messages this list starts with: the longest; of equals, the one whose very
        replies were `given` back."""
        best: tuple[int | None, int] = (None, 0)
        most = (0, 0)
        for index, draft in enumerate(self.drafts):
            if draft.tools != tools or not draft.messages:  # opened with tokens
                continue
            own = 0
            for turn, (count, _) in enumerate(draft.turns):
                if count > len(messages) or draft.messages[:count] != messages[:count]:
                    break
                own += given[count - 1] is draft.replies[turn]
                if (count, own) > most:
                    best, most = (index, turn), (count, own)
        return best

    def _opened(self, context: list[int], *, parent: tuple[int, int] | None, tools: Sequence[Tool]) -> OpenConversation:
        draft = OpenConversation(parent=parent, tools=tools)
        draft.extend(context)
        self.drafts.append(draft)
        return draft

    def _request(self, draft: OpenConversation, max_new_tokens: int | None, ends: tuple[str, ...]) -> Request:
        room = self.sampling.context - len(draft.tokens)
        if room < 1 or not draft.tokens:
            raise RolloutError(
                f"a conversation of {len(draft.tokens)} tokens leaves no room in a context of {self.sampling.context}"
            )
        context: Tokens = np.array(draft.tokens, dtype=np.int64)
        occurrence = self.seen[context.tobytes()]
        self.seen[context.tobytes()] += 1
        return Request(
            key=noise_key(
                seed=self.sampling.seed,
                visit=self.visit,
                prompt=self.prompt.id,
                attempt=self.attempt,
                context=context,
                occurrence=occurrence,
            ),
            tokens=context,
            max_new_tokens=min(max_new_tokens or room, self.sampling.max_new_tokens, room),
            stop=self.renderer.stop,
            stop_texts=(*(self.sampling.stop_texts or ()), *ends),
            temperature=self.sampling.temperature if self.sampling.temperature >= COLDEST else 0.0,
        )


def _before(ends: Sequence[str], text: str) -> str:
    """A reply up to the first of the texts that were to end it."""
    return text[: min((place for end in ends if (place := text.find(end)) >= 0), default=len(text))]


def _copied(message: Message) -> dict[str, Any]:
    """A message that nobody else can change; most hold nothing but text."""
    return {key: value if isinstance(value, str) else deepcopy(value) for key, value in dict(message).items()}
