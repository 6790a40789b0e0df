"""The seam between an environment and the model: plain Python that talks, and an outcome.

An environment is `async def run(prompt, model) -> Outcome`. It calls `model.chat(messages)` as often as it likes.
Reply messages carry their token ids, so passing a reply back extends the conversation it came from without encoding
text again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from stretto.types import Message, Outcome, Prompt, StopReason

Tool = Mapping[str, Any]
"""A tool as chat templates are told of it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool as the model wrote it, whether it can be made or not."""

    name: str
    """The tool; empty where the model named none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What it is called with, by parameter."""
    id: str = ""
    """What names it: nine letters or digits, the model's own where it wrote them. In a reply every call has one."""
    error: str | None = None
    """Why nobody can make this call, in words for the model; none if it can be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a program reaches the model of one trajectory over HTTP, as it would reach OpenAI or vLLM."""

    url: str
    """http://127.0.0.1:PORT: `/v1/chat/completions` and `/inference/v1/generate` are below it."""
    key: str
    """What says which trajectory asks: the API key, sent as a bearer token."""

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's API call `base_url`."""
        return f"{self.url}/v1"


class Reply(dict[str, Any]):
    """An assistant message (`role`, `content`) that remembers the token ids it came from."""

    def __init__(
        self,
        *,
        text: str,
        tokens: tuple[int, ...],
        stop: StopReason,
        tool_calls: tuple[ToolCall, ...] = (),
        turn: int = 0,
        words: str | None = None,
        apart: bool = False,
    ) -> None:
        """`turn` counts the trajectory's calls of the model, from 0; `Outcome.turn_rewards` are in that order.

        `words` are the text without the calls of tools. `apart`: the message has the two in places of their own, as
        some chat templates want them.
        """
        super().__init__(role="assistant", content=text)
        self.words = text if words is None else words
        self.apart = apart
        if apart and tool_calls:
            self |= {"content": self.words, "tool_calls": [_written(call) for call in tool_calls]}
        self.text = text
        self.tokens = tokens
        self.stop = stop
        self.tool_calls = tool_calls
        self.turn = turn


def _written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name or "unknown", "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


class Model(Protocol):
    """The model as an environment sees it."""

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Tool] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """The next assistant message. A list that starts with an earlier conversation's messages continues it.

        A text instead of a list is one message of the user's.

        With `tools`, the chat template tells the model of them, and `reply.tool_calls` holds what it calls. The first
        of the texts `stop` that comes ends the reply; it was sampled and is trained, and the reply's text ends before.

        A reply with stop "length" was cut off. It is empty where the conversation has filled the context: end the
        episode then, with what there is, and it is judged as it stands.
        """
        ...

    async def address(self) -> Address:
        """Where any program reaches this model: what it samples there is trained like what `chat` samples.

        It is open until the trajectory ends.
        """
        ...


def messages_of(given: object) -> list[Message]:
    """Return what `chat` was given as messages; a text is one message of the user's. ValueError for anything else."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    fix = 'give [{"role": "user", "content": "..."}], such as [*prompt.messages], or a text'
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise ValueError(f"messages: {given!r:.80} is {_kind(given)}, no list of messages\n    fix: {fix}")
    found: list[Any] = list(given)
    if not found:
        raise ValueError(f"messages: the list is empty\n    fix: {fix}")
    for place, message in enumerate(found):
        if not isinstance(message, Mapping):
            reason = f"{message!r:.80} is {_kind(message)}, no message"
        elif not isinstance(message.get("role"), str):
            reason = f"{dict(message)!r:.80} has no role, which is a text such as user"
        elif not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            reason = f"{dict(message)!r:.80} has no content, which is a text"
        else:
            continue
        raise ValueError(f"messages[{place}]: {reason}\n    fix: {fix}")
    return found


def most_tokens(given: object) -> int | None:
    """Return `max_new_tokens` as `chat` was given it. ValueError where that is no whole number above 0."""
    if given is None:
        return None
    if not isinstance(given, SupportsIndex) or given.__index__() < 1:
        reason = f"{given!r:.80} is no limit: it must be a whole number, at least 1"
        raise ValueError(f"max_new_tokens: {reason}\n    fix: leave it out, or give a number such as 64")
    return given.__index__()


def tools_of(given: object) -> list[Tool]:
    """Return the tools that `chat` was given. ValueError where one is no schema."""
    fix = 'give {"type": "function", "function": {...}}, which transformers.utils.get_json_schema(function) makes'
    several = isinstance(given, Iterable) and not isinstance(given, (str, Mapping))
    found: list[Any] = list(given) if several else [given]  # type: ignore[call-overload]
    for tool in found:
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools: {tool!r:.80} is {_kind(tool)}, no schema of a tool\n    fix: {fix}")
    return found


def stop_texts(given: object) -> tuple[str, ...]:
    """Return the texts that end a reply. ValueError where one is no text, or empty, which everything holds."""
    found = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    for text in found:
        if not isinstance(text, str) or not text:
            reason = f"{text!r:.80} cannot end a reply: it must be a text that is not empty"
            raise ValueError(f'stop: {reason}\n    fix: give texts, such as stop=["</answer>"]')
    return found


def is_number(value: object) -> bool:
    """Return true for a finite number, also of numpy or torch."""
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]  # any object is allowed
    except (TypeError, ValueError):
        return False


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can show how it is played; the warm-up of scratch models imitates it."""

    def demonstrate(self, prompt: Prompt, turn: int, messages: Sequence[Message]) -> str:
        """What a good player would say in a call of the model; `turn` counts the trajectory's calls from 0."""
        ...


class Environment(Protocol):
    """Runs one attempt at one prompt; called once per trajectory, many at a time."""

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """Talks to the model and says what came of it."""
        ...
