"""What programs may ask over HTTP: JSON of strangers in, records out. Nothing here knows of a server.

Only what the endpoint answers is read; other keys are left alone, as servers of these APIs do. What would change the
answer and cannot be done (several choices, images, a tool that must be called) is refused instead of ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.environments.base import Reply, Tool
from stretto.types import Message

DEEPEST = 32
"""Levels of lists and objects in what a template is given."""


class BadRequest(Exception):
    """A request that cannot be answered."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class SamplingWish(BaseModel):
    """How a request wants to be sampled, for a model that is not trained meanwhile."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    """0 is greedy; none: as the recipe says."""
    seed: int | None = None
    """The noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A call with messages."""

    messages: Sequence[Message]
    """The whole chat."""
    tools: Sequence[Tool]
    """What the model may call."""
    max_new_tokens: int | None
    """Longest answer."""
    wish: SamplingWish
    """How it is to be sampled."""
    stream: bool
    """Whether the answer comes as a stream."""
    logprobs: bool
    """Whether it comes with log-probabilities."""
    token_ids: bool
    """Whether it comes with token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A call with token ids."""

    tokens: Sequence[int]
    """The whole context."""
    max_new_tokens: int | None
    """Longest answer."""
    wish: SamplingWish
    """How it is to be sampled."""
    logprobs: bool
    """Whether the answer comes with log-probabilities."""
    request_id: str | None
    """What the caller calls it."""


class _Read(BaseModel):
    """Strict about what it reads."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Text(_Read):
    type: Literal["text"]
    text: str


class _Function(_Read):
    name: str
    arguments: str = "{}"


class _Call(_Read):
    id: str
    function: _Function


class _Message(_Read):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _ToolFunction(_Read):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class _Tool(_Read):
    type: Literal["function"]
    function: _ToolFunction


class _TextFormat(_Read):
    type: Literal["text"]


class _Refused(_Read):
    """What would change the answer and cannot be done; a request may say that it does not want it."""

    stop: Annotated[list[str], Field(max_length=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: _TextFormat | None = None


class _Chat(_Refused):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=10_000)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


class _Sampling(_Refused):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    n: Literal[1] | None = None


class _Generate(_Read):
    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: _Sampling = _Sampling()
    stream: Literal[False] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None


def chat_call(body: Any, replies: Mapping[str, Reply]) -> ChatCall:
    """A call of /v1/chat/completions. `replies` are those in which tools were called, by the ids of the calls."""
    asked = _parsed(_Chat, body)
    tools = [tool.model_dump() for tool in asked.tools or []] if asked.tool_choice != "none" else []
    _shallow(tools)
    return ChatCall(
        messages=[_message(each, replies) for each in asked.messages],
        tools=tools,
        max_new_tokens=asked.max_completion_tokens or asked.max_tokens,
        wish=_parsed(SamplingWish, body),
        stream=bool(asked.stream),
        logprobs=bool(asked.logprobs),
        token_ids=bool(asked.return_token_ids),
    )


def token_call(body: Any, *, vocabulary: int) -> TokenCall:
    """A call of /inference/v1/generate."""
    asked = _parsed(_Generate, body)
    if strange := [token for token in asked.token_ids if not 0 <= token < vocabulary]:
        raise BadRequest(f"token_ids: {strange[0]} is no token of a vocabulary of {vocabulary}")
    return TokenCall(
        tokens=asked.token_ids,
        max_new_tokens=asked.sampling_params.max_tokens,
        wish=_parsed(SamplingWish, body.get("sampling_params") or {}),
        logprobs=asked.sampling_params.logprobs is not None,
        request_id=asked.request_id,
    )


def _message(message: _Message, replies: Mapping[str, Reply]) -> Message:
    """A message as environments write them; a reply in which tools were called is known by the calls' ids."""
    known = {id(reply): reply for call in message.tool_calls or () if (reply := replies.get(call.id)) is not None}
    if message.role == "assistant" and len(known) == 1:
        return next(iter(known.values()))
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    found: dict[str, Any] = {"role": message.role, "content": text}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    found |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    return found


def _arguments(call: _Call) -> Any:
    """Templates want them as an object."""
    try:
        found = json.loads(call.function.arguments)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"messages: the arguments of tool call {call.id[:64]!r} are no JSON") from error
    _shallow(found)
    return found


def _shallow(value: Any, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise BadRequest(f"tools and arguments may be nested {DEEPEST} levels deep")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _shallow(each, depth + 1)


def _parsed(kind: Any, body: Any) -> Any:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        if _Refused.model_fields.keys() & set(first["loc"]):
            raise BadRequest(f"{where}: cannot be done here, and would change the answer; leave it out") from error
        raise BadRequest(f"{where}: {first['msg']}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deep") from error
