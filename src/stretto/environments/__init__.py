"""What happens between the prompt and the verdict: plain Python that talks to the model.

`base` is the seam (`Model`, `Reply`, `Environment`), the other modules are environments, and `resolve` finds one by the
`kind` of a recipe: one of these, or module:name of the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from stretto import plugins
from stretto.environments import single_turn
from stretto.environments.base import Environment
from stretto.errors import Problem, RecipeError

BUILT: dict[str, Environment] = {"single_turn": single_turn.run}
"""What a recipe can use."""
PLANNED = ("tools", "game", "memory")
"""Names the recipe format reserves for environments that are not available yet."""
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
    others = f"use {' or '.join(BUILT)}, or module:name"
    near = get_close_matches(kind, list(BUILT), n=1)
    reason = f"{kind} is not available yet" if kind in PLANNED else f"there is no environment {kind!r}"
    fix = others if kind in PLANNED or not near else f"did you mean {near[0]}?"
    yield Problem(field=FIELD, reason=reason, fix=fix)


def resolve(kind: str, folders: Sequence[str] = ()) -> Environment:
    """The environment of that kind. RecipeError if there is none, or none yet."""
    if plugins.is_plugin(kind):
        own: Environment = plugins.resolve("environment", kind, folders, field=FIELD)
        return own
    if wrong := tuple(problems(kind)):
        raise RecipeError(*wrong)
    return BUILT[kind]
