"""`stretto samples RUN`: the answers of a step, with what they were worth and whether they were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stretto.algorithms.catalog import find_facts
from stretto.cli import render
from stretto.errors import RecipeError
from stretto.report.read_run import RunRecord
from stretto.report.samples_text import Order, page


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int | None, typer.Option(help="Step to show. Default: the last.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Sort by reward, highest first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Sort by reward, lowest first.")] = False,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Show completions that were excluded from training.")
    ] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Show greedy completions of held-out prompts at an evaluated step.")
    ] = False,
    most: Annotated[int, typer.Option("--most", min=1, help="Max number of completions to show.")] = 8,
    full: Annotated[bool, typer.Option("--full", help="Show whole conversations with special tokens.")] = False,
) -> None:
    """Show completions of a step with prompt, reference answer, reward parts and exclusions."""
    orders: dict[Order, bool] = {"best": best, "worst": worst, "dropped": dropped}
    asked = [order for order, given in orders.items() if given]
    if len(asked) > 1:
        raise RecipeError.of(f"--{asked[1]}", f"has no effect with --{asked[0]}", "omit one of the two")
    if held_out and dropped:
        raise RecipeError.of(
            "--dropped", "has no effect with --held-out: held-out completions are never trained on", "omit it"
        )
    record = RunRecord(run)
    there = list(record.evaluated if held_out else record.sampled)
    wanted = step if step is not None else (there[-1] if there else 0)
    if wanted not in there:
        raise RecipeError.of("--step", *no_answers(record, wanted, there, held_out=held_out))
    parts = [part for part in record.setting("rewards", []) if isinstance(part, dict)]
    weights = {str(part.get("name", "accuracy")): float(part.get("weight", 1.0)) for part in parts}
    facts = find_facts(str(record.setting("algorithm.name")))
    order = asked[0] if asked else "first"
    rows = record.samples(wanted, held_out=held_out)
    lacks = record.truncated(wanted, rows, held_out=held_out)
    text = page(
        rows, weights, facts, step=wanted, held_out=held_out, truncated=lacks, order=order, most=most, full=full
    )
    render.screen().print(text)


def no_answers(run: RunRecord, step: int, there: Sequence[int], *, held_out: bool) -> tuple[str, str]:
    """Return the reason and the fix for a step without samples."""
    what = "held-out answers" if held_out else "samples"
    if not there:
        return f"{run.folder} holds no {what}", "train it with evaluate.every above 0" if held_out else "train it first"
    if held_out or not there[0] < step < there[-1]:
        near = sorted(sorted(there, key=lambda each: abs(each - step))[:8])
        listed = (
            f"one of the steps {', '.join(map(str, near))}" if held_out else f"a step from {there[0]} to {there[-1]}"
        )
        return f"{run.folder} holds no {what} of step {step}", f"use {listed}"
    reason = f"samples/step-{step:06d}.jsonl is missing, though steps {there[0]} to {there[-1]} were sampled"
    return reason, f"restore the file, or use another step, e.g. {min(there, key=lambda each: abs(each - step))}"
