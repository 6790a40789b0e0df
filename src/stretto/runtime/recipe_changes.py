"""The recipe as a part of a checkpoint: what a resume may change of it, and what it cannot change.

A key that differs is refused unless it was allowed. Some keys are refused even then, because what they describe was
made when the run began and is read from the run's folder since: the new value would be written down and do nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stretto.algorithms.catalog import learns_from_rows
from stretto.errors import CheckpointError, Problem, RecipeError
from stretto.models.source import locate
from stretto.recipe.load import parse_recipe
from stretto.recipe.resolve import resolve
from stretto.recipe.schema import Recipe
from stretto.recipe.validation_errors import nearest
from stretto.storage.manifest import verify

EVALUATION_KEYS = (
    "evaluate", "engine", "rewards", "roles.reward_model", "environment", "placement", "deadlines", "guards", "log",
    "run", "checkpoint",
)  # fmt: skip
"""What may differ from training when a checkpoint is only asked questions."""

LONGEST = 60
"""Characters that are shown of an old value."""

IN_CHECKPOINT = {
    "seed": "the order of the prompts and the first weights were made with the old one",
    "task.holdout": "prompts that were trained on would count as held out",
    "model.adapter.kind": "the checkpoint holds an adapter of the old kind",
    "model.adapter.rank": "the checkpoint holds an adapter of the old rank",
    "model.adapter.targets": "the checkpoint holds adapters of the old layers",
    "optimizer.name": "the checkpoint holds the moments of the old optimizer",
    "roles.critic.adapter": "the checkpoint holds what was trained of the critic",
    "roles.critic.optimizer.name": "the checkpoint holds the moments of the critic's old optimizer",
}
"""Keys whose work is in the checkpoint, and why another value would not fit."""


FREE = ("run.callbacks_strict", "run.report", "run.reward_workers", "run.until")
"""Keys that may differ without being allowed to, because nothing that is trained depends on them."""


def allowed(key: str, allow: Sequence[str]) -> bool:
    """True if the key, or a section that it is in, is among those that may differ."""
    return any(key == given or key.startswith(f"{given}.") for given in allow)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRecord:
    """What a run's folder holds of its beginning."""

    folder: Path
    """The run's."""
    root: Path
    """What relative paths of its recipe count from."""

    def why(self, key: str, old: Mapping[str, Any], new: Recipe) -> str | None:
        """Why a resume cannot change the key of a recipe, or none if it can; `old` is the recipe as it was."""
        if key == "run.folder" and Path(new.run.folder).resolve() != self.folder.resolve():
            return "a resume goes on in the folder that it is given; to have it elsewhere, move it"
        scratch = key == "seed" and self._has_base and old["model"]["name"] == "scratch"
        if scratch or (allowed(key, ("model.scratch",)) and (self._has_base or self._has_checkpoint)):
            return "base/ in the run's folder is the model that was made with the old value"
        if key == "model.name" and (self._has_base or self._has_checkpoint) and self._finds(str(old["model"]["name"])):
            return "what was trained so far was trained from the old model, which is still there"
        if key == "algorithm.vstar.table" and (self.folder / "vstar.jsonl").exists():
            return "vstar.jsonl in the run's folder is the table that is read; without that file, it is copied again"
        if not self._has_checkpoint:
            return None
        if key == "model.adapter":
            return "the checkpoint holds what was trained: an adapter, or all weights"
        return next((reason for name, reason in IN_CHECKPOINT.items() if allowed(key, (name,))), None)

    def _finds(self, name: str) -> bool:
        """False for a model that was moved away, so that its new name has to be given."""
        try:
            return bool(locate(name, self.root))
        except RecipeError:
            return False

    @property
    def _has_base(self) -> bool:
        return (self.folder / "base").exists()

    @property
    def _has_checkpoint(self) -> bool:
        return any((self.folder / "checkpoints").glob("step-*"))


class RecipeRecord:
    """The recipe as a part of a checkpoint, so that a resume knows what it goes on with."""

    name = "recipe"

    def __init__(
        self,
        recipe: Recipe,
        *,
        allow: Sequence[str] = (),
        remedy: str = "put the old value back, or pass --allow {key}",
        held: FixedRecord | None = None,
    ) -> None:
        """`held` says what is refused although it is allowed; without it, nothing is."""
        self.recipe, self.values = recipe, recipe.model_dump(mode="json")
        self.allow, self.remedy, self.held = tuple(allow), remedy, held

    def state(self) -> dict[str, Any]:
        """The resolved recipe."""
        return self.values

    def restore(self, state: Mapping[str, Any]) -> None:
        """Refuses a recipe that differs in keys that were not allowed to, or that cannot."""
        state = completed(state)
        changed = [key for key in differences(state, self.values) if key not in FREE]
        problems = [problem for key in sorted(changed) for problem in self._refusal(key, state)]
        if problems:
            raise RecipeError(*problems)

    def _refusal(self, key: str, state: Mapping[str, Any]) -> Iterator[Problem]:
        was = f"differs from what this run was trained with ({_shown(state, key)})"
        if why := self.held and self.held.why(key, state, self.recipe):
            fix = "put the old value back (--allow does not help here), or start a new run"
            yield Problem(field=key, reason=f"{was}, and a resume cannot change it: {why}", fix=fix)
        elif not allowed(key, self.allow):
            yield Problem(field=key, reason=was, fix=self.remedy.format(key=key))


def completed(old: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recipe of an older version of stretto with the keys that it did not have yet, at their defaults; and with what
    follows from its algorithm's facts, as these are now."""
    try:
        return resolve(parse_recipe(old)).model_dump(mode="json")
    except RecipeError:  # of another time altogether; what differs is said key by key
        return old


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted names of the keys in which two recipes differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted({*old, *new})
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))]
    return [] if old == new else [prefix]


def as_arguments(old: Recipe, new: Recipe, allow: Sequence[str] = ()) -> list[str]:
    """What `stretto resume` is told, so that a run whose recipe is the old one goes on with the new one."""
    before, after = (recipe.model_dump(mode="json") for recipe in (old, new))
    keys = dict.fromkeys(_told(new, key) for key in differences(before, after))
    changes = [f"{key}={json.dumps(_value(after, key), ensure_ascii=False)}" for key in keys]
    return [*changes, *(["--allow", ",".join(allow)] if allow else [])]


def _told(recipe: Recipe, key: str) -> str:
    """The key by which a value is changed: of a mapping whose keys are free, such as template, that of all of it."""
    section, parts = cast(Any, recipe), key.split(".")
    for place, part in enumerate(parts):
        if isinstance(section, Mapping):
            return ".".join(parts[:place])
        section = getattr(section, part, None)
    return key


def refuse_unknown(allow: Sequence[str], *recipes: Recipe) -> None:
    """Refuses an `--allow` that is no key of any of these recipes, because it would allow nothing."""
    known = {key for recipe in recipes for key in _keys(recipe.model_dump(mode="json"))}
    problems = [
        Problem(field="--allow", reason=f"there is no key {given!r}", fix=_instead(given, known))
        for given in allow
        if given not in known
    ]
    if problems:
        raise RecipeError(*problems)


def refuse_resume(
    folder: Path, before: Recipe, recipe: Recipe, root: Path, *, allow: Sequence[str], restart: bool = False
) -> None:
    """Refuses to resume a run of the recipe `before` with another one, as far as that is known without PyTorch."""
    refuse_unknown(allow, before, recipe)
    held = FixedRecord(folder=folder, root=root)
    RecipeRecord(recipe, allow=allow, held=held).restore(before.model_dump(mode="json"))
    for path in [] if restart else sorted((folder / "checkpoints").glob("step-*"), reverse=True):
        if recipe.run.steps >= (step := int(path.name[5:]) if path.name[5:].isdigit() else 0):
            return
        with suppress(CheckpointError):  # a damaged one is skipped, later and with its reason
            verify(path)
            refuse_fewer_steps(recipe, step)


def refuse_asking(before: Recipe, recipe: Recipe) -> None:
    """Refuses to ask a run of the recipe `before` with another one than in keys of `EVALUATION_KEYS`."""
    asking_record(recipe).restore(before.model_dump(mode="json"))


def refuse_nothing_asked(recipe: Recipe, on: Path | None) -> None:
    """Refuses to evaluate without rewards, and without held-out prompts or a file of rows `on`."""
    if not recipe.rewards and not learns_from_rows(recipe.algorithm.name):
        reason = "there are none, so nobody says of an answer that it is right"
        raise RecipeError.of("rewards", reason, "give some, such as 'rewards=[{kind: exact}]'")
    if on is None and recipe.task.holdout.prompts == 0:
        fix = "hold some prompts out, or name a file of rows with --on"
        raise RecipeError.of("task.holdout.prompts", "is 0, so there is nothing to ask", fix)
    if on is not None and not on.is_file():
        raise RecipeError.of("--on", f"there is no file {on}", "name a file with one JSON object per line")


def asking_record(recipe: Recipe) -> RecipeRecord:
    """The part of a checkpoint that refuses to be asked with another recipe."""
    remedy = f"leave it; an evaluation may change keys of {', '.join(EVALUATION_KEYS)}"
    return RecipeRecord(recipe, allow=EVALUATION_KEYS, remedy=remedy)


def refuse_fewer_steps(recipe: Recipe, done: int) -> None:
    """Refuses a run that would end before where it stands."""
    if recipe.run.steps < done:
        reason = f"is {recipe.run.steps}, and the newest checkpoint is of step {done} already"
        fix = f"use {done} or more; to go on from an earlier checkpoint, move the later ones out of checkpoints/"
        raise RecipeError.of("run.steps", reason, fix)


def _instead(given: str, known: set[str]) -> str:
    above = next((given[:end] for end in range(len(given), 0, -1) if given[:end] in known), None)
    near = above or nearest(given, sorted(known))
    return f"did you mean {near}?" if near else "name a key of the recipe, such as optimizer.lr, or a section"


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key and section, dotted. A list is one key."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def _shown(values: Any, key: str) -> str:
    """What a recipe says at a key, in short."""
    text = json.dumps(_value(values, key), ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _value(values: Any, key: str) -> Any:
    """What a recipe says at a dotted key."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
