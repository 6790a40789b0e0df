"""Functions of the user's, given as objects: what a recipe says of them, and what is wrong with them.

One that others can import is named in the recipe like any other, `module:name`, so that the run can go on without the
object. For another, from a notebook, a script or the inside of a function, the recipe holds `<function NAME>`. Either
way the object itself is what runs. Nothing of the user's is called here.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from stretto import plugins
from stretto.environments.base import Environment
from stretto.errors import Problem, RecipeError
from stretto.placement.build import OPEN, named_by_cells
from stretto.placement.cluster import parse_cluster
from stretto.plugin_kinds import Kind
from stretto.recipe.load import plain
from stretto.recipe.schema import Recipe, RewardPart
from stretto.runtime.user_functions import Callback, StepEvent, UserFunctions
from stretto.sandbox import worker
from stretto.sandbox.target import exists, foreign

RewardFunction = Callable[[str, dict[str, Any], dict[str, float]], float | None]
"""`reward(answer, prompt, signals)`: what an answer is worth."""

RewardLike = RewardFunction | str | Mapping[str, Any] | RewardPart
"""A part of the reward: a function, a kind such as `math` or `module:name`, or a part as in a recipe, whose `kind` may
be a function."""

IN_A_FILE = "put it in a .py file beside the recipe and name it as module:name"
"""What to do about a function that has to be imported."""


@dataclass(slots=True, kw_only=True)
class Collected:
    """What was given, on its way into a recipe."""

    paths: Sequence[str]
    """Where workers look for modules."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Recipe key -> value."""
    rewards: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Kind -> reward function."""
    environments: dict[str, Environment] = field(default_factory=dict)
    """Kind -> environment."""
    nameless: dict[str, object] = field(default_factory=dict)
    """Kind -> what was given, of all that nobody can import."""
    callbacks: list[Callable[[StepEvent], object]] = field(default_factory=list)
    """What is called after each step."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with it."""


def collect(
    *,
    rewards: Sequence[RewardLike] | None = None,
    environment: Environment | str | None = None,
    algorithm: Callable[..., Any] | str | None = None,
    callbacks: Sequence[Callback] = (),
    root: Path,
) -> tuple[UserFunctions, dict[str, Any]]:
    """The functions, and what they change in the recipe. A RecipeError names everything wrong."""
    found = Collected(paths=[str(root), str(Path.cwd())])
    if rewards is not None:
        found.changes["rewards"] = _rewards(found, rewards)
    if environment is not None:
        found.changes["environment.kind"] = _environment(found, environment)
    if algorithm is not None:
        found.changes["algorithm.name"] = _algorithm(found, algorithm)
    for index, callback in enumerate(_listed(found, "callbacks", callbacks)):
        _callback(found, callback, f"callbacks.{index}")
    if found.problems:
        raise RecipeError(*found.problems)
    functions = UserFunctions(
        rewards=found.rewards,
        environments=found.environments,
        nameless=found.nameless,
        callbacks=tuple(found.callbacks),
    )
    return functions, found.changes


def refuse_several_devices(functions: UserFunctions, recipe: Recipe) -> None:
    """Functions without a name in a recipe that uses several devices, whose processes import what they need."""
    section = recipe.placement
    devices = named_by_cells(section) if section.cells is not None else set[str]()
    if not devices and section.cluster not in OPEN:
        devices = set(parse_cluster(section.cluster).devices)
    if len(devices) < 2:
        return
    told = {f"rewards.{index}.kind": part.kind for index, part in enumerate(recipe.rewards)}
    told |= {"environment.kind": recipe.environment.kind, "algorithm.name": recipe.algorithm.name}
    reason = "{kind} cannot be imported by name, as the processes of a run on several devices would have to"
    problems = [
        Problem(field=key, reason=reason.format(kind=kind), fix=f"{IN_A_FILE}, or use one device")
        for key, kind in told.items()
        if kind in functions.nameless
    ]
    if problems:
        raise RecipeError(*problems)


# One at a time ------------------------------------------------------------------------------------------------------


def _rewards(found: Collected, given: Sequence[RewardLike]) -> list[Any]:
    parts: list[Any] = []
    for index, each in enumerate(_listed(found, "rewards", given)):
        part: Any = plain(each) if isinstance(each, Mapping | RewardPart) else {"kind": each}
        kind, name = part.get("kind"), None
        if callable(kind):
            name = _name(kind)
            function = _resolved(found, "reward", kind, f"rewards.{index}")
            part["kind"] = _kind(found, kind)
            found.rewards[part["kind"]] = function
        elif isinstance(kind, str):
            name = re.sub(r"\W", "_", kind.rpartition(":")[2], flags=re.ASCII)
        if "name" not in part and name:
            part["name"] = _unused(name, [str(other.get("name")) for other in parts])
        parts.append(part)
    return parts


def _environment(found: Collected, given: Environment | str) -> str:
    if isinstance(given, str):
        return given
    function, kind = _resolved(found, "environment", given, "environment"), _kind(found, given)
    found.environments[kind] = function
    return kind


def _algorithm(found: Collected, given: Callable[..., Any] | str) -> str:
    """An algorithm is built where it trains, which finds it by this name: in a file, or in this process."""
    if isinstance(given, str):
        return given
    _resolved(found, "algorithm", given, "algorithm")
    name = _kind(found, given)
    if name in found.nameless:
        plugins.REGISTERED["algorithm", name] = given
    return name


def _resolved(found: Collected, kind: Kind, given: Any, field: str) -> Any:
    """What is called of something given; notes what is wrong with it."""
    name = plugins.register(kind, given)
    try:
        if kind == "reward" and callable(given):
            worker.refuse_foreign(given, _name(given))  # it is given what a model wrote
        if problems := list(plugins.problems(kind, name, (), field=field)):
            found.problems += problems
            return None
        return plugins.resolve(kind, name, (), field=field)
    except TypeError as error:
        found.problems.append(Problem(field=field, reason=str(error), fix="write a function that returns a number"))
        return None
    finally:
        del plugins.REGISTERED[kind, name]


def _callback(found: Collected, given: Any, field: str) -> None:
    """Takes one argument, the event, or two: step and metrics."""
    reason = ""
    if not callable(given):
        reason = f"is a {type(given).__name__} and no function"
    elif asynchronous(given):
        reason = f"{_name(given)} is async, and nobody would await it"
    elif not _takes(given, 1) and not _takes(given, 2):
        reason = f"{_name(given)} cannot be called with event: it takes {inspect.signature(given)}"
    if reason:
        fix = "give a function, def called(event) or def called(step, metrics)"
        found.problems.append(Problem(field=field, reason=reason, fix=fix))
        return
    found.callbacks.append(given if _takes(given, 1) else _with_two(given))


def _with_two(callback: Callable[[int, Mapping[str, float]], object]) -> Callable[[StepEvent], object]:
    def called(event: StepEvent) -> object:
        return callback(event.step, event.metrics)

    called.__name__ = _name(callback)
    return called


# What they are ------------------------------------------------------------------------------------------------------


def _listed(found: Collected, field: str, given: Any) -> Sequence[Any]:
    """A list, also where one thing was given without."""
    if isinstance(given, str | Mapping) or callable(given):
        fix = f"write {field}=[...], a list, also around a single one"
        found.problems.append(Problem(field=field, reason=f"is a {type(given).__name__} and no list", fix=fix))
        return ()
    try:
        return list(given)
    except TypeError:
        fix = f"write {field}=[...]"
        found.problems.append(Problem(field=field, reason=f"is a {type(given).__name__} and no list", fix=fix))
        return ()


def asynchronous(function: Any) -> bool:
    """True if a call has to be awaited, as far as Python can tell without calling."""
    inner = inspect.unwrap(function)
    while hasattr(inner, "func") and not inspect.isroutine(inner):  # functools.partial
        inner = inner.func
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(kind(each) for each in (inner, inspect.getattr_static(type(inner), "__call__", None)) for kind in kinds)


def _takes(function: Any, count: int) -> bool:
    """True if it can be called with so many arguments; compiled ones may not say."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def importable(function: Any, paths: Sequence[str]) -> str | None:
    """`module:name`, if importing that in a worker process gives this very function; else none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    known = sys.modules.get(module or "")
    if module in (None, "__main__") or not name.isidentifier() or getattr(known, name, None) is not function:
        return None
    target = f"{module}:{name}"
    top = PathFinder.find_spec(module.partition(".")[0], list(paths))
    if top is None or exists(target, paths) or foreign(target, paths):
        return None
    loaded = sys.modules.get(module.partition(".")[0])
    return target if getattr(loaded, "__file__", None) == top.origin else None


def _kind(found: Collected, given: Any) -> str:
    """What the recipe calls what was given: as others can import it, or by a name that only says what it was."""
    kind = importable(given, found.paths)
    if kind is None:
        taken = [each.removeprefix(plugins.GIVEN)[:-1] for each in found.nameless]
        kind = f"{plugins.GIVEN}{_unused(_name(given), taken)}>"
        found.nameless[kind] = given
    return kind


def _name(function: Any) -> str:
    """What it is called, in letters that a recipe can have."""
    while hasattr(function, "func") and not hasattr(function, "__name__"):  # functools.partial
        function = function.func
    text = str(getattr(function, "__name__", type(function).__name__))
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "function"


def _unused(name: str, others: Sequence[str]) -> str:
    """The name, with a number behind it where it is taken."""
    count = 2
    found = name
    while found in others:
        found, count = f"{name}_{count}", count + 1
    return found
