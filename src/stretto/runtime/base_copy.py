"""A run's own copy of the model that it starts from, where transformers could not find that by name for long.

Runs side by side in one folder often start from the same model. What is the same, byte for byte, is then on the disk
once: a file with a name in each of the runs (a hard link), which is there as long as one of them is. Nothing keeps
count, so removing a run or moving it elsewhere harms no other. A run never writes into its base.
"""

from __future__ import annotations

import os
import shutil
import stat
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

BASE = "base"
"""The copy's name in a run's folder."""

WORTH_SHARING = 1 << 20
"""Bytes from which on a file is shared; the small ones are a run's own."""


def makes_base(recipe: Recipe, files: ModelFiles) -> bool:
    """True where a run makes a folder of a model that has none."""
    return files.scratch or (files.gguf is not None and recipe.model.adapter is not None)


def base_of_another_run(files: ModelFiles) -> Path | None:
    """The base of the run whose adapter training goes on with, where that run keeps it: it may be removed first."""
    folder = files.folder if files.adapter is not None and files.kind == "folder" else None
    ours = folder is not None and folder.name == BASE and (folder.parent / "recipe.yaml").is_file()
    return folder if ours else None


def prepare_base(
    recipe: Recipe,
    *,
    files: ModelFiles,
    folder: Path | None,
    device: torch.device,
    prompts: Sequence[Prompt],
    environment: Environment,
    note: Note,
    trains: bool = True,
) -> Path | None:
    """The run's own copy of its base model, made once and found again on resume.

    A scratch model needs one because its warm-up is part of it; a GGUF file, because an adapter must name a base that
    transformers can load; the base of another run, because that run may be removed: who only asks and never `trains`
    reads it where it is. Other models are found by name, and there is none.
    """
    there = base_of_another_run(files)
    if folder is None or not (there or makes_base(recipe, files)):
        return None
    base = folder / BASE
    if base.exists():
        return base
    if there is not None:
        if not trains:
            return None
        _store(lambda draft: _name_again(there, draft), base)
        return base
    plain = recipe.model.model_copy(update={"adapter": None, "quantize": "none"})
    policy = load(plain, replace(files, adapter=None), seed=recipe.seed, device=device)
    if files.scratch:
        prompts = fitting(recipe, prompts, policy.tokenizer, policy.context)
        refuse_none(recipe, prompts)
        section = recipe.model.scratch or Scratch()
        warm_up(policy, section, prompts=prompts, environment=environment, seed=recipe.seed, note=note)
    _store(lambda draft: _save(policy, draft, base), base)
    return base


def _store(write: Callable[[Path], object], base: Path) -> None:
    """Writes the model under another name first, so that what is called base is whole; a draft never stays."""
    draft = base.with_name(f".{base.name}.draft")
    with storing(base):
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        try:
            write(draft)
            for path in (*draft.rglob("*"), draft):
                Disk().sync(path)
            draft.rename(base)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # a full disk needs the room back
            raise


def _save(policy: Policy, draft: Path, base: Path) -> None:
    policy.save(draft)
    share(draft)
    share_with_others(draft, base)


def _name_again(there: Path, draft: Path) -> None:
    """Another run's base: its large files get a name here, and where that cannot be, they are copied too."""
    shutil.copytree(there, draft, copy_function=_named_or_copied)


def _named_or_copied(source: str, target: str) -> None:
    found, own = Path(source).lstat(), Path(target).parent.stat()
    if found.st_size >= WORTH_SHARING and found.st_uid == own.st_uid and stat.S_ISREG(found.st_mode):
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


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
