"""`stretto deploy TARGET RECIPE`: files that start a run on Slurm, Kubernetes, rented machines or in a container."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.api import deploying as api
from stretto.cli import render


def deploy(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="slurm, modal, kuberay, skypilot or docker.")],
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    cluster: Annotated[
        str, typer.Option(metavar="TEXT", help="Machines to run on, e.g. 8xH100, or 2x8xH100 for two hosts.")
    ],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. run.steps=80.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Output folder. Default: deploy/<recipe>-<target>.")
    ] = None,
    hours: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="slurm, modal: time limit of one job in hours; the next job resumes. Default: 24."
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="Container image name. Default: <recipe>:latest.")
    ] = None,
) -> None:
    """Write job files that start a recipe on a cluster and resume it. Nothing is sent."""
    written = api.deploy(target, recipe, cluster=cluster, changes=changes or (), to=to, hours=hours, image=image)
    plan = "not available for supervised training yet; memory is not checked"
    if written.step_seconds is not None:
        plan = f"{written.strategy}, {written.step_seconds:.3g} s per step by the planner"
    lines = [
        f"folder  {written.folder}",
        f"files   {', '.join(path.name for path in written.files)}",
        f"plan    {plan}",
        *(f"note    {note}" for note in written.notes),
        f"next    {written.next}",
    ]
    render.screen().print(render.plain("\n".join(lines)))
