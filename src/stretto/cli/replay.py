"""`stretto replay RUN --step N`: train a step again from its samples and compare it with the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from stretto.api.replay import replay as replayed
from stretto.cli import render
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.runtime.replay import Replay

SHOWN = 20
"""Samples that are listed."""


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int, typer.Option(min=1, help="Step to train again.")],
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the files that a bug report needs to this zip file.")
    ] = None,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Omit prompts, completions and tokens from the bundle.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Train one step of a run again and compare gradient norm, weights and samples."""
    found = replayed(run, step, bundle=bundle, text=not no_text, note=render.note)
    if json:
        render.document(found.document())
    else:
        render.screen().print(_page(found, bundle))
    if not found.reproduced:
        if json:
            raise typer.Exit(1)
        raise StrettoError(f"step {step} was not reproduced")


def _page(found: Replay, bundle: Path | None) -> Text:
    """Format the comparison as text."""
    from stretto.runtime.replay import COMPARED

    page = Text()
    begun = f"the checkpoint of step {found.begun}" if found.begun else "the model before training"
    page.append(f"{found.folder} on one process, from {begun}\n")
    for each in found.steps:
        page.append(f"\nstep {each.step}, {each.samples} samples\n", style="bold")
        for name in COMPARED:
            if name in each.recorded and name in each.replayed:
                numbers = f"{each.recorded[name]:>14.7g}  replayed {each.replayed[name]:>14.7g}"
                page.append(f"  {name:<20} recorded {numbers}  off by {each.off(name):.1e}\n")
        page.append(f"  log-probabilities of engine and trainer differ by at most {each.farthest:.2g}\n")
        for one in each.differences[:SHOWN]:
            page.append(render.plain(f"  differs: {one}\n"), style="red")
        if len(each.differences) > SHOWN:
            page.append(f"  and {len(each.differences) - SHOWN} more\n", style="red")
    last = found.steps[-1].step
    if found.weights is None:
        page.append(f"\nweights: not compared, as the run has no checkpoint of step {last}\n")
    else:
        page.append(f"\nweights: {found.weights.share:.1e} of what the step has moved them away from the run's own\n")
    if bundle is not None:
        page.append(f"bundle:  {bundle}\n")
    return page.append("reproduced" if found.reproduced else "NOT reproduced", style="bold")
