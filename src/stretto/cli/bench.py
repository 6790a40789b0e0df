"""`stretto bench NAME`: stretto against what a user would otherwise pick, the same work, in one run on this machine."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from stretto.api.recipes import open_recipe, recipe_to_plan
from stretto.cli import render
from stretto.errors import RecipeError
from stretto.recipe.load import folder_of
from stretto.recipe.schema import ModelSection

ScaledRecipe = Annotated[
    Path | None, typer.Argument(metavar="[RECIPE]", help="scaling: a recipe to run on 1, 2, 4, … devices.")
]
Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as run.steps=20.")
]
MostDevices = Annotated[str | None, typer.Option(help="scaling RECIPE: the most devices, such as 2xcpu or 8xH100.")]
Sizes = Annotated[list[int] | None, typer.Option(min=1, help="scaling RECIPE: a number of devices. Can be repeated.")]
Ahead = Annotated[
    list[int] | None, typer.Option(min=1, help="scaling RECIPE: a number that is only predicted. Can be repeated.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="scaling RECIPE: the speed-up as SVG.")]
Peer = Annotated[
    str, typer.Option(metavar="trl|plain", help="step: TRL, or a plain loop on generate where that is missing.")
]

Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of every side; default OMP_NUM_THREADS or all cores.")
]

Turns = Annotated[
    int | None, typer.Option(min=1, help="How often the sides take turns, each time in a new process; default 2.")
]

PeerBatch = Annotated[list[int] | None, typer.Option(min=1, help="Answers that TRL trains at once. Can be repeated.")]

WritePage = Annotated[Path | None, typer.Option(metavar="PAGE", help="Also put the results into a Markdown page.")]


def bench(
    name: Annotated[
        str, typer.Argument(metavar="rollout|step|publish|study|strategies|scaling", help="What to measure.")
    ],
    recipe: ScaledRecipe = None,
    changes: Changes = None,
    cluster: MostDevices = None,
    size: Sizes = None,
    ahead: Ahead = None,
    plot: Plot = None,
    case: Annotated[list[str] | None, typer.Option(help="A case, or all. Can be repeated.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Repetitions that count, after one that does not.")] = 1,
    turns: Turns = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts a step.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Answers per prompt.")] = None,
    peer_batch: PeerBatch = None,
    model: Annotated[str, typer.Option(help="The model, named as in a recipe.")] = str(ModelSection().name),
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="Random weights of this shape, such as qwen2.5-3b, not a model.")
    ] = None,
    threads: Threads = None,
    peer: Peer = "trl",
    write: WritePage = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Measure stretto against what you would otherwise use. Takes minutes; nothing else should run meanwhile."""
    scaled = {"a recipe": recipe, "--cluster": cluster, "--size": size, "--ahead": ahead, "--plot": plot}
    if recipe is not None and name == "scaling":
        _scaling(recipe, changes or (), cluster, size or (), ahead or (), plot=plot, write=write, json=json)
        return
    if given := [word for word, value in scaled.items() if value]:
        reason = "belongs to `stretto bench scaling RECIPE`"
        raise RecipeError.of(given[0], reason, "leave it out, or give scaling a recipe and --cluster")
    from stretto.bench.page import put, section
    from stretto.bench.run import BenchRequest, measure

    wish = BenchRequest(
        bench=name,
        cases=tuple(case or ()),
        model=model,
        shape=shape,
        prompts=prompts,
        samples=samples,
        steps=steps,
        turns=turns,
        batches=tuple(peer_batch or (8, 16, 64)),
        threads=threads,
        peer=peer,
    )
    told = render.screen(error=True)
    document = measure(wish, note=lambda text: told.print(Text(render.plain(text), style="dim")))
    if json:
        render.document(document)
    else:
        _show(document)
    if write is not None:  # after that: what took an hour to measure has been said, whatever becomes of the page
        command = shlex.join(["stretto", *sys.argv[1:]])
        text = section(document, date=datetime.date.today().isoformat(), command=command)
        put(write, f"stretto bench {name}", text)


def _show(document: dict[str, Any]) -> None:
    """A line for each row, and what stands beside it."""
    screen = render.screen()
    for row in document["rows"]:
        screen.print(_line(row))
        for line in _beside(row):
            screen.print(Text(f"    {line}", style="dim"))


def _scaling(
    recipe: Path,
    changes: Sequence[str],
    cluster: str | None,
    sizes: Sequence[int],
    ahead: Sequence[int],
    *,
    plot: Path | None,
    write: Path | None,
    json: bool,
) -> None:
    """Measures a recipe on one number of devices after the other."""
    from stretto.bench import scaling_page
    from stretto.bench.page import put
    from stretto.bench.scaling import ScalingRequest, scaling
    from stretto.bench.scaling_sizes import refuse_cells

    if cluster is None:
        raise RecipeError.of("--cluster", "it does not say on how many devices", "such as --cluster 2xcpu")
    wish = ScalingRequest(
        recipe=recipe_to_plan(recipe, changes),
        path=recipe,
        root=folder_of(recipe),
        changes=tuple(changes),
        cluster=cluster,
        sizes=tuple(dict.fromkeys(sorted(sizes))),
        ahead=tuple(dict.fromkeys(sorted(ahead))),
    )
    refuse_cells(wish.recipe)
    if len(wish.not_at_hand) < len(wish.all_sizes):  # something is run, so everything must be as a run needs it
        open_recipe(recipe, changes, deep=False)
    told = render.screen(error=True)
    document = scaling(wish, note=lambda text: told.print(Text(render.plain(text), style="dim")))
    if plot is not None:
        plot.write_text(scaling_page.picture(document), encoding="utf-8")
    if write is not None:
        command = shlex.join(["stretto", *sys.argv[1:]])
        text = scaling_page.section(document, date=datetime.date.today().isoformat(), command=command)
        put(write, f"stretto bench scaling {recipe.stem}", text)
    if json:
        render.document(document)
        return
    screen = render.screen()
    lines = (*scaling_page.table(document), "", *scaling_page.losses(document), *scaling_page.failures(document), "")
    lines += tuple(scaling_page.bars(document))
    for line in lines:
        screen.print(Text(line), soft_wrap=True)


def _line(row: dict[str, Any]) -> str:
    """A row for people."""
    from stretto.bench.page import number, times

    figures = f"{number(row['stretto'])} against {number(row['peer'])} {row['unit']}"
    ratio = "-" if row["ratio"] is None else f"{times(row['ratio'])}x"
    return f"{row['case']:<16} {ratio}  {figures}  ({row['peer_name']})"


def _beside(row: dict[str, Any]) -> list[str]:
    """What of the work and the speed stands in a row: a line for each, or none."""
    from stretto.bench.page import DIVERGENCES, number

    tokens = ((what, row.get(f"tokens_{what}", {}).get("stretto")) for what in ("generated", "trained"))
    work = [f"{count:,} tokens {what}" for what, count in tokens if count]
    work += [f"{number(flops / 1e12)} TFLOP {kind}" for kind, flops in row.get("flops", {}).items()]
    speed = [
        f"{side} {number(done)} GFLOP/s ({row['share_of_matmul_rate'][side]:.0%})"
        for side, done in row.get("gflops_per_second", {}).items()
    ]
    speed += [f"matmul rate {number(row['matmul_gflops_per_second'])} GFLOP/s"] if speed else []
    rates = [f"{number(row[rate])} {how}" for rate, how in DIVERGENCES.items() if rate in row]
    speed += [f"divergences per 1,000 tokens {' and '.join(rates)}"] if rates else []
    if "bytes" in row:
        seconds = ", ".join(f"{part} {number(took)} s" for part, took in row["seconds"].items())
        work.append(f"{number(row['bytes'] / 1e6)} MB, {seconds}; of the prediction: {row['constants']}")
    return [", ".join(line) for line in (work, speed, row.get("failed", {}).values()) if line]
