"""What a plug-in of each kind has to be, and whether an object of Python is that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from stretto.sandbox import reward_forms, signatures

Kind = Literal["algorithm", "environment", "reward", "source", "engine", "logger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind:
    """What a plug-in of a kind has to be."""

    parameters: tuple[str, ...]
    """What it is called with, by position."""
    wanted: str
    """What to write, in words."""
    asynchronous: bool = False
    """True for what is awaited."""
    method: str | None = None
    """The method of an object or class that is called instead, if that may be one."""
    tools: bool = False
    """True if a class will do whose public methods are tools, instead of one with `method`."""
    own_files: bool = False
    """True if only files of the user's are taken, because texts that others wrote are passed to it."""


KINDS: dict[Kind, PluginKind] = {
    "algorithm": PluginKind(parameters=("section",), wanted="def build(section) -> Algorithm"),
    "environment": PluginKind(
        parameters=("prompt", "model"),
        wanted="async def play(prompt, model) -> Outcome, a class with such a method run(self, prompt, model), or one "
        "whose public methods are tools",
        asynchronous=True,
        method="run",
        tools=True,
    ),
    "reward": PluginKind(
        parameters=("answer", "prompt", "signals"),
        wanted=reward_forms.WANTED,
        own_files=True,
    ),
    "source": PluginKind(parameters=("config",), wanted="def rows(config) -> rows or Prompts", own_files=True),
    "engine": PluginKind(parameters=("policy",), wanted="def make(policy) -> Engine"),
    "logger": PluginKind(
        parameters=("folder",), wanted="a class with __init__(self, folder), metrics(self, step, values), close(self)"
    ),
}
"""Every kind of plug-in."""


def unfit(kind: Kind, found: Any) -> str | None:
    """Why an object is not what its kind asks for, or none."""
    asked = KINDS[kind]
    called = found
    if asked.method and not inspect.isroutine(found):
        if inspect.isclass(found) and (why := _refuses(found, ())):
            return f"is a class that cannot be made without arguments: {why}"
        if asked.tools and tool_methods(found):
            return None
        called = getattr(found, asked.method, None if inspect.isclass(found) or not callable(found) else found)
        if called is None:
            kept = f"is {'a class' if inspect.isclass(found) else f'an object of {type(found).__name__}'}"
            return f"{kept} without a method {asked.method}"
    if not callable(called):
        return f"is not callable; it is {type(called).__name__}"
    if kind != "reward" and asked.asynchronous != _is_async(called):
        return "is not async" if asked.asynchronous else "is async, and nobody would await it"
    if kind == "reward" and (parameters := reward_forms.Parameters.of(called)):
        return reward_forms.refusal(parameters)
    extra = (None,) if inspect.isclass(found) and asked.method else ()
    if why := _refuses(called, (*extra, *asked.parameters)):
        return f"cannot be called with ({', '.join(asked.parameters)}): {why}"
    # What a decorator gives a function is in the order of neither, perhaps.
    names = [] if hasattr(called, "__wrapped__") else _names(called)[len(extra) :]
    return signatures.out_of_order(names, asked.parameters)


def tool_methods(found: Any) -> list[str]:
    """The methods of a class that are tools, where it has no `run`: public ones, but for those that begin and judge."""
    if not inspect.isclass(found) or hasattr(found, "run"):
        return []
    return [name for name, _ in inspect.getmembers(found, inspect.isfunction) if is_tool(name)]


def is_tool(name: str) -> bool:
    """True for the name of a method that the model may call."""
    return not name.startswith("_") and name not in ("reset", "get_reward")


def _is_async(called: Any) -> bool:
    called = inspect.unwrap(called)
    while isinstance(called, partial):
        called = inspect.unwrap(called.func)
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)


def _refuses(called: Callable[..., Any], arguments: Sequence[Any]) -> str | None:
    """Why something cannot be called with so many arguments; what does not say so may be."""
    try:
        inspect.signature(called).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


def _names(called: Callable[..., Any]) -> list[str]:
    """The names of its parameters; none of what does not say."""
    try:
        return list(inspect.signature(called).parameters)
    except ValueError:
        return []


def function_of(kind: Kind, found: Any) -> Any:
    """What is called: of an object its method; a class is made anew for every call, so that calls share nothing."""
    method = KINDS[kind].method
    if method is None or inspect.isroutine(found):
        return found
    if KINDS[kind].tools and tool_methods(found):
        return found
    if inspect.isclass(found):

        async def anew(*arguments: Any) -> Any:
            return await getattr(found(), method)(*arguments)

        return anew
    return getattr(found, method, found)
