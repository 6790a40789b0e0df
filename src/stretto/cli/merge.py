"""`stretto merge RUN` and `stretto export RUN`: the model of a run as files for other programs, proved before kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.api import exports as api
from stretto.cli import render
from stretto.errors import RecipeError

RUN = typer.Argument(metavar="RUN", help="The folder of a run.")
STEP = typer.Option(metavar="N", help="The checkpoint: its step, newest or best.")
PROMPTS = typer.Option(metavar="N", help="Held-out prompts to compare with the run on.")
PLAIN_BASE = typer.Option("--plain-base", help="After training on a base in few bits: the base as it is stored.")
JSON = typer.Option("--json", help="Print one JSON document and nothing else.")


def merge(
    run: Annotated[Path, RUN],
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder to write; default: RUN/merged/step-NNNNNN.")
    ] = None,
    step: Annotated[str, STEP] = "newest",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16, float64. auto keeps what was trained.")
    ] = "auto",
    plain_base: Annotated[bool, PLAIN_BASE] = False,
    prompts: Annotated[int, PROMPTS] = 100,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Merge a run's adapter into its base: a whole model, proved to answer as the run does. Needs no GPU."""
    merged = api.merge(run, to=to, step=step, dtype=dtype, plain_base=plain_base, prompts=prompts, note=render.note)
    if json:
        render.document(merged.document())
        return
    lines = [
        f"model   {merged.folder}  ({merged.dtype}, step {merged.step})",
        f"proof   {merged.proof.sentence}",
        f"lost    {merged.lost:.2g} of the adapter's update, by rounding",
    ]
    render.screen().print(render.plain("\n".join(lines)))


def export(
    run: Annotated[Path, RUN],
    gguf: Annotated[bool, typer.Option("--gguf", help="One GGUF file, for llama.cpp and programs around it.")] = False,
    quantise: Annotated[
        str, typer.Option(metavar="TYPE", help="auto, f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0.")
    ] = "auto",
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; default: RUN/gguf/step-NNNNNN-TYPE.gguf.")
    ] = None,
    step: Annotated[str, STEP] = "newest",
    plain_base: Annotated[bool, PLAIN_BASE] = False,
    prompts: Annotated[int, PROMPTS] = 100,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Write a run's model in another format, tokenizer and chat template included, and compare it with the run."""
    if not gguf:
        fix = "add --gguf; for transformers and vLLM, `stretto merge` makes a folder"
        raise RecipeError.of("stretto export", "does not say which format", fix)
    written = api.export_gguf(
        run, to=to, step=step, quantise=quantise, plain_base=plain_base, prompts=prompts, note=render.note
    )
    if json:
        render.document(written.document())
        return
    lines = [
        f"model   {written.path}  ({written.kind}, {written.size / 2**20:,.0f} MB, step {written.step})",
        f"proof   {written.proof.sentence}",
    ]
    render.screen().print(render.plain("\n".join(lines)))
