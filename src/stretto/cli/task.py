"""`stretto task check RECIPE`: print prompts as the model reads them, and test the rewards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from stretto.api.recipes import open_recipe
from stretto.cli import render
from stretto.recipe.load import folder_of

if TYPE_CHECKING:
    from stretto.api.task_check import TaskReport

task = typer.Typer(help="Inspect the task of a recipe.", no_args_is_help=True)


@task.callback()
def group() -> None:
    """Inspect the task of a recipe."""


@task.command("check")
def check(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. task.system=Hello."),
    ] = None,
    answer: Annotated[
        str, typer.Option("--answer", help="Wording of a correct answer around {reference}.")
    ] = "{reference}",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Show prompts as the model reads them and test the rewards. Loads no weights."""
    opened = open_recipe(recipe, changes or (), deep=False, training=False)
    from stretto.api.task_check import check_task  # torch and transformers, which --help does not need

    report = check_task(opened, folder_of(recipe), answer=answer)
    if json:
        render.document(report.document())
    else:
        render.screen().print(_page(report))
    if report.problems:
        raise typer.Exit(1)


def _page(report: TaskReport) -> Text:
    """Format the report as text."""
    page, prompts = Text(), report.prompts
    for shown in prompts.shown:
        page.append(f"prompt {render.plain(shown.id)}, {shown.tokens} tokens\n", style="bold")
        page.append("".join(f"  {line}\n" for line in render.plain(shown.text).splitlines()))
        page.append(f"  reference: {render.plain(str(shown.reference))}\n\n")
    page.append("prompts\n", style="bold")
    page.append(
        f"  {prompts.training} to train on, {prompts.heldout} held out, {prompts.dropped} dropped\n"
        f"  tokens: median {prompts.tokens_median:g}, longest {prompts.tokens_longest}; context {prompts.context}, "
        f"answers up to {prompts.max_new_tokens}; {prompts.too_long} leave no room\n\n"
    )
    if report.answers:
        page.append("answers  full marks  reward  parts\n", style="bold")
    else:
        page.append(
            "no answers were tried: only a reward model scores them, or the environment gives signals of its own\n"
        )
    for each in report.answers:
        reward = "-" if each.reward is None else f"{each.reward:.3g}"
        parts = ", ".join(f"{name} {value:.3g}" for name, value in each.parts.items())
        page.append(f"  {each.case:<10} {each.full:>4} of {each.judged:<4} {reward:>6}  {parts}\n")
    for name, seconds in report.seconds.items():
        page.append(f"  {name}: {seconds * 1000:.3g} ms a verdict\n")
    for problem in report.problems:
        page.append(f"\n{render.plain(str(problem))}", style="red")
    if report.problems:
        return page
    if not report.answers:
        return page.append("\nnothing wrong was found in the prompts; the rewards were not tried", style="yellow")
    return page.append("\nnothing wrong was found", style="green")
