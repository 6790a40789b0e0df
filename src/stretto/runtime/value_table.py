"""The table of V*: rewards of the reference's own answers, kept beside the runs and found by what they were made from.

A table is a file of lines: first what it was made from, then one line per answer. Rewards are kept rather than values,
so `beta1` and the number of samples can change without sampling again. Its name is a hash of everything the rewards
depend on, so a table is never used for other prompts, another reward, reference or sampler than its own. Making one is
for `runtime.value`; a run keeps a copy in its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stretto.algorithms.catalog import facts_of
from stretto.errors import Problem, RecipeError
from stretto.models.files import files_read
from stretto.models.source import ModelFiles, locate
from stretto.plugins import folders_of, is_plugin
from stretto.recipe.resolve import vstar_of
from stretto.recipe.schema import Recipe, Vstar
from stretto.runtime.interrupt import stop_if_interrupted
from stretto.runtime.recipe_file import with_lasting_paths
from stretto.sandbox.imports import sources
from stretto.storage.atomic import read_small, replace, storing, to_json, write_all
from stretto.storage.digests import digest as file_digest
from stretto.tasks.source import load_prompts, split_task
from stretto.types import Prompt

FIELD = "algorithm.vstar.table"
COPY = "vstar.jsonl"
"""The table's name in a run's folder."""
FIRST = "run `stretto value RECIPE` first; it samples the reference once, and goes on where it stopped"
"""What to do where there is no table, or only a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One answer of the reference."""

    prompt: str
    """Id of what was asked."""
    attempt: int
    """Which of the prompt's answers."""
    reward: float | None
    """What it was worth, or none if it has no verdict; a later `stretto value` asks again."""
    tokens: int
    """Tokens sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The answers there are."""

    made_from: dict[str, Any]
    """What the rewards depend on."""
    rows: dict[tuple[str, int], Row]
    """Rows by prompt and attempt."""

    def missing(self, prompts: Iterable[Prompt], samples: int) -> list[tuple[Prompt, int]]:
        """Prompts and attempts that have no verdict yet, a prompt's attempts together."""
        return [(p, k) for p in prompts for k in range(samples) if self._reward(p.id, k) is None]

    def untried(self, prompts: Iterable[Prompt], samples: int) -> int:
        """How many prompts have attempts that were never made."""
        return sum(any((p.id, k) not in self.rows for k in range(samples)) for p in prompts)

    def rewards(self, prompts: Iterable[Prompt], samples: int) -> dict[str, list[float]]:
        """The verdicts on each prompt's first `samples` answers; prompts without any are left out."""
        found = {p.id: [r for k in range(samples) if (r := self._reward(p.id, k)) is not None] for p in prompts}
        return {name: rewards for name, rewards in found.items() if rewards}

    def values(self, prompts: Iterable[Prompt], section: Vstar, *, largest: bool) -> dict[str, float]:
        """V* of each prompt that has a verdict; the largest reward if so asked."""
        from stretto.algorithms.optimal import optimal_value  # it loads PyTorch

        beta1 = 0.0 if largest else section.beta1
        rewards = self.rewards(prompts, section.samples)
        return {name: optimal_value(found, beta1) for name, found in rewards.items()}

    def tokens(self, prompts: Iterable[Prompt], samples: int) -> int:
        """What the answers that are read cost."""
        keys = [(p.id, k) for p in prompts for k in range(samples)]
        return sum(self.rows[key].tokens for key in keys if key in self.rows)

    def _reward(self, prompt: str, attempt: int) -> float | None:
        row = self.rows.get((prompt, attempt))
        return row.reward if row else None


def ingredients(recipe: Recipe, prompts: Sequence[Prompt], root: Path) -> dict[str, Any]:
    """Everything that the rewards of the reference's answers depend on, large parts as digests. Paths are told as a
    run tells them, so that it finds the table that was made before."""
    recipe = with_lasting_paths(recipe, root)
    files = locate(recipe.model.name, root)
    own = [recipe.environment.kind, *(part.kind for part in recipe.rewards)]
    code = {name: sources(name, folders_of(root)) for name in own if is_plugin(name)}
    asked = sorted(to_json([p.id, list(p.messages), p.reference, dict(p.tags)]) for p in prompts)
    keys = _keys(recipe)
    read = {"files": weights_digest(files)} | ({"seed": recipe.seed} if files.scratch else {})
    return {
        "prompts": digest(*asked),
        "rewards": keys["rewards"],
        "code": {kind: contents_digest(modules) for kind, modules in code.items()},
        "environment": keys["environment"],
        "reference": keys["reference"] | read,
        "sampler": keys["sampler"],
        **_judging(recipe, root),
    }


def _keys(recipe: Recipe) -> dict[str, Any]:
    """The ingredients that are keys of the recipe, for which no file is read."""
    return {
        "rewards": [part.model_dump(mode="json", exclude={"deadline"}) for part in recipe.rewards],
        "environment": recipe.environment.model_dump(mode="json", exclude={"deadline", "hosts"}),
        "reference": recipe.model.model_dump(mode="json", exclude={"adapter", "shape"}),
        "sampler": _sampler(recipe),
    }


def _sampler(recipe: Recipe) -> dict[str, Any]:
    """How answers are made; what is left open is left out, so that tables of before are found."""
    usual = recipe.engine.model_dump(mode="json", include={"max_new_tokens", "temperature", "top_p"})
    told = {key: getattr(recipe.engine, key, None) for key in ("top_k", "stop")}
    told |= {key: getattr(recipe.task, key) for key in ("template", "chat_template", "drop_longer_than")}
    return usual | {key: list(value) if isinstance(value, tuple) else value for key, value in told.items() if value}


def _judging(recipe: Recipe, root: Path) -> dict[str, Any]:
    """The reward model, where there is one; a head of noise follows from the seed."""
    judge = recipe.roles.reward_model
    if judge is None or judge.name is None:
        return {}
    files = locate(judge.name, root)
    return {"judge": ["scratch", recipe.seed] if files.scratch else weights_digest(files)}


def digest(*texts: str) -> str:
    """A short name for texts."""
    hashed = hashlib.blake2b(digest_size=12)
    for text in texts:
        hashed.update(f"{len(text)}|{text}".encode())
    return hashed.hexdigest()


def weights_digest(files: ModelFiles) -> str:
    """Tells two models apart, by all that is read of their files."""
    read = files_read(files)
    return contents_digest(read) if read else files.name


def contents_digest(files: Mapping[str, Path]) -> str:
    """Tells the contents of some files apart, whatever folders they are in."""
    return digest(*(text for name in sorted(files) for text in (name, file_digest(files[name], stop_if_interrupted))))


def lacks_table(recipe: Recipe, root: Path) -> list[Problem]:
    """First tier of `value_problems`: no table with the recipe's keys exists. Reads the first line of each."""
    if "vstar" not in facts_of(recipe.algorithm.name).needs:
        return []
    named = vstar_of(recipe).table
    paths = sorted(Path(".stretto", "vstar").glob("*.jsonl")) if named == "auto" else [root / named]
    keys, settled = _keys(with_lasting_paths(recipe, root)), recipe.model.model_fields_set
    # A dtype or a storage that the recipe leaves open is chosen with PyTorch.
    chosen = ({"dtype"} - settled) | ({"quantize"} if recipe.model.quantize == "auto" else set())
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                head = file.readline()
            if not head.endswith("\n"):  # empty, or torn in its first line
                continue
            made_from = json.loads(head)["made_from"]
            same = [made_from[key] == keys[key] for key in keys if key != "reference"]
            same += [made_from["reference"][key] == keys["reference"][key] for key in keys["reference"].keys() - chosen]
        except OSError:
            continue
        except (ValueError, KeyError, TypeError):  # `read_table` says what is wrong with a table that a recipe names
            same = [named != "auto"]
        if all(same) or named != "auto":
            return []
    where = "" if named == "auto" else f" ({root / named})"
    return [Problem(field=FIELD, reason=f"there is no table of V* for this recipe{where}", fix=FIRST)]


def table_path(recipe: Recipe, made_from: dict[str, Any], root: Path) -> Path:
    """Where the recipe's table is or should be."""
    named = vstar_of(recipe).table
    return Path(".stretto", "vstar", f"{digest(to_json(made_from))}.jsonl") if named == "auto" else root / named


def read_table(path: Path, made_from: dict[str, Any] | None) -> Table:
    """The table at `path`; empty if there is none. RecipeError if it was made from something else than `made_from`."""
    text = read_small(path).decode("utf-8", "replace") if path.is_file() else ""
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]  # the rest was torn by a kill
    rows: dict[tuple[str, int], Row] = {}
    found = made_from or {}
    for number, line in enumerate(lines):
        try:
            content = json.loads(line)
            if number == 0:
                found = dict(content["made_from"])
            else:
                row = Row(**content)
                rows[row.prompt, row.attempt] = row
        except (ValueError, KeyError, TypeError) as error:
            reason = f"line {number + 1} of {path} is no line of a table of V*"
            raise RecipeError.of(FIELD, reason, "name a file that `stretto value` wrote, or use auto") from error
    if made_from is not None and found != made_from:
        changed = ", ".join(sorted(key for key in made_from if found.get(key) != made_from[key]))
        reason = f"{path} was made from other {changed} than this recipe has"
        raise RecipeError.of(FIELD, reason, "use auto, or another file, and run `stretto value` for this recipe")
    return Table(made_from=found, rows=rows)


def add_rows(path: Path, made_from: dict[str, Any], rows: Sequence[Row]) -> None:
    """Appends answers; the file begins with what it is made from."""
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two commands may fill one table
            whole = _whole(file)
            file.truncate(whole)  # what a kill tore
            head = "" if whole else to_json({"made_from": made_from}) + "\n"
            text = head + "".join(to_json(asdict(row)) + "\n" for row in rows)
            write_all(file.fileno(), text.encode("ascii"))


def _whole(file: BinaryIO) -> int:
    """Bytes up to the end of the last whole line; the file is read only where a kill tore its last one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if size == 0 or file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def value_problems(recipe: Recipe, root: Path) -> list[Problem]:
    """What is wrong with the table that training would read. Loads no model."""
    if "vstar" not in facts_of(recipe.algorithm.name).needs:
        return []
    from stretto.runtime.precision import resolve_precision  # it loads PyTorch

    try:
        _ready(resolve_precision(recipe, root), root)
    except RecipeError as error:
        return list(error.problems)
    return []


def run_values(recipe: Recipe, root: Path, folder: Path) -> dict[str, float] | None:
    """V* for a run, from the copy in its folder, which is made here the first time; none if nothing reads it."""
    facts = facts_of(recipe.algorithm.name)
    if "vstar" not in facts.needs:
        return None
    copy = folder / COPY
    if not copy.exists():
        replace(copy, [_ready(recipe, root).read_text("utf-8", "replace")])
    training, _ = split_task(recipe, load_prompts(recipe.task, root))
    section, table = vstar_of(recipe), read_table(copy, None)
    if untried := table.untried(training, section.samples):
        reason = f"{untried} of {len(training)} prompts have fewer than {section.samples} answers in {copy}"
        fix = "ask for fewer samples and the old prompts; or remove that file and run `stretto value` for this recipe"
        raise RecipeError.of(FIELD, reason, fix)
    return table.values(training, section, largest=not facts.regresses)


def _ready(recipe: Recipe, root: Path) -> Path:
    """The path of a table in which every training prompt was tried; a RecipeError with what to do if there is none."""
    training, _ = split_task(recipe, load_prompts(recipe.task, root))
    made_from = ingredients(recipe, training, root)
    path = table_path(recipe, made_from, root)
    samples = vstar_of(recipe).samples
    table = read_table(path, made_from)
    if not path.exists():
        reason = f"there is no table of V* for this recipe, computed in {recipe.model.dtype} ({path})"
        raise RecipeError.of(FIELD, reason, FIRST)
    if untried := table.untried(training, samples):
        reason = f"{untried} of {len(training)} prompts have fewer than {samples} answers in {path}"
        raise RecipeError.of(FIELD, reason, FIRST)
    if not table.rewards(training, samples):
        raise RecipeError.of(FIELD, f"no answer in {path} has a verdict", "mend the reward, then run `stretto value`")
    return path
