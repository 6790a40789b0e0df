"""`stretto push RUN --to ORG/NAME`: a run's model on the Hugging Face hub, with a card that says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.api import exports as api
from stretto.cli import render
from stretto.cli.merge import PLAIN_BASE


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    to: Annotated[str, typer.Option(metavar="ORG/NAME", help="The repository; made if there is none.")],
    step: Annotated[str, typer.Option(metavar="N", help="The checkpoint: its step, newest or best.")] = "newest",
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", metavar="ID", help="Its licence, such as apache-2.0.")
    ] = None,
    merged: Annotated[bool, typer.Option("--merged", help="A whole model where the run trained an adapter.")] = False,
    plain_base: Annotated[bool, PLAIN_BASE] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder and send nothing.")] = False,
    prompts: Annotated[int, typer.Option(metavar="N", help="Held-out prompts to compare with the run on.")] = 100,
) -> None:
    """Publish a run's model: files that were compared with the run, and a model card. --dry-run shows them first."""
    pushed = api.push(
        run,
        to=to,
        step=step,
        licence=licence,
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
