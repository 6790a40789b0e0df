"""What programs may ask over HTTP: JSON of strangers in, records out. Nothing here knows of a server.

Only what the endpoint answers is read; other keys are left alone, as servers of these APIs do. What would change the
answer and cannot be done (images, a tool that must be called, tokens drawn in another way than the recipe says) is
refused instead of ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from stretto.environments.base import Reply, Tool
from stretto.types import Message

DEEPEST = 32
"""Levels of lists and objects in what a template is given."""
MOST_CHOICES = 64
"""Answers to one request."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "min_tokens": (0,), "ignore_eos": (False,), "bad_words": ([],), "logit_bias": ({},),
    "allowed_token_ids": (), "top_logprobs": (0,), "functions": ([],), "chat_template": (),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "structured_outputs": (), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
}  # fmt: skip
"""Settings that cannot be had -> the values with which they change nothing; null is another."""
CUTTING = ("top_p", "top_k", "min_p")
"""Those that say which tokens may be drawn; the likeliest may always be."""
WHY: Mapping[str, str] = {
    "top_p": "the recipe decides how tokens are drawn; leave it out, or set engine.top_p there",
    "top_k": "the recipe decides how tokens are drawn; leave it out, or set engine.top_k there",
    "top_logprobs": "log-probabilities are those of the tokens that were drawn; leave it out",
    "functions": "tools have their place; use tools",
    "chat_template": "the recipe decides it; leave it out, or set task.chat_template there",
    "chat_template_kwargs": "the recipe decides what its template is told; leave it out, or set task.template there",
    "continue_final_message": "an answer is a message of its own; leave it out",
    "add_generation_prompt": "an answer is a message of its own; leave it out",
}
"""Why, and what to do, where it is not that the recipe decides how tokens are drawn."""


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
class Given:
    """What is so for the model that answers, whatever a request says: to ask for the same is no wish."""

    ends: Collection[int] = ()
    """The tokens that end answers."""
    top_p: float = 1.0
    """The share of the distribution that answers are drawn from."""
    top_k: int | None = None
    """Of how many tokens they are drawn at most."""
    greedy: bool = False
    """True if this request's answer is greedy, so that it does not matter from how many tokens it is drawn."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is told besides the messages."""

    def is_met(self, key: str, value: Any) -> bool:
        """Whether a setting asks for nothing else."""
        if key in CUTTING and self.greedy:
            return True
        if key == "chat_template_kwargs":
            return isinstance(value, dict) and value.items() <= self.template.items()
        return key in ("top_p", "top_k") and value == getattr(self, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentReply:
    """A reply in which tools were called, as a client has it."""

    reply: Reply
    """As the conversation has it."""
    message: Mapping[str, Any]
    """As it was sent."""


NOTHING = Given()
"""A model that draws from the whole distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A call with messages."""

    messages: Sequence[Message]
    """The whole chat."""
    tools: Sequence[Tool]
    """What the model may call."""
    max_new_tokens: int | None
    """Longest answer."""
    stop: Sequence[str]
    """Texts that end it."""
    choices: int
    """How many answers are wanted."""
    stream: bool
    """Whether the answer comes as a stream."""
    logprobs: bool
    """Whether it comes with log-probabilities."""
    token_ids: bool
    """Whether it comes with token ids."""
    tokens_by_id: bool
    """Whether log-probabilities name tokens by their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A call with token ids."""

    tokens: Sequence[int]
    """The whole context."""
    max_new_tokens: int | None
    """Longest answer."""
    stop: Sequence[str]
    """Texts that end it."""
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


def _no_parameters(given: Any) -> Any:
    return {"type": "object", "properties": {}} if given is None else given


class _ToolFunction(_Read):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Annotated[str, BeforeValidator(lambda given: given or "")] = ""
    parameters: Annotated[dict[str, Any], BeforeValidator(_no_parameters)] = _no_parameters(None)


class _Tool(_Read):
    type: Literal["function"]
    function: _ToolFunction


class _TextFormat(_Read):
    type: Literal["text"]


Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    Field(max_length=16),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else [] if given is None else given),
]
"""One text or several."""


class _Chat(_Read):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=10_000)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop = []
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: _TextFormat | None = None


class _Sampling(_Read):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    stop: Stop = []
    n: Literal[1] | None = None


class _Generate(_Read):
    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: _Sampling = _Sampling()
    stream: Literal[False] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None


def wish_of(settings: Any) -> SamplingWish:
    """How a request wants to be sampled; `settings` are the part of its body that says so."""
    wish: SamplingWish = _parsed(SamplingWish, settings)
    return wish


def chat_call(body: Any, replies: Mapping[str, SentReply], *, given: Given = NOTHING) -> ChatCall:
    """A call of /v1/chat/completions. `replies` are those in which tools were called, by the ids of the calls."""
    asked = _parsed(_Chat, body)
    _possible(body, given)
    _whole(body)
    tools = [tool.model_dump() for tool in asked.tools or []] if asked.tool_choice != "none" else []
    _shallow(tools)
    return ChatCall(
        messages=[_message(each, replies) for each in asked.messages],
        tools=tools,
        max_new_tokens=asked.max_completion_tokens or asked.max_tokens,
        stop=asked.stop,
        choices=asked.n or 1,
        stream=bool(asked.stream),
        logprobs=bool(asked.logprobs),
        token_ids=bool(asked.return_token_ids),
        tokens_by_id=bool(asked.return_tokens_as_token_ids),
    )


def token_call(body: Any, *, vocabulary: int, given: Given = NOTHING) -> TokenCall:
    """A call of /inference/v1/generate."""
    asked = _parsed(_Generate, body)
    _possible(body.get("sampling_params") or {}, given)
    if strange := [token for token in asked.token_ids if not 0 <= token < vocabulary]:
        raise BadRequest(f"token_ids: {strange[0]} is no token of a vocabulary of {vocabulary}")
    return TokenCall(
        tokens=asked.token_ids,
        max_new_tokens=asked.sampling_params.max_tokens,
        stop=asked.sampling_params.stop,
        logprobs=asked.sampling_params.logprobs is not None,
        request_id=asked.request_id,
    )


def _message(message: _Message, replies: Mapping[str, SentReply]) -> Message:
    """A message as environments write them. A reply in which tools were called is known by a call's id; one that was
    changed since it was sent is another message."""
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    # OpenAI's newer name of the system's messages; most templates leave out what they do not know.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": text}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
        sent = replies.get(message.tool_calls[0].id)
        if sent is not None and message.role == "assistant" and _unchanged(found, sent.message):
            return sent.reply
    found |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    return found


def _unchanged(message: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """White space at the ends of its words does not matter, nor how its arguments are written."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in sent["tool_calls"]
    ]
    return bool(message["tool_calls"] == calls and message["content"].strip() == (sent["content"] or "").strip())


def _arguments(call: _Call) -> Any:
    """Templates want them as an object."""
    try:
        found = json.loads(call.function.arguments.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"messages: the arguments of tool call {call.id[:64]!r} are no JSON") from error
    _shallow(found)
    return found


def _shallow(value: Any, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise BadRequest(f"tools and arguments may be nested {DEEPEST} levels deep")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _shallow(each, depth + 1)


def _possible(settings: Mapping[str, Any], given: Given) -> None:
    """Refuses what would change how tokens are drawn; clients may say that they do not want it."""
    for key, values in NEUTRAL.items():
        value = settings.get(key)
        if value is not None and value not in values and not given.is_met(key, value):
            why = WHY.get(key, "the recipe decides how tokens are drawn; leave it out")
            raise BadRequest(f"{key}: {str(value)[:40]} is not possible here: {why}")
    ends = settings.get("stop_token_ids") or []
    if not isinstance(ends, list) or not set(map(str, ends)) <= set(map(str, given.ends)):
        raise BadRequest("stop_token_ids: only those that end answers anyway; the recipe and the model's files decide")


def _whole(body: Any) -> None:
    """Refuses halves of characters, which JSON can write and nothing can encode."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the body has half a character in it (a lone surrogate, \\ud800 to \\udfff)") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deep") from error


def _parsed(kind: Any, body: Any) -> Any:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        # The alternative that was read farthest is the one that was meant.
        found = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
        where = ".".join(str(part) for part in found["loc"] if "[" not in str(part) and part != "str") or "the body"
        said = found["msg"].partition(" or instance of")[0].replace("a valid dictionary", "an object")
        raise BadRequest(f"{where}: {said}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deep") from error
