"""A run's own copy of the model that it starts from, where transformers could not find that by name.

Runs side by side in one folder often start from the same model. What is the same, byte for byte, is then on the disk
once: a file with a name in each of the runs (a hard link), which is there as long as one of them is. Nothing keeps
count, so removing a run or moving it elsewhere harms no other. A run never writes into its base.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from stretto.environments.base import Environment
from stretto.models.load import Policy, load
from stretto.models.source import ModelFiles
from stretto.recipe.schema import Recipe, Scratch
from stretto.runtime.fitting import fitting, refuse_none
from stretto.runtime.warmup import warm_up
from stretto.storage.atomic import Disk, share, storing
from stretto.storage.digests import digest
from stretto.types import Prompt

Note = Callable[[str], None]
"""Tells the user something."""

WORTH_SHARING = 1 << 20
"""Bytes from which on a file is shared; the small ones are a run's own."""


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
    policy = load(plain, replace(files, adapter=None), seed=recipe.seed, device=device)
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
            share_with_others(draft, base)
            for path in (*draft.rglob("*"), draft):
                Disk().sync(path)
            draft.rename(base)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # a full disk needs the room back
            raise


def share_with_others(draft: Path, base: Path) -> None:
    """Puts the files of runs beside this one in the place of large ones that are equal to them.

    Where the file system has no hard links, or the other is not the user's own, the copy stays what it is.
    """
    for path in draft.rglob("*"):
        if path.is_file() and path.stat().st_size >= WORTH_SHARING:
            for other in _alike(path, base.parent, base.name, path.relative_to(draft)):
                with suppress(OSError):
                    _link(other, path)
                    break


def _alike(path: Path, run: Path, base: str, name: Path) -> Iterator[Path]:
    """Files of the same content in the bases of other runs; of several names of one file, the first."""
    seen, own, content = set[int](), path.stat(), ""
    for folder in sorted(run.resolve().parent.iterdir()):
        other = folder / base / name
        with suppress(OSError):
            found = other.lstat()
            mine = found.st_uid == own.st_uid and found.st_dev == own.st_dev and not other.is_symlink()
            if not mine or found.st_size != own.st_size or found.st_ino in seen | {own.st_ino}:
                continue
            seen.add(found.st_ino)
            content = content or digest(path)
            if digest(other) == content:
                yield other


def _link(other: Path, path: Path) -> None:
    """Gives a file of another run a name here, in the place of `path`."""
    beside = path.with_name(f".{path.name}.shared")
    os.link(other, beside)
    beside.replace(path)
