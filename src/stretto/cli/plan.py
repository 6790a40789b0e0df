"""`stretto plan RECIPE`: where the models should live on a cluster and what a step will take, before anything starts.

It reads the recipe and loads no torch, unless it is to measure. Everything else that is printed is a forecast of the
cost model, with the constants that were measured on this machine where there are any.
"""

from __future__ import annotations

import json as format_json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.api import calls as api
from stretto.cli import render
from stretto.errors import RecipeError
from stretto.recipe.load import RecipeSource
from stretto.report.timeline import Span, to_events

if TYPE_CHECKING:  # loaded by the functions that need them
    from stretto.api.planning import Card


def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Path of the recipe (YAML); omit it with --model.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. batch.samples=4."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster, e.g. 8xH100, 6x8xH100 or 1x24GB, or a file; list: all cards.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Plan this model without a recipe: a model name, Hub id or folder.")
    ] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="With --model: train a LoRA adapter of this rank.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Plan this strategy alone.")] = None,
    cells: Annotated[
        Path | None,
        typer.Option(
            help="Also predict the placement in this file (JSON or YAML): a plan, or roles with devices and mesh."
        ),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(help="Also predict this placement of a role, e.g. train=0-7:dp_shard=8. Repeat it for each role."),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also predict placements of other frameworks.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the best plan's timeline to this file (Chrome trace).")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the best plans on this machine and fit the cost model to them.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Predict placement, memory and step time on a cluster. Needs no GPU."""
    from stretto.cli import planned
    from stretto.planner.search import named_by

    if cells is not None and mesh:
        raise RecipeError.of("--mesh", "has no effect with --cells", "omit one of the two")
    if cluster == "list":
        from stretto.api.planning import cards_of

        cards = cards_of(*(_asked(recipe, changes or [], model, lora) if recipe or model else (None, ())))
        if json:
            render.document({"ok": True, "problems": [], "cards": [asdict(card) for card in cards]})
        else:
            render.screen().print(render.plain(_card_table(cards)))
        return
    source, asked = _asked(recipe, changes or [], model, lora)
    told = api.plan(
        source,
        cluster=cluster,
        strategy=strategy,
        changes=asked,
        measure=measure,
        cells=cells or mesh or None,
        baselines=baselines,
        note=render.note,
    )
    if timeline is not None:
        _write(timeline, planned.spans(told.found.listed[0]))
    if json:
        render.document(told.document())
    else:
        named = named_by(told.recipe.placement, len(told.setting.names))
        page = planned.page(told.found, told.setting, named, told.measured, run=told.runs[0])
        render.screen().print(page, end="")


SAMPLE = {"batch": {"prompts": 64, "samples": 8}, "engine": {"max_new_tokens": 1024}}
"""Recipe of a plan without a recipe file; `key=value` overrides it."""


def _asked(
    recipe: str | None, changes: list[str], model: str | None, lora: int | None
) -> tuple[RecipeSource, list[str]]:
    """The recipe, or one of a model alone, and the changes to it."""
    if model is None:
        if recipe is None:
            raise RecipeError.of("RECIPE", "is missing", "name a recipe, or a model with --model qwen2.5-7b")
        if lora is not None:
            raise RecipeError.of("--lora", "has no effect without --model", "write model.adapter.rank=16 instead")
        return Path(recipe), changes
    first = [] if recipe is None else [recipe]
    if first and "=" not in first[0]:
        raise RecipeError.of("--model", "has no effect with a recipe", f"omit one of them, or write model={model}")
    adapter = None if lora is None else {"rank": lora, "alpha": float(2 * lora)}
    return SAMPLE | {"model": {"name": model, "adapter": adapter}}, first + changes


def _card_table(cards: Sequence[Card]) -> str:
    """A line per card; with a recipe also the forecast of a step on one of them."""
    planned = any(card.forecast is not None for card in cards)
    rows = [["card", "GB", "TFLOP/s bf16", "GB/s", "per host", *(["a step on one"] if planned else [])]]
    rows += [
        [
            card.name, f"{card.memory_gb:.0f}", f"{card.flops / 1e12:.0f}", f"{card.bandwidth / 1e9:.0f}",
            str(card.per_host), *([card.forecast] if card.forecast is not None else []),
        ]
        for card in cards
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _write(path: Path, spans: list[Span]) -> None:
    """A Chrome trace, as a run's timeline.json."""
    try:
        path.write_text(format_json.dumps({"displayTimeUnit": "ms", "traceEvents": to_events(spans, "plan")}), "utf-8")
    except OSError as error:
        raise RecipeError.of("--timeline", f"{path} cannot be written: {error.strerror}", "name another file") from None
