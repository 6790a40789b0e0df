"""Code of the user's that a recipe names by module:name: is it there, and may it be called as it will be?

Nothing of it is run here; `checks.deep` imports it. Rewards have a rule of their own, in `checks.rules.task`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from inspect import isroutine
from pathlib import Path

from stretto import plugins
from stretto.algorithms.own_facts import FIELD, announce
from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem
from stretto.plugin_kinds import is_tool, tool_methods
from stretto.recipe.schema import Recipe
from stretto.sandbox import signatures


def functions_are_there(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What a program gave as an object, in the recipe of a run that is now without it."""
    if recipe.environment.kind not in scene.probes.functions:
        yield from plugins.lost("environment", recipe.environment.kind, "environment.kind")
    if recipe.algorithm.name not in scene.probes.functions and scene.training:
        yield from plugins.lost("algorithm", recipe.algorithm.name, FIELD)


def plugins_can_be_found(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """As far as files tell. A source is read, and judged, with the task."""
    folders = plugins.folders_of(scene.root)
    for kind, field, name in plugins.plugins_of(recipe, training=scene.training):
        if kind == "algorithm":
            yield from announce(name, folders)
        elif kind != "source":
            yield from plugins.problems(kind, name, folders, field=field)


def is_function(kind: str, root: Path) -> bool:
    """True of an environment of the user's that is a function, as far as its file tells."""
    if (given := plugins.REGISTERED.get(("environment", kind))) is not None:
        return isroutine(given)
    node = signatures.definition(kind, plugins.folders_of(root)) if plugins.is_plugin(kind) else None
    return isinstance(node, ast.AsyncFunctionDef) and not node.decorator_list


def methods_of_tool_class(kind: str, root: Path) -> frozenset[str]:
    """The methods of an environment that is a class of the user's whose public methods are tools, as far as its file
    tells; none of anything else."""
    given = plugins.REGISTERED.get(("environment", kind))
    if given is not None:
        return frozenset(dir(given) if tool_methods(given) else ())
    node = signatures.definition(kind, plugins.folders_of(root)) if plugins.is_plugin(kind) else None
    if not isinstance(node, ast.ClassDef) or signatures.inherits(node):
        return frozenset()
    there = signatures.methods(node)
    return frozenset(there if "run" not in there and any(map(is_tool, there)) else ())
