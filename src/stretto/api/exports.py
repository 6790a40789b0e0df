"""A run's model outside of the run, as the command line asks for it: merged, written as GGUF, published, talked to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.api.run import Run
from stretto.api.targets import place_of
from stretto.errors import RecipeError

if TYPE_CHECKING:
    from stretto.export.chat import ChatSession
    from stretto.export.gguf_file import GgufExport
    from stretto.export.merge import Merged
    from stretto.export.push import Hub, Pushed

Note = Callable[[str], None]
"""Tells the user something that asks for nothing."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
"""What `merge` writes weights in."""


def merge(
    run: str | os.PathLike[str] | Run,
    *,
    to: str | os.PathLike[str] | None = None,
    step: str = "newest",
    dtype: str = "auto",
    plain_base: bool = False,
    prompts: int = 100,
    note: Note = lambda text: None,
) -> Merged:
    """Writes the whole model that a run's adapter and its base amount to, proved to answer as the run does.

    `to` is by default RUN/merged/step-NNNNNN. `dtype` auto is the base's, or float32 where that would round away what
    was trained. A base in few bits is written as the run has read it, or with `plain_base` as it is stored.
    ExportError, and nothing is kept, if the proof fails.
    """
    from stretto.export.merge import merge as merged
    from stretto.export.saved_model import SavedModel, using

    _refuse("--dtype", dtype, DTYPES)
    _refuse_count(prompts)

    def use(model: SavedModel) -> Merged:
        target = Path(to) if to is not None else model.run / "merged" / model.checkpoint.name
        return merged(model, target, dtype=dtype, plain=plain_base, most=prompts, note=note)

    return using(place_of(run), step, use, note=note)


def export_gguf(
    run: str | os.PathLike[str] | Run,
    *,
    to: str | os.PathLike[str] | None = None,
    step: str = "newest",
    quantise: str = "auto",
    plain_base: bool = False,
    prompts: int = 100,
    note: Note = lambda text: None,
) -> GgufExport:
    """Writes a run's model as one GGUF file for llama.cpp and its relatives, read back and compared with the run.

    `to` is by default RUN/gguf/step-NNNNNN-TYPE.gguf. `plain_base` is as for `merge`.
    """
    from stretto.export.gguf_file import TYPES, export
    from stretto.export.saved_model import using

    _refuse("--quantise", quantise, ("auto", *TYPES))
    _refuse_count(prompts)
    target = None if to is None else Path(to)
    return using(
        place_of(run),
        step,
        lambda model: export(model, target, kind=quantise, plain=plain_base, most=prompts, note=note),
        note=note,
    )


def push(
    run: str | os.PathLike[str] | Run,
    *,
    to: str,
    step: str = "newest",
    license: str | None = None,
    merged: bool = False,
    plain_base: bool = False,
    private: bool = False,
    dry_run: bool = False,
    prompts: int = 100,
    hub: Hub | None = None,
    note: Note = lambda text: None,
) -> Pushed:
    """Publishes a run's model with a model card as `to` (ORG/NAME) on a hub, by default Hugging Face's.

    With `dry_run` the folder is written and nothing is sent. An adapter whose base others cannot get is merged first;
    `plain_base` is then as for `merge`.
    """
    from stretto.export.push import HuggingFaceHub
    from stretto.export.push import push as pushed
    from stretto.export.saved_model import SavedModel, using

    _refuse_count(prompts)
    chosen = None if dry_run else hub or HuggingFaceHub()

    def use(model: SavedModel) -> Pushed:
        return pushed(
            model, to, license=license, merged=merged, plain=plain_base, private=private, hub=chosen, most=prompts,
            note=note,
        )  # fmt: skip

    return using(place_of(run), step, use, note=note)


def chat(
    run: str | os.PathLike[str] | Run,
    *,
    step: str = "newest",
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    note: Note = lambda text: None,
) -> ChatSession:
    """A conversation with a run's model; `session.say(text, show)` answers. Left out settings are as in training."""
    from stretto.export.chat import ChatSession
    from stretto.export.saved_model import using

    return using(
        place_of(run),
        step,
        lambda model: ChatSession(model, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed),
        note=note,
    )


def _refuse(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RecipeError.of(field, f"{value!r} is none of them", f"use {', '.join(allowed)}")


def _refuse_count(prompts: int) -> None:
    if prompts < 1:
        raise RecipeError.of("--prompts", f"{prompts} prompts prove nothing", "use 1 or more")
