"""`stretto samples RUN`: the answers of a step, with what they were worth and whether they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.algorithms.catalog import find_facts
from stretto.cli import render
from stretto.errors import RecipeError
from stretto.report.read_run import RunRecord
from stretto.report.samples_text import Order, page


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[int | None, typer.Option(help="Which step; default: the last.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the largest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the smallest reward first.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Only those that were not trained on.")] = False,
    most: Annotated[int, typer.Option("--most", min=1, help="How many to show.")] = 8,
    full: Annotated[bool, typer.Option("--full", help="Whole conversations, with special tokens.")] = False,
) -> None:
    """Show answers of a step: prompt, answer, reference, the parts of the reward, and why one was not trained on."""
    orders: dict[Order, bool] = {"best": best, "worst": worst, "dropped": dropped}
    asked = [order for order, given in orders.items() if given]
    if len(asked) > 1:
        raise RecipeError.of(f"--{asked[1]}", f"has no effect beside --{asked[0]}", "leave out one of the two")
    record = RunRecord(run)
    there = list(record.sampled)
    wanted = step if step is not None else (there[-1] if there else 0)
    if wanted not in record.sampled:
        fix = f"ask for a step from {there[0]} to {there[-1]}" if there else "train it first"
        raise RecipeError.of("--step", f"{run} holds no samples of step {wanted}", fix)
    parts = [part for part in record.setting("rewards", []) if isinstance(part, dict)]
    weights = {str(part.get("name", "accuracy")): float(part.get("weight", 1.0)) for part in parts}
    facts = find_facts(str(record.setting("algorithm.name")))
    order = asked[0] if asked else "first"
    render.screen().print(page(record.samples(wanted), weights, facts, order=order, most=most, full=full))
