"""A run's own copy of the model that it starts from, where transformers could not find that by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stretto.environments.base import Environment
from stretto.models.load import Policy, load
from stretto.models.source import ModelFiles
from stretto.recipe.schema import Recipe, Scratch
from stretto.runtime.fitting import fitting, refuse_none
from stretto.runtime.warmup import warm_up
from stretto.storage.atomic import Disk, share, storing
from stretto.types import Prompt

Note = Callable[[str], None]
"""Tells the user something."""


def keeps_base(recipe: Recipe, files: ModelFiles) -> bool:
    """True where a run reads a copy of its own."""
    return files.scratch or (files.gguf is not None and recipe.model.adapter is not None)


def prepare_base(
    recipe: Recipe,
    *,
    files: ModelFiles,
    folder: Path | None,
    device: torch.device,
    prompts: Sequence[Prompt],
    environment: Environment,
    note: Note,
) -> Path | None:
    """The run's own copy of its base model, made once and found again on resume.

    A scratch model needs one because its warm-up is part of it; a GGUF file, because an adapter must name a base that
    transformers can load. Other models are found by name, and there is none.
    """
    if folder is None or not keeps_base(recipe, files):
        return None
    base = folder / "base"
    if base.exists():
        return base
    plain = recipe.model.model_copy(update={"adapter": None, "quantize": "none"})
    policy = load(plain, files, seed=recipe.seed, device=device)
    if files.scratch:
        prompts = fitting(recipe, prompts, policy.tokenizer, policy.context)
        refuse_none(recipe, prompts)
        section = recipe.model.scratch or Scratch()
        warm_up(policy, section, prompts=prompts, environment=environment, seed=recipe.seed, note=note)
    _store(policy, folder / ".base.draft", base)
    return base


def _store(policy: Policy, draft: Path, base: Path) -> None:
    """Writes the model under another name first, so that what is called base is whole; a draft never stays."""
    with storing(base):
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        try:
            policy.save(draft)
            share(draft)
            for path in (*draft.rglob("*"), draft):
                Disk().sync(path)
            draft.rename(base)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # a full disk needs the room back
            raise
