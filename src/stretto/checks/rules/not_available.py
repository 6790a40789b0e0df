"""What the recipe format has a name for, and this version does not do. It is refused, never accepted in silence.

Most rules are rows of a table: a key and the values that work. A row goes when the part that it waits for arrives. Some
of it can be planned with before: where things would lie and how long they would take follows from numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stretto.checks.rules.base import CheckContext, value_of
from stretto.errors import Problem, RecipeError
from stretto.extras import EXTRAS, missing_extra
from stretto.placement.strategies import find_strategy
from stretto.recipe.schema import Recipe, RoleModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyValues:
    """A key of which only some values work."""

    field: str
    """The key's dotted name."""
    values: tuple[Any, ...]
    """The values that work."""
    reason: str
    """Why others do not, with {value} for the one given."""
    fix: str
    """What to do."""
    planned: bool = False
    """True if other values can be planned with, though not run."""


ONLY = (
    OnlyValues(
        field="model.dtype",
        values=("bfloat16", "float32", "float64"),
        reason="float16 needs loss scaling, which is not available yet",
        fix="use bfloat16, which has the range of float32",
        planned=True,
    ),
    *(
        OnlyValues(
            field=f"{section}.shape",
            values=(None,),
            reason="stands for a model that is only planned with; one that runs says its own shape",
            fix=f"leave it out, and name a model in {section}.name",
            planned=True,
        )
        for section in ("roles.critic", "roles.teacher", "roles.reward_model")
    ),
    OnlyValues(
        field="deadlines.environment",
        values=(60.0,),
        reason="single calls of an environment, which this limits, are not available yet",
        fix="leave it out; environment.deadline limits what a trajectory spends outside the engine",
    ),
)


def keys_wait_for_their_part(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Every row of the table."""
    for row in ONLY:
        value = value_of(recipe, row.field)
        if value not in row.values and not (scene.planning and row.planned):
            yield Problem(field=row.field, reason=row.reason.format(value=value), fix=row.fix)


def shape_is_that_of_a_model(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A run reads a model's own files; a shape beside its name is for plans that are made before they are here."""
    model = recipe.model
    if scene.planning or model.shape is None:
        return
    if model.name == "scratch" or "name" not in model.model_fields_set:
        reason = "stands for a model that is only planned with; one that runs says its own shape"
        yield Problem(field="model.shape", reason=reason, fix="leave it out, or name a model in model.name")
    else:
        yield from scene.probes.shape(recipe, scene.root)


def strategy_exists(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Names of the table of strategies; where a run is meant, making its plan says so."""
    if scene.planning:
        try:
            find_strategy(recipe.placement.strategy)
        except RecipeError as error:
            yield from error.problems


def reference_is_the_base(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Another model as reference has to be loaded beside the policy."""
    if isinstance(recipe.roles.reference, RoleModel) and not scene.planning:
        yield Problem(
            field="roles.reference",
            reason="a reference other than the model as it was before training is not available yet",
            fix="use adapter-off",
        )


def logs_exist(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Loggers whose package is not there."""
    if scene.training and not scene.planning:
        named = [name for name in recipe.log if name in EXTRAS]
        yield from (problem for name in named if (problem := missing_extra(name, "log")) is not None)
