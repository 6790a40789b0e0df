"""What a report of a bug needs of a step, in one file: recipe, plan, numbers, samples, versions, what a replay found.

Weights are not in it. Without text, everything that a prompt or an answer could be read from is left out: messages,
answers, references, token ids, reasons of failures, the recipe's own prompts. What is left are numbers and keys.
"""

from __future__ import annotations

import json
import platform
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.recipe.resolve import dump
from stretto.recipe.schema import Recipe
from stretto.runtime.recipe_file import load_run_recipe
from stretto.runtime.recorded_step import read_step
from stretto.runtime.replay import Replay
from stretto.storage.atomic import storing, to_json
from stretto.storage.json_lines import read_rows

HIDDEN = "left out"
"""What stands where text was."""

PLAIN = ("plan.json", "inputs.json", "events.jsonl")
"""Files that hold no text of prompts or answers."""


def pack(found: Replay, target: Path, *, text: bool) -> Path:
    """Writes the file; returns its path."""
    folder = found.folder
    recipe, _ = load_run_recipe(folder)
    steps = [each.step for each in found.steps]
    with storing(target, StrettoError), zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("replay.json", to_json(found.document(), indent=1))
        file.writestr("versions.json", to_json(versions(), indent=1))
        file.writestr("recipe.yaml", dump(recipe if text else without_prompts(recipe)))
        for name in PLAIN:
            if (folder / name).is_file():
                file.write(folder / name, name)
        rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] <= steps[-1]]
        file.writestr("metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
        for step in steps:
            kept = [row if text else without_text(row) for row in read_step(folder, step).rows]
            file.writestr(f"samples/step-{step:06d}.jsonl", "".join(f"{json.dumps(row)}\n" for row in kept))
    return target


def versions() -> dict[str, Any]:
    """This machine and its packages."""
    packages = {each.metadata["Name"]: each.version for each in distributions()}
    return {"python": sys.version, "platform": platform.platform(), "packages": dict(sorted(packages.items()))}


def without_text(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a samples file with its numbers alone."""
    talks = [
        {name: value for name, value in talk.items() if name not in ("tokens", "text")} for talk in row["conversations"]
    ]
    kept = ("step", "prompt", "visit", "attempt", "environment", "reward", "used")
    return {
        **{name: row[name] for name in kept},
        "conversations": talks,
        "failure": None if row["failure"] is None else HIDDEN,
    }


def without_prompts(recipe: Recipe) -> Recipe:
    """The recipe without what the user wrote to the model."""
    told = {name: HIDDEN for name in ("prompt", "system") if getattr(recipe.task, name, None) is not None}
    return recipe.model_copy(update={"task": recipe.task.model_copy(update=told)})
