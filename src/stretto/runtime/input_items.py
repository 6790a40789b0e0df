"""What a run reads besides its recipe, item by item: prompts, reward files, model files, its table of V*.

Names do not depend on where the run or its files are, and what is read is told by its content.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stretto import plugins
from stretto.errors import RecipeError
from stretto.models.files import ADAPTER, files_in, files_read
from stretto.models.source import locate
from stretto.models.template_file import template_path
from stretto.recipe.schema import Recipe, RoleModel, Roles
from stretto.runtime.base_copy import BASE, makes_base
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.runtime.value_table import COPY
from stretto.sandbox.imports import sources
from stretto.storage.atomic import to_json
from stretto.tasks.source import load_prompts
from stretto.types import Prompt

PROMPTS = "prompts"
"""The unit of prompts; that of files is bytes."""


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
        "model.name": lambda read: file_items(_model_paths(recipe, root, folder), read),
    }
    if template := template_path(recipe.task, root):
        found["task.chat_template"] = lambda read: file_items({template.name: template}, read)
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
        found["algorithm.vstar.table"] = lambda read: file_items({COPY: copy} if copy.exists() else {}, read)
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
    own = folder / BASE
    if makes_base(recipe, files):
        return {f"{BASE}/{name}": path for name, path in files_in(own).items()}
    read = files_read(files)
    if own.is_dir():  # of the run whose adapter training went on with
        return files_in(own) | {name: path for name, path in read.items() if name.startswith(ADAPTER)}
    return read


def _model(name: str, root: Path, read: Read) -> Items:
    """A model that is read as it is."""
    return file_items(files_read(locate(name, root)), read)


def _code(kinds: Sequence[str], folders: Sequence[str], given: UserFunctions, read: Read) -> Items:
    """The files of the user's that plug-ins are made of, and functions that were given as objects."""
    named = [kind for kind in kinds if plugins.is_plugin(kind)]
    files = {name: path for target in named for name, path in sources(target, folders).items()}
    return file_items(files, read) | {
        kind: InputFile(what=kind, size=1, unit="functions", sha256=digest)
        for kind, digest in given.sources(kinds).items()
    }


def file_items(paths: Mapping[str, Path], read: Read) -> Items:
    """Files by their content."""
    found = {}
    for name, path in paths.items():
        try:
            size = path.stat().st_size
            found[name] = InputFile(what=str(path), size=size, unit="bytes", sha256=read(path))
        except OSError as error:
            raise RecipeError.of(str(path), f"cannot be read: {error.strerror}", "make it readable") from error
    return found
