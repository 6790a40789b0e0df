"""`stretto merge RUN` and `stretto export RUN`: a run's model as files for other programs, verified before kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.api import exports as api
from stretto.cli import render
from stretto.errors import RecipeError

RUN = typer.Argument(metavar="RUN", help="Run folder.")
STEP = typer.Option(metavar="N", help="Checkpoint: a step number, newest or best.")
PROMPTS = typer.Option(metavar="N", help="Number of held-out prompts for the comparison with the run.")
PLAIN_BASE = typer.Option("--plain-base", help="For a run on a quantized base model: use the original base weights.")
JSON = typer.Option("--json", help="Print one JSON document on stdout, no other output.")


def merge(
    run: Annotated[Path, RUN],
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Output folder. Default: RUN/merged/step-NNNNNN.")
    ] = None,
    step: Annotated[str, STEP] = "newest",
    dtype: Annotated[
        str,
        typer.Option(
            help="Output dtype: auto (the base's, unless rounding loses > 10 %), float32, bfloat16, float16 or float64."
        ),
    ] = "auto",
    plain_base: Annotated[bool, PLAIN_BASE] = False,
    prompts: Annotated[int, PROMPTS] = 100,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Merge a run's adapter into its base model and verify the result. Needs no GPU."""
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
    gguf: Annotated[bool, typer.Option("--gguf", help="Write one GGUF file, as llama.cpp reads it.")] = False,
    quantise: Annotated[
        str, typer.Option(metavar="TYPE", help="GGUF type: auto, f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0.")
    ] = "auto",
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file. Default: RUN/gguf/step-NNNNNN-TYPE.gguf.")
    ] = None,
    step: Annotated[str, STEP] = "newest",
    plain_base: Annotated[bool, PLAIN_BASE] = False,
    prompts: Annotated[int, PROMPTS] = 100,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Export a run's model, tokenizer and chat template to GGUF and verify the file."""
    if not gguf:
        fix = "add --gguf; for transformers and vLLM, `stretto merge` makes a folder"
        raise RecipeError.of("stretto export", "the format is missing", fix)
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
