"""`stretto bench NAME`: equal work in stretto and in another framework, measured in turns on this machine."""

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
    Path | None, typer.Argument(metavar="[RECIPE]", help="scaling: recipe to run on 1, 2, 4, ... devices.")
]
Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. run.steps=20.")
]
MostDevices = Annotated[str | None, typer.Option(help="scaling: largest cluster, e.g. 2xcpu or 8xH100.")]
Sizes = Annotated[list[int] | None, typer.Option(min=1, help="scaling: number of devices to measure. Repeatable.")]
Ahead = Annotated[
    list[int] | None, typer.Option(min=1, help="scaling: number of devices to predict without a run. Repeatable.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="scaling: write the speed-up curve to this SVG file.")]
Peer = Annotated[
    str,
    typer.Option(
        metavar="trl|plain", help="step: framework to compare with; plain is a loop over transformers' generate."
    ),
]

Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads of each framework. Default: OMP_NUM_THREADS, else all cores.")
]

Turns = Annotated[
    int | None,
    typer.Option(min=1, help="Alternating measurements of each framework, each in a new process. Default: 2."),
]

PeerBatch = Annotated[list[int] | None, typer.Option(min=1, help="Batch size of TRL's training step. Repeatable.")]

WritePage = Annotated[Path | None, typer.Option(metavar="PAGE", help="Also write the results to this Markdown page.")]


def bench(
    name: Annotated[str, typer.Argument(metavar="rollout|step|publish|study|strategies|scaling", help="Benchmark.")],
    recipe: ScaledRecipe = None,
    changes: Changes = None,
    cluster: MostDevices = None,
    size: Sizes = None,
    ahead: Ahead = None,
    plot: Plot = None,
    case: Annotated[list[str] | None, typer.Option(help="Case to measure, or all. Repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed repetitions, after one warm-up.")] = 1,
    turns: Turns = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts per step.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Completions per prompt.")] = None,
    peer_batch: PeerBatch = None,
    model: Annotated[str, typer.Option(help="Model, named as in model.name of a recipe.")] = str(ModelSection().name),
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use random weights of this shape, e.g. qwen2.5-3b, instead of a model."),
    ] = None,
    threads: Threads = None,
    peer: Peer = "trl",
    write: WritePage = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Benchmark stretto against TRL, vLLM or generate on this machine. Takes minutes on an idle machine."""
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
    if write is not None:  # Printed first: an hour of measurements must not be lost with a page that cannot be written.
        command = shlex.join(["stretto", *sys.argv[1:]])
        text = section(document, date=datetime.date.today().isoformat(), command=command)
        put(write, f"stretto bench {name}", text)


def _show(document: dict[str, Any]) -> None:
    """Print one line per row, then its details."""
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
    """Measure a recipe on each number of devices in turn."""
    from stretto.bench import scaling_page
    from stretto.bench.page import put
    from stretto.bench.scaling import ScalingRequest, scaling
    from stretto.bench.scaling_sizes import refuse_cells

    if cluster is None:
        raise RecipeError.of("--cluster", "the number of devices is missing", "add it, e.g. --cluster 2xcpu")
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
    """Format a row as text."""
    from stretto.bench.page import number, times

    figures = f"{number(row['stretto'])} against {number(row['peer'])} {row['unit']}"
    ratio = "-" if row["ratio"] is None else f"{times(row['ratio'])}x"
    return f"{row['case']:<16} {ratio}  {figures}  ({row['peer_name']})"


def _beside(row: dict[str, Any]) -> list[str]:
    """Return lines with the work and the speed of a row."""
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
