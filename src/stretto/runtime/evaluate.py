"""Held-out accuracy: greedy, one answer per prompt, with a Wilson interval; pass@k at the training temperature.

An attempt that failed for a reason of ours has no verdict: it never counts as a wrong answer. But what is left is
another set of prompts, seldom the same in difficulty, so that is said (`n` of `asked`), the interval holds whatever the
missing verdicts would have been, and more of them than `guards.reward_error_share` allows are no evaluation at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from stretto.environments.trajectory import RolloutStart
from stretto.rewards.base import FULL_MARKS, sampled_tokens
from stretto.rewards.score import Scored
from stretto.runtime import guards
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import sample
from stretto.storage.pass_rates import interval, pass_at_k, wilson
from stretto.types import Group, Prompt

__all__ = ["Evaluation", "evaluate", "pass_at_k", "wilson"]

VISIT = -1
"""Evaluation's own visit number, so that its noise is never that of a training sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How good the model is on prompts it was not trained on."""

    accuracy: float
    """Share of the prompts with a verdict that were answered right, greedily."""
    interval: tuple[float, float]
    """95 % Wilson interval of it, wide enough for either verdict on the prompts that have none."""
    pass_at_k: Mapping[int, float]
    """k -> chance that one of k sampled answers is right."""
    length_mean: float
    """Mean tokens per greedy answer."""
    n: int
    """Prompts with a verdict."""
    asked: int
    """Prompts that were asked."""
    pass_n: Mapping[int, int]
    """k -> prompts that pass@k is the mean of: those with k verdicts."""
    failure: str | None = None
    """Why the first answer without a verdict has none, if one has none."""
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    """Id of each prompt with a verdict -> whether it was answered right."""

    def document(self) -> dict[str, object]:
        """As `--json` prints it: what is missing is told where something is."""
        whole = asdict(self)
        beside = ("verdicts", *(("asked", "pass_n", "failure") if self.failure is None else ()))
        return {key: value for key, value in whole.items() if key not in beside}

    @property
    def prompts(self) -> str:
        """How many prompts it is over, in words."""
        return of_asked(self.n, self.asked)


def of_asked(n: int, asked: int) -> str:
    """`100 prompts`, or `91 of 100 prompts` where some have no verdict."""
    return f"{asked} prompts" if n == asked else f"{n} of {asked} prompts"


async def evaluate(parts: Runtime, prompts: Sequence[Prompt], *, pass_k: int) -> Evaluation:
    """Asks every prompt. RewardError if too many answers have no verdict."""
    greedy = await _answers(parts, prompts, attempts=1, temperature=0.0)
    groups, failed = greedy.groups, greedy.failed
    right = sum(_right(group) for group in groups)
    lengths = [sampled_tokens(trajectory) for group in groups for trajectory in group.trajectories]
    passes: dict[int, float] = {}
    counts: dict[int, int] = {}
    if pass_k > 1:
        sampled = await _answers(parts, prompts, attempts=pass_k, temperature=parts.recipe.engine.temperature)
        failed += sampled.failed
        powers = [2**e for e in range(pass_k.bit_length()) if 2**e < pass_k]
        for k in [*powers, pass_k]:
            chances = [pass_at_k(_right(g), len(g.rewards), k) for g in sampled.groups if len(g.rewards) >= k]
            counts[k] = len(chances)
            if chances:
                passes[k] = sum(chances) / len(chances)
    return Evaluation(
        accuracy=right / max(1, len(groups)),
        interval=interval(right, len(groups), len(prompts)),
        pass_at_k=passes,
        length_mean=sum(lengths) / max(1, len(lengths)),
        n=len(groups),
        asked=len(prompts),
        pass_n=counts,
        failure=f"prompt {failed[0].prompt.id}: {failed[0].failure}" if failed else None,
        verdicts={group.prompt.id: _right(group) > 0 for group in groups},
    )


async def _answers(parts: Runtime, prompts: Sequence[Prompt], *, attempts: int, temperature: float) -> Scored:
    """Scored attempts at each prompt."""
    launches = [
        RolloutStart(prompt=prompt, visit=VISIT, attempt=attempt) for prompt in prompts for attempt in range(attempts)
    ]
    scored = await sample(parts, launches, temperature=temperature)
    guards.evaluation_errors(parts.recipe.guards, scored, launched=len(launches))
    return scored


def _right(group: Group) -> int:
    return sum(reward.outcome >= FULL_MARKS for reward in group.rewards)
