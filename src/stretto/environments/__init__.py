"""What happens between the prompt and the verdict: plain Python that talks to the model.

`base` is the seam (`Model`, `Reply`, `Environment`), the other modules are environments, and `resolve` finds one by the
`kind` of a recipe.
"""

from __future__ import annotations

from difflib import get_close_matches

from stretto.environments import single_turn
from stretto.environments.base import Environment
from stretto.errors import RecipeError

BUILT: dict[str, Environment] = {"single_turn": single_turn.run}
"""What a recipe can use."""
PLANNED = ("tools", "game", "memory")
"""Names the recipe format reserves for environments that are not available yet."""


def resolve(kind: str) -> Environment:
    """The environment of that kind. RecipeError if there is none, or none yet."""
    if kind in BUILT:
        return BUILT[kind]
    if kind in PLANNED or ":" in kind:
        raise RecipeError.of("environment.kind", f"{kind} is not available yet", f"use {' or '.join(BUILT)}")
    near = get_close_matches(kind, [*BUILT, *PLANNED], n=1)
    fix = f"did you mean {near[0]}?" if near else f"use {' or '.join(BUILT)}"
    raise RecipeError.of("environment.kind", f"there is no environment {kind!r}", fix)
