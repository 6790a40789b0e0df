"""Paths in a run's folder that are absolute, and right again after the folder was moved or copied.

PEFT looks for an adapter's base where `adapter_config.json` says, and knows nothing of run folders; so the path is
written anew as soon as stretto works with the run. The folder that a recipe's relative paths count from is remembered
in two ways, as it was and from the run's folder, for a project that was moved as a whole.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from stretto.errors import StrettoError
from stretto.models.source import locate
from stretto.recipe.schema import Recipe
from stretto.storage.atomic import read_small, replace
from stretto.storage.manifest import ADAPTER, BASE

ROOT, FROM_HERE = "# root: ", "# root from here: "
"""How the first two lines of a run's recipe.yaml begin."""


def root_lines(root: Path, folder: Path) -> str:
    """The first lines of recipe.yaml."""
    from_here = os.path.relpath(root.resolve(), folder.resolve())
    return f"{ROOT}{_quoted(str(root.resolve()))}\n{FROM_HERE}{_quoted(from_here)}\n"


def root_in(text: str, folder: Path) -> Path:
    """What relative paths of a run's recipe count from: the folder as it was, or where it is from here now."""
    lines = text.split("\n", 2)[:2]
    starts = (ROOT, FROM_HERE)
    said = {start: _unquoted(line.removeprefix(start)) for line in lines for start in starts if line.startswith(start)}
    if ROOT not in said:
        return Path.cwd()
    from_here = folder.resolve() / said.get(FROM_HERE, ".")
    if not Path(said[ROOT]).is_dir() and FROM_HERE in said and from_here.is_dir():
        return from_here.resolve()
    return Path(said[ROOT])


def _quoted(path: str) -> str:
    """A path as a comment of YAML can hold it."""
    return path if path.isprintable() and not path.startswith('"') else json.dumps(path)


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text)) if text.startswith('"') else text.rstrip("\r")
    except ValueError:
        return text


def point_adapters(folder: Path, recipe: Recipe, root: Path) -> None:
    """Lets the adapters of a run's checkpoints name their base where it is now."""
    base = _base(folder, recipe, root)
    if recipe.model.adapter is None or base is None:
        return
    for path in (folder / "checkpoints").glob(f"step-*/{ADAPTER}"):
        # A file that cannot be read is for the manifest to tell; one that cannot be written serves all the same.
        with suppress(OSError, ValueError, StrettoError, RecursionError):
            found = json.loads(read_small(path).decode("utf-8"))
            if isinstance(found, dict) and os.path.isabs(str(found.get(BASE))) and found[BASE] != str(base):
                replace(path, [json.dumps({**found, BASE: str(base)}, indent=2, sort_keys=True)])


def _base(folder: Path, recipe: Recipe, root: Path) -> Path | None:
    """The folder of the model that adapters adapt; none where it has a name that does not depend on folders."""
    own = folder / "base"
    if own.is_dir():
        return own.resolve()
    try:
        files = locate(recipe.model.name, root)
    except StrettoError:
        return None
    return files.folder if files.portable else None
