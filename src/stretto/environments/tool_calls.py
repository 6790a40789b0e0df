"""What the model said -> which tools it calls, with which arguments.

Two readers. `renderers`, where it is installed and knows the tokenizer by its name: it reads the formats of some thirty
families from token ids. Else the format that the chat template itself shows: Hermes and Qwen, Llama, Mistral, and the
one line of scratch models, `name(argument)`. A template that is told of no tools is introduced to them with Hermes'
words (`tool_forms`). A call that cannot be read is a `ToolCall` with an error for the model: what a model wrote never
raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from stretto.environments.base import Tool, ToolCall
from stretto.errors import RolloutError
from stretto.recipe.schema import SCRATCH_TEMPLATE

MOST = 32
"""Calls of one reply that are made; a model may write for as long as it is let."""
MENTION = re.compile(r"\btools\b")
HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
NAMED = re.compile(r"[A-Za-z0-9]{9}")
"""What Mistral's models name calls by, and what their templates ask for."""

Reading = Iterator[ToolCall]


class Decoder(Protocol):
    """What reading needs of a tokenizer."""

    chat_template: Any

    def decode(self, token_ids: Any, **keywords: Any) -> Any: ...


class ToolCallReader:
    """Reads the calls in replies of one tokenizer's model."""

    def __init__(self, tokenizer: Decoder) -> None:
        self.tokenizer = tokenizer
        self._library = _library(tokenizer)
        self._format = None if self._library else _own_format(str(tokenizer.chat_template))

    def words(self, tokens: Sequence[int]) -> str:
        """What a reply with calls says beside them."""
        if self._library is not None:
            return str(self._library.parse_response(list(tokens)).content or "").strip()
        assert self._format is not None
        return self._format.words(str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))).strip()

    def read(self, tokens: Sequence[int], tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """The calls in a reply, in order; its end of turn is not among the tokens."""
        if self._library is not None:
            found = _of_library(self._library, list(tokens), [dict(tool) for tool in tools])
        else:
            assert self._format is not None
            found = self._format.read(str(self.tokenizer.decode(list(tokens), skip_special_tokens=False)), tools)
        return tuple(call for call, _ in zip(found, range(MOST), strict=False))


def named(calls: Sequence[ToolCall], turn: int) -> tuple[ToolCall, ...]:
    """The calls of a reply, each with an id: that of the model's, or the numbers of turn and call."""
    return tuple(replace(call, id=call.id or f"{turn:05}{at:04}"[-9:]) for at, call in enumerate(calls))


def renders_tools(template: str) -> bool:
    """True if a chat template tells the model of tools itself. That of scratch models tells nothing: they learn it."""
    return template == SCRATCH_TEMPLATE or MENTION.search(template) is not None


# Formats --------------------------------------------------------------------------------------------------------------


def hermes(text: str, tools: Sequence[Tool]) -> Reading:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as often as the model likes."""
    for match in HERMES.finditer(text):
        yield of_json(match[1]) if match[2] else ToolCall(name="", error="the <tool_call> is not closed")


def llama(text: str, tools: Sequence[Tool]) -> Reading:
    """One JSON object, {"name": ..., "parameters": {...}}, and nothing else."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if body.startswith("{") and '"name"' in body:
        yield of_json(body)


def mistral(text: str, tools: Sequence[Tool]) -> Reading:
    """[TOOL_CALLS] and a JSON list of calls; or, in later versions, each call as [TOOL_CALLS]name[ARGS]{...}."""
    _, mark, body = text.partition(MISTRAL)
    if not mark:
        return
    if ARGUMENTS in body:
        for each in body.split(MISTRAL):
            name, _, arguments = each.partition(ARGUMENTS)
            yield checked(name.partition("[")[0].strip(), arguments)
        return
    try:
        calls = json.loads(body)
    except (ValueError, RecursionError):
        yield ToolCall(name="", error="what follows [TOOL_CALLS] is no JSON list")
        return
    for call in calls if isinstance(calls, list) else [calls]:
        yield _from_object(call)


def one_line(text: str, tools: Sequence[Tool]) -> Reading:
    """name(argument): the whole reply, the text between the parentheses is the tool's first parameter."""
    name, opened, rest = text.strip().partition("(")
    tool = next((tool["function"] for tool in tools if tool["function"]["name"] == name), None)
    if not opened or tool is None:
        return
    if not rest.endswith(")"):
        yield ToolCall(name=name, error="the call has no closing parenthesis at its end")
        return
    first = next(iter(tool["parameters"]["properties"]), None)
    yield ToolCall(name=name, arguments={first: rest[:-1]} if first is not None and rest != ")" else {})


def of_json(text: str) -> ToolCall:
    """A call written as one JSON object."""
    try:
        return _from_object(json.loads(text))
    except (ValueError, RecursionError):
        return ToolCall(name="", error="the call is no JSON object")


def _from_object(call: object) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return ToolCall(name="", error='the call is no object with a "name" and "arguments"')
    arguments, given = call.get("arguments", call.get("parameters", {})), call.get("id")
    return checked(call["name"], arguments, given if isinstance(given, str) and NAMED.fullmatch(given) else "")


def checked(name: str, arguments: object, given: str = "") -> ToolCall:
    """A call whose arguments are an object, or the text of one, as some models write it."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        return ToolCall(name=name, id=given, error='"arguments" is no object')
    return ToolCall(name=name, id=given, arguments=dict(arguments))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written."""

    read: Callable[[str, Sequence[Tool]], Reading]
    """The calls in a text."""
    words: Callable[[str], str] = lambda text: ""
    """What a text with calls says beside them."""


FORMATS = (
    (re.compile(r"\A(?!.*<function=).*<tool_call>", re.DOTALL), CallFormat(hermes, partial(HERMES.sub, ""))),
    (re.compile(re.escape(MISTRAL)), CallFormat(mistral, lambda text: text.partition(MISTRAL)[0])),
    (re.compile(r'\{\s*\\?"name\\?"\s*:[^{}]*\\?"parameters\\?"\s*:'), CallFormat(llama)),
)
"""What a template says that shows a format -> the format."""


def _own_format(template: str) -> CallFormat:
    """How the calls of a template's model are written."""
    if template == SCRATCH_TEMPLATE:
        return CallFormat(one_line)
    if not renders_tools(template):
        return FORMATS[0][1]  # it was introduced to it
    for shown, found in FORMATS:
        if shown.search(template):
            return found
    raise RolloutError(
        "the chat template tells the model of tools, in a format that is not known here; "
        "pip install renderers, which knows more, or use a chat template that shows <tool_call>"
    )


# The library ----------------------------------------------------------------------------------------------------------


def _library(tokenizer: Any) -> Any:
    """The reader of `renderers` for this tokenizer, if there is one. It is chosen by name, without asking any hub."""
    name = str(getattr(tokenizer, "name_or_path", ""))
    if "/" not in name or find_spec("renderers") is None:
        return None
    try:
        from renderers.base import MODEL_RENDERER_MAP, create_renderer  # type: ignore[import-untyped]
    except ImportError:  # 0.1.12 imports httpx without asking for it
        return None
    if name not in MODEL_RENDERER_MAP:
        return None
    return create_renderer(tokenizer)


def _of_library(library: Any, tokens: list[int], tools: list[dict[str, Any]]) -> Reading:
    for call in library.parse_response(tokens, tools=tools).tool_calls:
        if str(call.status) == "ok" and call.name:
            yield checked(call.name, call.arguments or {})
        else:
            yield ToolCall(name=call.name or "", error=f"the call cannot be read: {call.status}")
