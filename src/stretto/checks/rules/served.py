"""What a server that somebody else has started is no use for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem, RecipeError
from stretto.placement.build import OPEN, named_by_cells
from stretto.placement.cluster import parse_cluster
from stretto.recipe.schema import ApartEngineSection, Placement, Recipe, VllmEngineSection


def server_can_be_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What a server that runs already is no use for, and what it was told by whoever has started it."""
    engine = recipe.engine
    if not isinstance(engine, ApartEngineSection) or (url := engine.url) is None:
        return
    ours = isinstance(engine, VllmEngineSection)
    leave = "leave engine.url out, and the run starts vLLM itself" if ours else "use engine.kind: native"
    if not _is_address(url):
        fix = f"write http://host:port; a key belongs into the variable {engine.kind.upper()}_API_KEY"
        shown = url.rpartition("@")[2]  # without a password
        yield Problem(field="engine.url", reason=f"{shown} is no address of a server", fix=fix)
    if recipe.model.adapter is None:
        reason = (
            "a server of your own is sent adapters only: all weights over HTTP could be neither sent nor proved here"
        )
        yield Problem(field="engine.url", reason=reason, fix=f"train an adapter (model.adapter), or {leave}")
    if recipe.model.in_few_bits:
        reason = "what a server of your own makes of a base in few bits is not what is trained on here"
        yield Problem(field="engine.url", reason=reason, fix=f"use model.quantize: none, or {leave}")
    if recipe.model.name == "scratch" and not scene.planning:
        reason = "a model that the run makes itself is nowhere where a server could have read it"
        yield Problem(field="engine.url", reason=reason, fix=f"name a model's folder in model.name, or {leave}")
    if not scene.planning and (count := _devices(recipe.placement)) > 1:
        reason = f"a server of your own generates for one device that trains, and placement names {count}"
        yield Problem(field="engine.url", reason=reason, fix=f"name one in placement.cluster, or {leave}")
    said: dict[str, Any] = {"memory_share": None if engine.memory_share == "auto" else engine.memory_share}
    if isinstance(engine, VllmEngineSection):
        said |= {"python": engine.python, "arguments": engine.arguments or None}
    for key, value in said.items():
        if value is not None:
            reason = "has no effect beside engine.url: whoever started the server has said it"
            yield Problem(field=f"engine.{key}", reason=reason, fix="leave it out")


def _is_address(url: str) -> bool:
    """Whether a server can be asked there, and everybody may see where."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        named = bool(host) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number, an empty part of a name
        return False
    return named and parts.scheme in ("http", "https") and "@" not in parts.netloc and not parts.query


def _devices(section: Placement) -> int:
    """How many a run uses; one that cannot be read is the plan's problem."""
    if section.cells is not None:
        return len(named_by_cells(section))
    with suppress(RecipeError):
        return 1 if section.cluster in OPEN else len(parse_cluster(section.cluster))
    return 1
