"""`stretto task`: print prompts as the model reads them, test the rewards, and play episodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from stretto.api.recipes import check_deeply, open_recipe
from stretto.cli import render
from stretto.errors import RecipeError, StrettoError
from stretto.recipe.load import folder_of

if TYPE_CHECKING:
    from stretto.api.task_check import TaskReport
    from stretto.api.task_play import PlayedEpisode

STYLES = {"context": "", "reply": "green", "call": "cyan", "note": "yellow"}
"""Kind of event of an episode -> style of its text."""

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


@task.command("play")
def play(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. environment.turns=3."),
    ] = None,
    replies: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Read replies from paragraphs or a .json list.")
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Sample replies from the recipe's model.")] = False,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="ID", help="Play the prompt with this id.")] = None,
    index: Annotated[
        int | None, typer.Option("--index", min=0, metavar="N", help="Play the training prompt at this index.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Play one episode: type, read or sample the model's replies."""
    if model and replies is not None:
        raise RecipeError.of("--from", "has no effect with --model", "omit one of the two")
    if prompt is not None and index is not None:
        raise RecipeError.of("--index", "has no effect with --prompt", "omit one of the two")
    opened, root = open_recipe(recipe, changes or (), deep=False, training=False), folder_of(recipe)
    from stretto.api import task_play as api  # torch and transformers, which --help does not need

    chosen = api.choose_prompt(opened, root, prompt=prompt, index=index)
    by_file = None if replies is None else api.FileReplies(replies)
    quiet = json and (model or by_file is not None)
    typed = not model and by_file is None

    def show(kind: str, text: str) -> None:
        if quiet and kind != "note":
            return
        screen = render.screen(error=quiet)
        lines = "".join(f"  {line}\n" for line in render.plain(text).splitlines())
        screen.print(Text().append(f"{kind}\n", style="bold").append(lines, style=STYLES[kind]), end="")
        if typed and kind == "context":
            screen.print("reply> ", style="bold", end="")

    if not quiet:
        show("note", f"prompt {chosen.id}, reference: {chosen.reference}")
    try:
        if model:
            check_deeply(opened, root, training=False)
            episode = api.play_by_model(opened, root, chosen, note=render.note)
            for kind, text in api.events(episode.turns):
                show(kind, text)
        else:
            episode = api.play_by_hand(opened, root, chosen, by_file or api.typed_reply, show=show, echo=not typed)
    except (KeyboardInterrupt, StrettoError) as error:
        if typed:
            render.screen().print()  # ends the line of the unanswered input prompt
        if isinstance(error, KeyboardInterrupt):
            render.note("the episode was ended by Ctrl-C; nothing was scored")
        raise
    if by_file is not None and (left := len(by_file.replies) - by_file.used):
        render.note(f"{left} of {len(by_file.replies)} replies in {replies} were not used")
    if json:
        render.document(episode.document())
    else:
        render.screen().print(_result(episode))
    if episode.failure is not None:
        raise typer.Exit(1)


def _result(episode: PlayedEpisode) -> Text:
    """Format the outcome, the reward and the failure of an episode."""
    found, page = episode.document(), Text()
    page.append("result\n", style="bold")
    if found["answer"] is not None:
        page.append(f"  answer: {render.plain(found['answer'])}\n")
    if found["signals"]:
        page.append(f"  signals: {render.plain(_numbers(found['signals']))}\n")
    if found["turn_rewards"] is not None:
        page.append(f"  turn rewards: {', '.join(f'{value:.3g}' for value in found['turn_rewards'])}\n")
    if found["reward"] is not None:
        parts = _numbers(found["reward"]["parts"])
        page.append(f"  reward: {found['reward']['value']:.3g} ({render.plain(parts)})\n")
    elif episode.failure is None:
        page.append("  reward: no reward function applies\n")
    if episode.failure is not None:
        page.append(f"  failed: {render.plain(episode.failure)}\n", style="red")
    page.rstrip()
    return page


def _numbers(numbers: Mapping[str, float]) -> str:
    """Format named numbers on one line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())


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
