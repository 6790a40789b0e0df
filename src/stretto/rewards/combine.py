"""The parts of a reward, judged and weighed: what becomes a `Reward`, or the reason why there is none.

`value` is the weighted sum that the algorithm learns from. `outcome` is what accuracy and `drop` read: the mean of the
parts with a positive weight, weighted by it. So full marks are exactly 1 whatever the weights, and penalties (negative
weights) do not turn a right answer into a wrong one. If no weight is positive, it is the mean of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stretto.errors import (
    DeadlineError,
    RecipeError,
    SandboxDeadlineError,
    SandboxDiedError,
    SandboxStartError,
    StrettoError,
    VerdictError,
)
from stretto.recipe.schema import ModelReward, RewardPart
from stretto.rewards.base import Costly, Verdict
from stretto.rewards.parts import build, observed, problems
from stretto.sandbox.pool import Pool
from stretto.types import Reward, Trajectory


class Rewards:
    """The parts of a recipe's `rewards`."""

    def __init__(self, parts: Sequence[RewardPart], pool: Pool) -> None:
        """RecipeError if a part makes no sense. The pool stays the caller's to close."""
        wrong = tuple(problems(parts, pool.paths, pool.functions))
        if wrong:
            raise RecipeError(*wrong)
        self._parts = tuple(parts)
        self._pool = pool
        self._verdicts = {part.name: build(part, pool) for part in parts if not isinstance(part, ModelReward)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in the recipe's order."""
        return tuple(part.name for part in self._parts)

    @property
    def modelled(self) -> str | None:
        """The name of the part that is a reward model's score, if there is one."""
        return next((part.name for part in self._parts if isinstance(part, ModelReward)), None)

    @property
    def moved(self) -> float:
        """When (`time.monotonic`) the processes that judge last got on with any answer of anybody's."""
        return self._pool.moved

    async def judge(self, trajectory: Trajectory) -> dict[str, float]:
        """Every part's verdict but a model's. VerdictError naming the part where one could not be had, DeadlineError
        where what it needs cannot be loaded in time, because that is the same for every answer."""
        observed(trajectory)
        return {name: await _verdict(verdict, trajectory, name) for name, verdict in self._verdicts.items()}

    def weigh(self, verdicts: Mapping[str, float]) -> Reward:
        """The reward of every part's verdict. VerdictError where they come to no finite number."""
        scores = {name: _finite(verdicts[name], name) for name in self.names}
        costly = tuple(name for name in self.names if isinstance(verdicts[name], Costly))
        weights = {part.name: part.weight for part in self._parts}
        value = sum(weights[name] * score for name, score in scores.items())
        judging = {part.name: scores[part.name] for part in self._parts if part.judges}
        outcome = full_marks(judging or scores, weights)
        if not math.isfinite(value) or not math.isfinite(outcome):
            raise VerdictError(f"the weighted sum of the parts {scores} is not a finite number")
        return Reward(value=value, outcome=outcome, parts=scores, costly=costly)


def full_marks(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The share of the full marks: 1.0 exactly where every part with a positive weight gave 1."""
    counted = {name: weights[name] for name in scores if weights[name] > 0} or dict.fromkeys(scores, 1.0)
    return sum(weight * scores[name] for name, weight in counted.items()) / sum(counted.values())


async def _verdict(verdict: Verdict, trajectory: Trajectory, name: str) -> float:
    """One part's number. A worker that died or was too slow gets a second chance, an exception does not."""
    try:
        try:
            return await verdict(trajectory)
        except SandboxStartError:
            raise
        except (SandboxDeadlineError, SandboxDiedError):
            return await verdict(trajectory)
    except SandboxStartError as error:
        fix = "raise deadlines.start, or make it load less; the deadlines of rewards begin after that"
        raise DeadlineError(f"reward {name}: {error}\n    fix: {fix}") from error
    except (StrettoError, ValueError) as error:
        raise VerdictError(f"reward {name}: {error}") from error


def _finite(score: float, name: str) -> float:
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise VerdictError(f"reward {name}: the verdict is {number}, which is not a finite number")
    return number
