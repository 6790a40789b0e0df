"""What happens between the prompt and the verdict: plain Python that talks to the model.

`base` is the seam (`Model`, `Reply`, `Environment`), the other modules are environments, and `resolve` finds one by the
`kind` of a recipe: one of these, or module:name of the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto import plugins
from stretto.environments import single_turn
from stretto.environments.base import Environment
from stretto.errors import Problem, RecipeError

BUILT: dict[str, Environment] = {"single_turn": single_turn.run}
"""What a recipe can use."""
FIELD = "environment.kind"


def lost(kind: str) -> Iterator[Problem]:
    """An environment that was given as an object, and is not there."""
    if kind.startswith("<function"):
        reason = f"{kind} was given as a Python object, and nothing can be found by this name"
        fix = "give it again, as in stretto.resume(folder, environment=...)"
        yield Problem(field=FIELD, reason=reason, fix=fix)


def resolve(kind: str, folders: Sequence[str] = ()) -> Environment:
    """The environment of that kind. RecipeError if there is none, or none yet."""
    if plugins.is_plugin(kind):
        own: Environment = plugins.resolve("environment", kind, folders, field=FIELD)
        return own
    if wrong := tuple(lost(kind)):
        raise RecipeError(*wrong)
    if kind not in BUILT:
        fix = f"use {' or '.join(BUILT)}, or module:name"
        raise RecipeError.of(FIELD, f"{kind} is not available yet", fix)
    return BUILT[kind]
