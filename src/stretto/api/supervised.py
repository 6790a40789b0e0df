"""`stretto.sft` and `stretto.reward_model`: a recipe that learns from the rows of its task, in a run of its own.

Each is `train` with the algorithm filled in that a recipe may leave out: the run, its folder, `resume` and `evaluate`
are those of any other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.calls import Note, train
from stretto.api.functions import RewardLike
from stretto.api.run import Run
from stretto.errors import RecipeError
from stretto.recipe.load import Changes, RecipeSource, listed, read_recipe
from stretto.runtime.user_functions import Callback

if TYPE_CHECKING:
    from stretto.report.console import Progress


def sft(
    recipe: RecipeSource,
    *,
    rewards: Sequence[RewardLike] | None = None,
    callbacks: Sequence[Callback] = (),
    callbacks_strict: bool | None = None,
    changes: Changes = (),
    folder: str | os.PathLike[str] | None = None,
    name: str | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Run:
    """Imitates the answers in the data, in a new run folder: supervised fine-tuning.

    With `rewards`, or with those of the recipe, the held-out prompts are answered and judged, too; without, the loss on
    held-out rows is all that is measured. The other arguments are those of `stretto.train`.
    """
    given: dict[str, Any] = {"callbacks": callbacks, "callbacks_strict": callbacks_strict, "folder": folder}
    changed = _with_algorithm(recipe, changes, "sft", command="sft")
    return train(
        recipe, rewards=rewards, changes=changed, name=name, quiet=quiet, progress=progress, note=note, **given
    )


def reward_model(
    recipe: RecipeSource,
    *,
    callbacks: Sequence[Callback] = (),
    callbacks_strict: bool | None = None,
    changes: Changes = (),
    folder: str | os.PathLike[str] | None = None,
    name: str | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Run:
    """Trains a reward model on pairs of a better and a worse answer, in a new run folder.

    Its checkpoints are sequence classifiers of one label, for `roles.reward_model`. The arguments are those of
    `stretto.train`.
    """
    given: dict[str, Any] = {"callbacks": callbacks, "callbacks_strict": callbacks_strict, "folder": folder}
    changed = _with_algorithm(recipe, changes, "reward_model", command="reward-model")
    return train(recipe, changes=changed, name=name, quiet=quiet, progress=progress, note=note, **given)


def _with_algorithm(source: RecipeSource, changes: Changes, name: str, *, command: str) -> Changes:
    """The changes, with the algorithm where nobody names one. RecipeError where another one is named."""
    opened = read_recipe(source, changes).recipe
    if opened is not None and "algorithm" in opened.model_fields_set and opened.algorithm.name != name:
        reason = f"is {opened.algorithm.name}, and stretto {command} is for {name}"
        shown = Path(source).name if isinstance(source, str | os.PathLike) else "RECIPE"
        raise RecipeError.of("algorithm.name", reason, f"leave it out, or use stretto train {shown}")
    return [{"algorithm.name": name}, *listed(changes)]
