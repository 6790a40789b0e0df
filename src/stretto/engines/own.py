"""An engine of the user's, by module:name: a function that makes one of the policy, in the worker that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stretto import plugins
from stretto.engines.base import Engine
from stretto.errors import RecipeError

FIELD = "engine.kind"
ASKED = sorted(name for name in vars(Engine) if not name.startswith("_"))
"""What a worker asks of an engine."""


def own_engine(name: str, folders: Sequence[str], *, where: str) -> Callable[[Any], Engine]:
    """What makes the engine for a policy. RecipeError if it cannot be imported, or makes none; `where` names the
    worker."""
    make = plugins.resolve("engine", name, folders, field=FIELD, where=where)

    def made(policy: Any) -> Engine:
        try:
            engine: Engine = make(policy)
        except Exception as error:
            reason = f"{name} raised {plugins.describe_error(error, folders)}"
            raise RecipeError.of(FIELD, reason, "mend it; it is called with the policy") from error
        if lacking := [part for part in ASKED if not hasattr(engine, part)]:
            reason = f"{name} made {type(engine).__name__}, which has no {', '.join(lacking)}"
            raise RecipeError.of(FIELD, reason, "make what stretto.engines.base.Engine describes")
        return engine

    return made
