"""`stretto push RUN --to ORG/NAME`: upload a run's model and its model card to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.api import exports as api
from stretto.cli import render
from stretto.cli.merge import PLAIN_BASE


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    to: Annotated[str, typer.Option(metavar="ORG/NAME", help="Hub repository; created if missing.")],
    step: Annotated[str, typer.Option(metavar="N", help="Checkpoint: a step number, newest or best.")] = "newest",
    license: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="License of the model, e.g. apache-2.0.")
    ] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Push the merged model instead of the adapter.")] = False,
    plain_base: Annotated[bool, PLAIN_BASE] = False,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the files without an upload.")] = False,
    prompts: Annotated[
        int, typer.Option(metavar="N", help="Number of held-out prompts for the comparison with the run.")
    ] = 100,
) -> None:
    """Upload a run's model, verified, with a model card to the Hugging Face Hub."""
    pushed = api.push(
        run,
        to=to,
        step=step,
        license=license,
        merged=merged,
        plain_base=plain_base,
        private=private,
        dry_run=dry_run,
        prompts=prompts,
        note=render.note,
    )
    lines = [f"folder  {pushed.folder}", f"proof   {pushed.proof.sentence}"]
    lines.append(f"at      {pushed.url}" if pushed.url else "nothing was sent; without --dry-run it would be")
    render.screen().print(render.plain("\n".join(lines)))
