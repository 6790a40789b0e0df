"""A run as Python has it: what its folder holds, read when it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import RecipeError
from stretto.recipe.load import Changes
from stretto.recipe.schema import Recipe
from stretto.storage.atomic import read_small
from stretto.types import Message

if TYPE_CHECKING:
    from stretto.api.functions import RewardLike
    from stretto.environments.base import Environment
    from stretto.runtime.answers import Answer
    from stretto.runtime.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Run:
    """A run: `stretto.Run("runs/tiny-001")`, or what `train` and `resume` return."""

    folder: Path
    """The run's folder."""
    rewards: Sequence[RewardLike] | None = field(default=None, repr=False)
    """The rewards that were given for it, for evaluations."""
    environment: Environment | str | None = field(default=None, repr=False)
    """The environment that was given for it."""
    algorithm: Callable[..., Any] | str | None = field(default=None, repr=False)
    """The algorithm that was given for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not (self.folder / "recipe.yaml").is_file():
            raise RecipeError.of(
                str(self.folder), "is not a run: it holds no recipe.yaml", "name a folder that train made"
            )

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step, by the names of metrics.jsonl; the first may be of step 0, before training."""
        return _rows(self.folder / "metrics.jsonl")

    @property
    def steps(self) -> int:
        """The last step that has metrics; 0 before the first."""
        return max((int(row["step"]) for row in self.metrics), default=0)

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Every trajectory of a step, by default of the last, as docs/reference/run-folder.md describes them."""
        return self._answers("step", step)

    def held_out(self, step: int | None = None) -> list[dict[str, Any]]:
        """The held-out answers of the evaluation after a step, by default of the last one, as `samples` has them."""
        return self._answers("eval", step)

    def _answers(self, kind: str, step: int | None) -> list[dict[str, Any]]:
        folder = self.folder / "samples"
        there = sorted(int(each.stem.partition("-")[2]) for each in folder.glob(f"{kind}-*.jsonl"))
        newest = self.steps if kind == "step" or not there else there[-1]
        path = folder / f"{kind}-{newest if step is None else step:06d}.jsonl"
        if not path.is_file():
            fix = f"ask for a step from {there[0]} to {there[-1]}" if there else "train it first"
            what = f"{'held_out' if kind == 'eval' else 'samples'}({newest if step is None else step})"
            raise RecipeError.of(what, f"{self.folder} holds no samples of this step", fix)
        return _rows(path)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe, every key as the run uses it."""
        from stretto.runtime.recipe_file import load_run_recipe

        return load_run_recipe(self.folder)[0]

    @property
    def model(self) -> Path:
        """Its newest sound checkpoint: a model, or an adapter, that transformers and PEFT can read."""
        from stretto.storage.checkpoint import Checkpoints, none_yet

        section = self.recipe.checkpoint
        latest = Checkpoints(self.folder / "checkpoints", keep=section.keep, best=section.best).latest()
        if latest is None:
            raise none_yet(self.folder)
        return latest

    def evaluate(self, changes: Changes = (), *, on: str | os.PathLike[str] | None = None) -> Evaluation:
        """Asks the newest checkpoint the held-out prompts; `changes` and `on` are as in `stretto.evaluate`."""
        from stretto.api.calls import evaluate

        given: dict[str, Any] = {"rewards": self.rewards, "environment": self.environment, "algorithm": self.algorithm}
        return evaluate(self, **given, changes=changes, on=on)

    def sample(self, prompts: str | Sequence[str | Sequence[Message]], *, n: int = 1, **options: Any) -> list[Answer]:
        """What the newest checkpoint answers; `options` are those of `stretto.sample`."""
        from stretto.api.calls import sample

        return sample(self, prompts, n=n, **options)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; a last one that is being written is left out."""
    if not path.is_file():
        return []
    text = read_small(path).decode("utf-8")
    rows: list[Mapping[str, Any]] = [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]
    return [dict(row) for row in rows]
