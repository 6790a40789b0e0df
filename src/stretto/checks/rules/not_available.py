"""What the recipe format has a name for, and this version does not do. It is refused, never accepted in silence.

Most rules are rows of a table: a key and the values that work. A row goes when the part that it waits for arrives. Some
of it can be planned with before: where things would lie and how long they would take follows from numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stretto import environments
from stretto.algorithms.catalog import CATALOG
from stretto.checks.rules.base import CheckContext, value_of
from stretto.errors import Problem, RecipeError
from stretto.placement.strategies import find_strategy
from stretto.plugins import is_plugin
from stretto.recipe.schema import Recipe, RoleModel
from stretto.recipe.validation_errors import nearest


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
    plugins: bool = False
    """True if module:name works too; another rule looks for it."""


NOT_YET = "{value} is not available yet"
ABSENT = "what this key asks for is not available yet"

ONLY = (
    OnlyValues(field="model.quantize", values=("none",), reason=NOT_YET, fix="use none", planned=True),
    OnlyValues(
        field="model.dtype",
        values=("bfloat16", "float32", "float64"),
        reason="float16 needs loss scaling, which is not available yet",
        fix="use bfloat16, which has the range of float32",
        planned=True,
    ),
    OnlyValues(
        field="model.shape",
        values=(None,),
        reason="stands for a model that is only planned with; one that runs says its own shape",
        fix="leave it out",
        planned=True,
    ),
    OnlyValues(field="roles.critic.shape", values=(None,), reason=ABSENT, fix="leave it out", planned=True),
    OnlyValues(field="roles.reward_model.shape", values=(None,), reason=ABSENT, fix="leave it out", planned=True),
    OnlyValues(field="engine.kind", values=("native",), reason=NOT_YET, fix="use native", planned=True, plugins=True),
    OnlyValues(
        field="engine.top_p",
        values=(1.0,),
        reason="nucleus sampling ({value}) would train another distribution than the one that is sampled",
        fix="use 1.0; engine.temperature is accounted for on both sides",
    ),
    OnlyValues(field="engine.python", values=(None,), reason=ABSENT, fix="leave it out"),
    OnlyValues(field="engine.url", values=(None,), reason=ABSENT, fix="leave it out"),
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
        own = row.plugins and is_plugin(str(value))
        if value not in row.values and not own and not (scene.planning and row.planned):
            yield Problem(field=row.field, reason=row.reason.format(value=value), fix=row.fix)


def algorithm_exists(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Names of the catalog, or module:name, which another rule looks for."""
    name = recipe.algorithm.name
    if name in CATALOG or is_plugin(name):
        return
    close = nearest(name, CATALOG)
    fix = f"did you mean {close}?" if close else f"use one of {', '.join(CATALOG)}, or module:name"
    yield Problem(field="algorithm.name", reason=f"there is no algorithm {name!r}", fix=fix)


def strategy_exists(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Names of the table of strategies; where a run is meant, making its plan says so."""
    if scene.planning:
        try:
            find_strategy(recipe.placement.strategy)
        except RecipeError as error:
            yield from error.problems


def environment_exists(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """One environment so far, and those of one's own."""
    kind = recipe.environment.kind
    if not is_plugin(kind) and kind not in scene.probes.functions:
        yield from environments.problems(kind)


def reference_is_the_base(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Another model as reference has to be loaded beside the policy."""
    if isinstance(recipe.roles.reference, RoleModel) and not scene.planning:
        yield Problem(
            field="roles.reference",
            reason="a reference other than the model as it was before training is not available yet",
            fix="use adapter-off",
        )


def logs_exist(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Where metrics can go besides the run folder."""
    if "wandb" in recipe.log:
        yield Problem(field="log", reason="wandb is not available yet", fix="use [tensorboard], or [] for none")
