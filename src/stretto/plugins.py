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
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.errors import DeadlineError, Problem, RecipeError
from stretto.plugin_kinds import KINDS, Kind, PluginKind, function_of, is_tool, unfit
from stretto.recipe.schema import Deadlines, Recipe
from stretto.sandbox import reward_forms, signatures, worker
from stretto.sandbox.imports import sources
from stretto.sandbox.target import exists, foreign
from stretto.threads import begun

GIVEN = "<function "
"""How a recipe's name for what a Python program gave as an object begins, where nobody can import it."""

REGISTERED: dict[tuple[Kind, str], Any] = {}
"""What Python code has handed over, by kind and the name that stands for it in the recipe."""

LOADED: dict[str, tuple[Path, int, int]] = {}
"""Modules of the user's in this process -> (file, time, size) when they were imported."""

APPENDED: list[str] = []
"""Folders of the user's that stand last on `sys.path`."""

PATIENCE = Deadlines().start
"""Seconds in which a module is imported, where no recipe says another number."""

LOADING = threading.RLock()
"""Workers in threads of one process import the same modules."""


def is_plugin(name: str) -> bool:
    """True for `module:name`, false for the name of something built in."""
    return ":" in name


def is_given(name: str) -> bool:
    """True for what stands for something that a Python program gave as an object, and that nobody can import."""
    return name.startswith(GIVEN)


def lost(kind: Kind, name: str, field: str) -> Iterator[Problem]:
    """Something that was given as an object, and is not there."""
    if is_given(name):
        argument = "rewards=[...]" if kind == "reward" else f"{kind}=..."
        fix = f"give it again, as in stretto.resume(folder, {argument}); or put it in a .py file, named as module:name"
        reason = f"{name} was given as a Python object, and nothing can be found by this name"
        yield Problem(field=field, reason=reason, fix=fix)


def folders_of(root: Path) -> tuple[str, ...]:
    """Where modules of the user's are looked for: the recipe's folder, then the working folder."""
    return tuple(dict.fromkeys((os.path.abspath(root), str(Path.cwd()))))


def plugins_of(recipe: Recipe, *, training: bool = True) -> Iterator[tuple[Kind, str, str]]:
    """(kind, recipe key, module:name) of every plug-in that a recipe names, but for its rewards; with an algorithm that
    was given as an object, which is found by its name in this process. Without `training`, those that a model which is
    only asked needs."""
    named: list[tuple[Kind, str, str]] = [
        ("source", "task.source.kind", recipe.task.source.kind),
        ("environment", "environment.kind", recipe.environment.kind),
        ("engine", "engine.kind", recipe.engine.kind),
    ]
    if training:
        named.append(("algorithm", "algorithm.name", recipe.algorithm.name))
        named += [("logger", "log", name) for name in recipe.log]
    yield from (each for each in named if is_plugin(each[2]) or (each[0] == "algorithm" and is_given(each[2])))


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
        if why := unfit(kind, REGISTERED[kind, name]):
            yield _problem(kind, name, field, why)
        return
    if is_given(name):
        yield from lost(kind, name, field)
        return
    if name.startswith("__main__:"):
        reason = f"{name} was written in a notebook or a script, where other processes and later runs cannot find it"
        yield Problem(field=field, reason=reason, fix="write it into a file beside the recipe and name it as file:name")
        return
    with _alone():
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
        if not inherits and (whys := [why for name in plain if (why := signatures.tool_refusal(there[name]))]):
            return f"has methods that are no tools: {'; '.join(whys)}; add that, or begin the method's name with _"
        return None if inherits or plain else f"is a class without a method {asked.method}"
    why = signatures.function_refusal(called, asked.parameters, method=True, asynchronous=asked.asynchronous)
    return f"is a class whose method {asked.method} {why}" if why else None


# Imported -------------------------------------------------------------------------------------------------------------


def resolve(
    kind: Kind, name: str, folders: Sequence[str], *, field: str, where: str = "", seconds: float = PATIENCE
) -> Any:
    """What a `module:name` is, to be called as its kind is. RecipeError if it cannot be imported or is something else,
    DeadlineError if its module is not imported in so many seconds.

    `where` names the process, if that is not the one of the command.
    """
    if (kind, name) in REGISTERED:
        found = REGISTERED[kind, name]
    else:
        found = _imported(kind, name, folders, field=field, where=f" in {where}" if where else "", seconds=seconds)
    if why := unfit(kind, found):
        raise RecipeError(_problem(kind, name, field, why))
    return function_of(kind, found)


def _imported(kind: Kind, name: str, folders: Sequence[str], *, field: str, where: str, seconds: float) -> Any:
    looked = ", ".join(folders)
    for problem in problems(kind, name, folders, field=field):
        reason = f"{problem.reason}{where and f'{where}, which looks in {looked} and among the packages there'}"
        fix = f"put the file there on every host; or {problem.fix}" if where else problem.fix
        raise RecipeError(Problem(field=problem.field, reason=reason, fix=fix))
    module, _, attribute = name.partition(":")
    loading = begun(load, module, folders)  # a thread, which is left behind where it never ends
    try:
        return getattr(loading.result(timeout=seconds), attribute)
    except (Exception, SystemExit) as error:
        if not loading.done():
            text = f"{field}: {name} is still being imported{where} after {seconds:g} s"
            fix = f"look what {module} does at its top: it may wait for something; or raise deadlines.start"
            raise DeadlineError(f"{text}\n    fix: {fix}") from error
        reason = f"{name} cannot be imported{where}: {describe_error(error, folders)}"
        reason += f"; looked for in {looked}" if where else ""
        raise RecipeError(Problem(field=field, reason=reason, fix="mend the file, or install what it needs")) from error


def load(module: str, folders: Sequence[str]) -> ModuleType:
    """Imports a module of the user's; anew, if a file that it is made of is another than when it was imported."""
    with _alone():
        files = sources(f"{module}:", folders)
        own = {name: path for name, path in files.items() if _within(path, folders)}
        if any(name in own and stamp != _stamp(own[name]) for name, stamp in LOADED.items()):
            _forget()
        _append(folders)
        before = set(sys.modules)
        with _torch_unchanged():
            worker.load(module.partition(".")[0], folders)
            found = importlib.import_module(module)
        # A file that is called like a library was not imported, but the library.
        new = {name: path for name, path in own.items() if name not in before and _file(name) == str(path)}
        LOADED.update({name: _stamp(path) for name, path in new.items()})
        return found


@contextmanager
def _torch_unchanged() -> Iterator[None]:
    """Puts back the settings of torch with which models compute, whatever a user's file sets at its top."""
    torch = sys.modules.get("torch")
    dtype, precision = (torch.get_default_dtype(), torch.get_float32_matmul_precision()) if torch else (None, None)
    try:
        yield
    finally:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_default_dtype(dtype or torch.float32)
            torch.set_float32_matmul_precision(precision or "highest")


@contextmanager
def _alone() -> Iterator[None]:
    """Nobody else imports within it. DeadlineError where what somebody else imports never ends."""
    if not LOADING.acquire(timeout=PATIENCE):
        raise DeadlineError("a module of an earlier call is still being imported\n    fix: begin with a new process")
    try:
        yield
    finally:
        LOADING.release()


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
