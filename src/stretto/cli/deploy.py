"""`stretto deploy TARGET RECIPE`: files that start a run on Slurm, Kubernetes, rented machines or in a container."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.api import deploying as api
from stretto.cli import render


def deploy(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="slurm, modal, kuberay, skypilot or docker.")],
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    cluster: Annotated[
        str, typer.Option(metavar="TEXT", help="The machines, such as 8xH100 or 2x8xH100 (hosts first).")
    ],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as run.steps=80.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write; default: deploy/<recipe>-<target>.")
    ] = None,
    hours: Annotated[
        int | None, typer.Option(metavar="N", help="slurm, modal: hours of one job; the next one goes on. Default 24.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="The container's name; default: <recipe>:latest.")
    ] = None,
) -> None:
    """Write the files that start a recipe elsewhere, resume after a preemption included. Starts and sends nothing."""
    written = api.deploy(target, recipe, cluster=cluster, changes=changes or (), to=to, hours=hours, image=image)
    plan = "none: supervised training is not planned yet, so that it fits is not checked"
    if written.step_seconds is not None:
        plan = f"{written.strategy}, {written.step_seconds:.3g} s a step by the planner's count"
    lines = [
        f"folder  {written.folder}",
        f"files   {', '.join(path.name for path in written.files)}",
        f"plan    {plan}",
        *(f"note    {note}" for note in written.notes),
        f"next    {written.next}",
    ]
    render.screen().print(render.plain("\n".join(lines)))
