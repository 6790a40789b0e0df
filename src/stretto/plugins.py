"""The one place where `module:name` becomes a thing: algorithms, environments, rewards, sources, engines and loggers.

`problems` says what is wrong with a name from files alone, without running a line of the user's; `resolve` imports it,
in this process or in a worker, and says what is wrong with what is there. Modules lie in the recipe's folder or in the
working folder (`folders_of`), or are installed. A user's folder comes last on `sys.path`, so that a file there replaces
no library; only the module that a recipe names is taken from its file first. What Python code hands over instead of
naming it is kept by `register`, for this process only. Rewards are resolved in processes of their own
(`stretto.sandbox`), because they are given what a model wrote.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import Recipe
from stretto.sandbox import reward_forms, signatures, worker
from stretto.sandbox.imports import sources
from stretto.sandbox.target import exists, foreign

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

REGISTERED: dict[tuple[Kind, str], Any] = {}
"""What Python code has handed over, by kind and the name that stands for it in the recipe."""

LOADED: dict[str, tuple[Path, int, int]] = {}
"""Modules of the user's in this process -> (file, time, size) when they were imported."""

APPENDED: list[str] = []
"""Folders of the user's that stand last on `sys.path`."""

LOADING = threading.RLock()
"""Workers in threads of one process import the same modules."""


def is_plugin(name: str) -> bool:
    """True for `module:name`, false for the name of something built in."""
    return ":" in name


def folders_of(root: Path) -> tuple[str, ...]:
    """Where modules of the user's are looked for: the recipe's folder, then the working folder."""
    return tuple(dict.fromkeys((os.path.abspath(root), str(Path.cwd()))))


def plugins_of(recipe: Recipe) -> Iterator[tuple[Kind, str, str]]:
    """(kind, recipe key, module:name) of every plug-in that a recipe names, but for its rewards."""
    named: list[tuple[Kind, str, str]] = [
        ("source", "task.source.kind", recipe.task.source.kind),
        ("environment", "environment.kind", recipe.environment.kind),
        ("algorithm", "algorithm.name", recipe.algorithm.name),
        ("engine", "engine.kind", recipe.engine.kind),
        *(("logger", "log", name) for name in recipe.log),
    ]
    yield from ((kind, field, name) for kind, field, name in named if is_plugin(name))


def register(kind: Kind, thing: Any) -> str:
    """Keeps something that Python code hands over, and returns the name that stands for it in a recipe.

    The name is that of its module, so that a worker or a later resume finds it there if it is at the top of a file.
    """
    named = thing if hasattr(thing, "__name__") else type(thing)
    plain = "".join(letter if letter.isidentifier() or letter.isdigit() else "_" for letter in str(named.__name__))
    name = f"{named.__module__}:{plain.lstrip('_') or kind}"
    REGISTERED[kind, name] = thing
    return name


# From files alone -----------------------------------------------------------------------------------------------------


def problems(kind: Kind, name: str, folders: Sequence[str], *, field: str) -> Iterator[Problem]:
    """What is wrong with a `module:name`, as far as it can be seen without running anything."""
    if (kind, name) in REGISTERED:
        if why := _unfit(kind, REGISTERED[kind, name]):
            yield _problem(kind, name, field, why)
        return
    if name.startswith("__main__:"):
        reason = f"{name} was written in a notebook or a script, where other processes and later runs cannot find it"
        yield Problem(field=field, reason=reason, fix="write it into a file beside the recipe and name it as file:name")
        return
    with LOADING:
        _append(folders)
    if missing := exists(name, folders):
        yield Problem(field=field, reason=missing, fix=_fix(kind, "correct the name, or write the module"))
    elif why := _forbidden(kind, name, folders):
        fix = "write it into a Python file beside the recipe and name it as file:name; such a file may import packages"
        yield Problem(field=field, reason=why, fix=fix)
    elif why := _written_wrong(kind, name, folders):
        yield _problem(kind, name, field, why)


def _fix(kind: Kind, text: str) -> str:
    return f"{text}: {KINDS[kind].wanted}, in a Python file beside the recipe or in the working folder"


def _problem(kind: Kind, name: str, field: str, why: str) -> Problem:
    return Problem(field=field, reason=f"{name} {why}", fix=f"write {KINDS[kind].wanted}")


def _forbidden(kind: Kind, name: str, folders: Sequence[str]) -> str | None:
    """Why a recipe may not name it: what belongs to Python itself, or, for some kinds, to a package."""
    why = foreign(name, folders)
    python = name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names
    return why if KINDS[kind].own_files or python else None


def _written_wrong(kind: Kind, name: str, folders: Sequence[str]) -> str | None:
    """Why what is written there cannot be called as this kind is, or none."""
    asked, node = KINDS[kind], signatures.definition(name, folders)
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() if kind == "reward" and (told := reward_forms.written(node)):
            return reward_forms.refusal(told)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return signatures.function_refusal(node, asked.parameters, method=False, asynchronous=asked.asynchronous)
        case ast.ClassDef():
            return _class_written_wrong(asked, node)
        case ast.Assign(value=value) | ast.AnnAssign(value=value) if isinstance(value, signatures.NOT_CALLABLE):
            return "is not callable"
    return None


def _class_written_wrong(asked: PluginKind, node: ast.ClassDef) -> str | None:
    there, inherits = signatures.methods(node), signatures.inherits(node)
    made_with = () if asked.method else asked.parameters
    made = there.get("__init__")
    if made is None and made_with and not inherits:
        return f"is a class that is made without arguments, not with ({', '.join(made_with)})"
    if made is not None and (why := signatures.function_refusal(made, made_with, method=True, asynchronous=False)):
        return f"is a class whose __init__ {why}"
    if asked.method is None:
        return None
    called = there.get(asked.method)
    if called is None:
        plain = [name for name in there if is_tool(name)] if asked.tools else []
        return None if inherits or plain else f"is a class without a method {asked.method}"
    why = signatures.function_refusal(called, asked.parameters, method=True, asynchronous=asked.asynchronous)
    return f"is a class whose method {asked.method} {why}" if why else None


# Imported -------------------------------------------------------------------------------------------------------------


def resolve(kind: Kind, name: str, folders: Sequence[str], *, field: str, where: str = "") -> Any:
    """What a `module:name` is, to be called as its kind is. RecipeError if it cannot be imported or is something else.

    `where` names the process, if that is not the one of the command.
    """
    if (kind, name) in REGISTERED:
        found = REGISTERED[kind, name]
    else:
        found = _imported(kind, name, folders, field=field, where=f" in {where}" if where else "")
    if why := _unfit(kind, found):
        raise RecipeError(_problem(kind, name, field, why))
    return _called(kind, found)


def _imported(kind: Kind, name: str, folders: Sequence[str], *, field: str, where: str) -> Any:
    looked = ", ".join(folders)
    for problem in problems(kind, name, folders, field=field):
        reason = f"{problem.reason}{where and f'{where}, which looks in {looked} and among the packages there'}"
        fix = f"put the file there on every host; or {problem.fix}" if where else problem.fix
        raise RecipeError(Problem(field=problem.field, reason=reason, fix=fix))
    module, _, attribute = name.partition(":")
    try:
        return getattr(load(module, folders), attribute)
    except (Exception, SystemExit) as error:
        reason = f"{name} cannot be imported{where}: {describe_error(error, folders)}"
        reason += f"; looked for in {looked}" if where else ""
        raise RecipeError(Problem(field=field, reason=reason, fix="mend the file, or install what it needs")) from error


def load(module: str, folders: Sequence[str]) -> ModuleType:
    """Imports a module of the user's; anew, if a file that it is made of is another than when it was imported."""
    with LOADING:
        files = sources(f"{module}:", folders)
        own = {name: path for name, path in files.items() if _within(path, folders)}
        if any(name in own and stamp != _stamp(own[name]) for name, stamp in LOADED.items()):
            _forget()
        _append(folders)
        before = set(sys.modules)
        worker.load(module.partition(".")[0], folders)
        found = importlib.import_module(module)
        # A file that is called like a library was not imported, but the library.
        new = {name: path for name, path in own.items() if name not in before and _file(name) == str(path)}
        LOADED.update({name: _stamp(path) for name, path in new.items()})
        return found


def _append(folders: Sequence[str]) -> None:
    """Puts folders of the user's last on `sys.path`, instead of those of a run before."""
    sys.path[:] = [path for path in sys.path if path not in APPENDED]
    APPENDED[:] = [path for path in folders if path not in sys.path]
    sys.path += APPENDED


def _forget() -> None:
    """So that everything of the user's is imported again: whatever uses a changed file has taken names from it."""
    for name in LOADED:
        sys.modules.pop(name, None)
        worker.LOADED.discard(name)
    LOADED.clear()


def _file(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _stamp(path: Path) -> tuple[Path, int, int]:
    stat = path.stat()
    return path, stat.st_mtime_ns, stat.st_size


def _within(path: Path, folders: Sequence[str]) -> bool:
    return any(str(path).startswith(os.path.join(folder, "")) for folder in folders)


def describe_error(error: BaseException, folders: Sequence[str]) -> str:
    """What an exception of the user's code says, and where in a file of theirs."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if _within(Path(frame.filename), folders)]
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return f"{text} ({mine[-1].filename}, line {mine[-1].lineno})" if mine else text


def _unfit(kind: Kind, found: Any) -> str | None:
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
    return None


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


def _called(kind: Kind, found: Any) -> Any:
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
