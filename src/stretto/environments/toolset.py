"""Python functions as tools: what the model is told of them, and a call with what the model wrote.

The schema comes from type hints and docstring, by transformers' own function, as chat templates expect it. Arguments
are checked against the same hints by pydantic. Whatever goes wrong in a call becomes the text that the model gets.
Plain functions may block, so they run in threads; coroutines run here.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError, validate_call

from stretto.environments.base import Tool, ToolCall
from stretto.environments.failures import warn_once
from stretto.errors import MODEL_FAILURES, RolloutError
from stretto.sandbox.worker import said
from stretto.threads import Daemons

LONGEST = 20_000
"""Characters of a tool's answer; the rest is cut off, and that is said."""
THREADS = Daemons(64, "tools")
"""Where plain functions run. Nobody waits for one past the environment's deadline."""
ABANDONED: set[asyncio.Future[Any]] = set()
"""Calls of plain functions that go on although their trajectory has ended."""


class ToolFailure(RolloutError):
    """A tool of ours broke: nothing that the model is to blame for, so it ends the trajectory."""


class Toolset:
    """Some functions, by name."""

    def __init__(self, functions: Sequence[Callable[..., Any]], *, schemas: Sequence[Tool] | None = None) -> None:
        """ValueError where type hints or docstrings lack something; `schemas` are those made before of the same."""
        self.functions = {function.__name__: function for function in functions}
        self.schemas = tuple(schemas if schemas is not None else map(schema_of, functions))

    async def answer(self, call: ToolCall) -> tuple[str, bool]:
        """What a call comes to, as text for the model, and whether it could be made."""
        if call.error is not None:
            return f"error: {call.error}", False
        function = self.functions.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name[:100]!r}; there are {', '.join(self.functions)}", False
        try:
            return as_text(await called(validate_call(function), **call.arguments)), True
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
            return as_text(f"error: {wrong}"), False
        except (ToolFailure, *MODEL_FAILURES):  # a deadline that ends the run is nobody's answer
            raise
        except Exception as error:  # a tool may raise anything, and the model is told
            warn_once(f"the tool {call.name} failed, and the model was told so", error)
            return as_text(f"error: {type(error).__name__}: {said(error)}"), False


def schema_of(function: Callable[..., Any]) -> Tool:
    """What a chat template is told of a function. ValueError that says what its hints or docstring lack."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema: Tool = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return schema


async def called(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """What a function returns: awaited if it is a coroutine, in a thread otherwise.

    Whatever it raises comes as an Exception, but for what cancels a coroutine or interrupts the program.
    """
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        try:
            return await function(*arguments, **named)
        except BaseException as error:
            if isinstance(error, (Exception, asyncio.CancelledError, KeyboardInterrupt)):
                raise
            raise _ordinary(error) from error
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(THREADS, partial(_caught, function, *arguments, **named))
    try:
        return await asyncio.shield(future)
    finally:
        if not future.done():
            ABANDONED.add(future)
            future.add_done_callback(_forgotten)


def _caught(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """A call in a thread. Python itself acts upon some exceptions: those that end programs would leave the event loop,
    and a StopIteration is lost between thread and loop. In a thread none of them is the user's Ctrl-C."""
    try:
        return function(*arguments, **named)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise _ordinary(error) from error


def _ordinary(error: BaseException) -> Exception:
    told = RuntimeError(f"it raised {type(error).__name__}: {said(error)}")
    return told.with_traceback(error.__traceback__)


def _forgotten(future: asyncio.Future[Any]) -> None:
    ABANDONED.discard(future)
    if not future.cancelled():
        future.exception()  # nobody asks for it any more


def as_text(value: object) -> str:
    """A tool's answer as the model reads it."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n(the other {len(text) - LONGEST:,} characters are cut)"


def fitting(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the columns that a function takes: all, if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(columns)
    return {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}
