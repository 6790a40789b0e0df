"""`stretto eval RUN|RECIPE`: how good a model is on the held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.api import calls as api
from stretto.cli import render


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN|RECIPE", help="Run folder or recipe (YAML).")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override.")
    ] = None,
    on: Annotated[
        Path | None, typer.Option("--on", metavar="FILE", help="Evaluate on every row of this JSONL file instead.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Evaluate a run's newest checkpoint, or a recipe's initial model, on held-out prompts."""
    result = api.evaluate(target, changes=changes or (), on=on, note=render.note)
    if json:
        render.document(result.document())
        return
    from stretto.runtime.evaluate import measured_words, of_asked

    lines = []
    if result.accuracy is not None and result.interval is not None:
        low, high = result.interval
        within = f"95 % interval {low:.3f} to {high:.3f}, {result.prompts}"
        lines.append(f"accuracy     {result.accuracy:.3f}  ({within})")
    if result.reward is not None:
        lines.append(f"reward       {result.reward:.3f}")
        if len(result.parts) > 1:
            lines += [f"  {render.plain(name):<10} {mean:.3f}" for name, mean in result.parts.items()]
    lines += measured_words(result.measures)
    for k, chance in result.pass_at_k.items():
        over = "" if result.pass_n[k] == result.asked else f"  ({of_asked(result.pass_n[k], result.asked)})"
        lines.append(f"pass@{k:<7} {chance:.3f}{over}")
    if result.length_mean is not None:
        lines.append(f"mean length  {result.length_mean:.1f} tokens")
    if result.failure is not None:
        lines.append(f"first completion without a score: {render.plain(result.failure)}")
    render.screen().print("\n".join(lines))
