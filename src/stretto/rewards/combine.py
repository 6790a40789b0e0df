"""The parts of a reward, judged and weighed: what becomes a `Reward`, or the reason why there is none.

`value` is the weighted sum that the algorithm learns from. `outcome` is what accuracy and `drop` read: the mean of the
parts with a positive weight, weighted by it. So full marks are exactly 1 whatever the weights, and penalties (negative
weights) do not turn a right answer into a wrong one. If no weight is positive, it is the mean of all parts. A part that
does not apply to an answer is in neither. Parts that see a whole group are judged last, and shape what the others gave.
A recipe that learns from a teacher alone may have no parts: then nobody judges, and a reward says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from stretto.errors import (
    DeadlineError,
    RecipeError,
    SandboxDeadlineError,
    SandboxDiedError,
    SandboxError,
    SandboxStartError,
    StrettoError,
    VerdictError,
)
from stretto.recipe.schema import FunctionReward, LengthReward, ModelReward, RewardPart
from stretto.rewards.base import Costly, JudgedAnswer
from stretto.rewards.group_parts import build_group, sees_groups
from stretto.rewards.parts import ADD_A_VERDICT, LACKS_A_VERDICT, build, observed, problems
from stretto.sandbox.pool import Pool
from stretto.types import Reward, Trajectory

T = TypeVar("T")


class Rewards:
    """The parts of a recipe's `rewards`."""

    def __init__(self, parts: Sequence[RewardPart], pool: Pool) -> None:
        """RecipeError if a part makes no sense. The pool stays the caller's to close."""
        wrong = tuple(problems(parts, pool.paths, pool.functions))
        if wrong:
            raise RecipeError(*wrong)
        self._parts = tuple(parts)
        self.names = tuple(part.name for part in parts)
        """Names of the parts, in the recipe's order."""
        self.modeled = next((part.name for part in parts if isinstance(part, ModelReward)), None)
        """The name of the part that is a reward model's score, if there is one."""
        self._pool = pool
        self._weights = {part.name: part.weight for part in parts}
        self._together = {part.name: build_group(part, pool) for part in parts if sees_groups(part, pool)}
        alone = [part for part in parts if part.name not in self._together and not isinstance(part, ModelReward)]
        self._verdicts = {part.name: build(part, pool) for part in alone}
        judging = [part for part in parts if part.judges]
        judge_alone = [part.name for part in judging if part.name not in self._together]
        self._judging = frozenset(judge_alone or [part.name for part in judging] or self.names)
        self._judged_alone = bool(judge_alone)
        if not judge_alone and (lengths := [part for part in parts if isinstance(part, LengthReward)]):
            raise RecipeError.of("rewards", f"{lengths[0].kind} {LACKS_A_VERDICT}", ADD_A_VERDICT)

    @property
    def functions(self) -> dict[int, str]:
        """Place in the recipe -> name, of the parts that are functions of the user's."""
        return {n: part.name for n, part in enumerate(self._parts) if isinstance(part, FunctionReward)}

    def is_together(self, name: str) -> bool:
        """True for a part that sees the whole group."""
        return name in self._together

    async def load(self, name: str) -> None:
        """Imports a function of the user's in every worker. DeadlineError where that takes too long."""
        try:
            await self._pool.load(next(part.kind for part in self._parts if part.name == name))
        except SandboxStartError as error:
            raise _never_ready(name, error) from error
        except SandboxError as error:
            raise VerdictError(f"reward {name}: {error}") from error

    async def judge_part(self, name: str, trajectories: Sequence[Trajectory]) -> list[float | None]:
        """What one part alone says of answers of a group; to a part that sees the whole of it, all are right."""
        if name in self._together:
            answers = [JudgedAnswer(trajectory=each, outcome=1.0) for each in trajectories]
            return list(await _tried(partial(self._together[name], answers), name))
        return [await _tried(partial(self._verdicts[name], each), name) for each in trajectories]

    @property
    def moved(self) -> float:
        """When (`time.monotonic`) the processes that judge last got on with any answer of anybody's."""
        return self._pool.moved

    async def judge(self, trajectory: Trajectory) -> dict[str, float | None]:
        """The verdict of every part that sees one trajectory, but a model's. VerdictError naming the part where one
        could not be had, DeadlineError where what it needs cannot be loaded in time, as for every other answer."""
        observed(trajectory)
        return {name: await _tried(partial(verdict, trajectory), name) for name, verdict in self._verdicts.items()}

    @property
    def sees_groups(self) -> bool:
        """True if some part sees the whole group."""
        return bool(self._together)

    def outcome(self, verdicts: Mapping[str, float | None]) -> float:
        """The share of the full marks before a group is judged; 0 where only parts judge that see the whole of it.
        VerdictError where no part that judges applies."""
        return self._outcome(self._scores(verdicts)) if self._judged_alone else 0.0

    async def judge_group(
        self, trajectories: Sequence[Trajectory], verdicts: Sequence[Mapping[str, float | None]]
    ) -> list[dict[str, float | None]]:
        """What the parts that see a whole group say of each, who all have the verdicts of the others. VerdictError as
        in `judge`."""
        answers = [
            JudgedAnswer(trajectory=each, outcome=self.outcome(found))
            for each, found in zip(trajectories, verdicts, strict=True)
        ]
        found = {name: await _tried(partial(verdict, answers), name) for name, verdict in self._together.items()}
        return [{name: values[place] for name, values in found.items()} for place in range(len(answers))]

    def weigh(self, verdicts: Mapping[str, float | None]) -> Reward:
        """The reward of every part's verdict. VerdictError where they come to no finite number."""
        if not self._parts:
            return Reward(value=0.0, outcome=0.0, parts={})
        scores = self._scores(verdicts)
        costly = tuple(name for name in self.names if isinstance(verdicts[name], Costly))
        value, outcome = sum(self._weights[name] * score for name, score in scores.items()), self._outcome(scores)
        if not math.isfinite(value) or not math.isfinite(outcome):
            raise VerdictError(f"the weighted sum of the parts {scores} is not a finite number")
        return Reward(value=value, outcome=outcome, parts=scores, costly=costly)

    def _scores(self, verdicts: Mapping[str, float | None]) -> dict[str, float]:
        """The parts that apply, in the recipe's order."""
        told = {name: verdicts.get(name) for name in self.names}
        return {name: finite(score, name) for name, score in told.items() if score is not None}

    def _outcome(self, scores: Mapping[str, float]) -> float:
        judging = {name: score for name, score in scores.items() if name in self._judging}
        if not judging:
            raise VerdictError(f"reward {', '.join(sorted(self._judging))}: None, so that nothing judges the answer")
        return full_marks(judging, self._weights)


def full_marks(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The share of the full marks: 1.0 exactly where every part with a positive weight that applies gave 1."""
    counted = {name: weights[name] for name in scores if weights[name] > 0} or dict.fromkeys(scores, 1.0)
    return sum(weight * scores[name] for name, weight in counted.items()) / sum(counted.values())


async def _tried(verdict: Callable[[], Awaitable[T]], name: str) -> T:
    """What one part says. A worker that died or was too slow gets a second chance, an exception does not."""
    try:
        try:
            return await verdict()
        except SandboxStartError:
            raise
        except (SandboxDeadlineError, SandboxDiedError):
            return await verdict()
    except SandboxStartError as error:
        raise _never_ready(name, error) from error
    except (StrettoError, ValueError) as error:
        raise VerdictError(f"reward {name}: {error}") from error


def _never_ready(name: str, error: SandboxStartError) -> DeadlineError:
    fix = "raise deadlines.start, or make it load less; the deadlines of rewards begin after that"
    return DeadlineError(f"reward {name}: {error}\n    fix: {fix}")


def finite(score: float, name: str) -> float:
    """Return the score as a float. VerdictError naming the part for NaN, infinity or an integer that is too large."""
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise VerdictError(f"reward {name}: the verdict is {number}, which is not a finite number")
    return number
