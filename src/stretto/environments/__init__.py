"""What happens between the prompt and the verdict: plain Python that talks to the model.

`base` is the seam (`Model`, `Reply`, `Environment`), the other modules are environments, and `resolve` finds the one
of a recipe's section: one of these, or module:name of the user's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from stretto import plugins
from stretto.environments import single_turn
from stretto.environments.base import Environment
from stretto.environments.game import GameEnvironment
from stretto.environments.memory import MemoryEnvironment
from stretto.environments.tool_class import ToolClassEnvironment
from stretto.environments.tools import ToolsEnvironment
from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import EnvironmentSection, GameSection, MemorySection, ToolsSection

BUILT = ("single_turn", "tools", "game", "memory")
"""What a recipe can use."""
FIELD = "environment.kind"


def problems(kind: str, folders: Sequence[str] = ()) -> Iterator[Problem]:
    """What is wrong with the name of an environment, seen without running anything of the user's."""
    if kind in BUILT:
        return
    if plugins.is_plugin(kind):
        yield from plugins.problems("environment", kind, folders, field=FIELD)
        return
    if kind.startswith("<function"):
        reason = f"{kind} was given as a Python object, and nothing can be found by this name"
        fix = "give it again, as in stretto.resume(folder, environment=...)"
        yield Problem(field=FIELD, reason=reason, fix=fix)
        return
    near = get_close_matches(kind, list(BUILT), n=1)
    fix = f"did you mean {near[0]}?" if near else f"use {' or '.join(BUILT)}, or module:name"
    yield Problem(field=FIELD, reason=f"there is no environment {kind!r}", fix=fix)


def resolve(section: EnvironmentSection, folders: Sequence[str] = ()) -> Environment:
    """The environment of a section; the first of the folders is the recipe's. RecipeError if there is none."""
    match section:
        case ToolsSection():
            return ToolsEnvironment(section, root=Path(folders[0]) if folders else Path.cwd())
        case GameSection():
            return GameEnvironment(section)
        case MemorySection():
            return MemoryEnvironment(section)
    if plugins.is_plugin(section.kind):
        own = plugins.resolve("environment", section.kind, folders, field=FIELD)
        return adapted(own, section)
    if wrong := tuple(problems(section.kind)):
        raise RecipeError(*wrong)
    return single_turn.run


def adapted(own: Environment | type, section: EnvironmentSection) -> Environment:
    """What the user wrote, as an environment: a class of tools is wrapped, all else is one already."""
    return ToolClassEnvironment(own, turns=section.turns) if inspect.isclass(own) else own
