"""Held-out accuracy: greedy, one answer per prompt, with a Wilson interval; pass@k at the training temperature.

An attempt that failed for a reason of ours has no verdict: it never counts as a wrong answer. But what is left is
another set of prompts, seldom the same in difficulty, so that is said (`n` of `asked`), the interval holds whatever the
missing verdicts would have been, and more of them than `guards.reward_error_share` allows are no evaluation at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean

from stretto.environments.trajectory import RolloutStart
from stretto.rewards.base import sampled_tokens
from stretto.rewards.score import Scored
from stretto.runtime import guards
from stretto.runtime.metrics import part_means
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import sample
from stretto.storage.pass_rates import interval, pass_at_k, wilson
from stretto.types import FULL_MARKS, Group, Prompt

__all__ = ["Evaluation", "evaluate", "pass_at_k", "wilson"]

VISIT = -1
"""Evaluation's own visit number, so that its noise is never that of a training sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How good the model is on prompts, or rows, that it was not trained on."""

    accuracy: float | None = None
    """Share of the prompts with a verdict that were answered right, greedily; of a reward model, of the pairs whose
    better answer has the higher score. None where nobody judges."""
    interval: tuple[float, float] | None = None
    """95 % Wilson interval of it, wide enough for either verdict on the prompts that have none."""
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    """k -> chance that one of k sampled answers is right."""
    reward: float | None = None
    """Mean reward of the greedy answers with a score: the weighted sum that training maximizes. `None` without
    rewards."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Part of the reward -> its mean score, unweighted, over the answers that it applies to."""
    length_mean: float | None = None
    """Mean tokens per greedy answer; none where nothing was asked."""
    n: int
    """Prompts with a verdict."""
    asked: int
    """Prompts that were asked."""
    pass_n: Mapping[int, int] = field(default_factory=dict)
    """k -> prompts that pass@k is the mean of: those with k verdicts."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What else was measured, by the names of metrics.jsonl: loss on held-out rows, a reward model's calibration."""
    unit: str = "prompts"
    """What it is over."""
    failure: str | None = None
    """Why the first answer without a verdict has none, if one has none."""
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    """Id of each prompt with a verdict -> whether it was answered right."""
    greedy: Scored | None = field(default=None, repr=False, compare=False)
    """The greedy answers, scored or failed. `None` where rows are learned from."""

    def document(self) -> dict[str, object]:
        """As `--json` prints it: what is missing is told where something is."""
        beside = (
            "verdicts",
            "greedy",
            "measures",
            "unit",
            *(("asked", "pass_n", "failure") if self.failure is None else ()),
        )
        measures = {name.removeprefix("eval/"): number for name, number in self.measures.items()}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in beside} | measures

    @property
    def prompts(self) -> str:
        """How many prompts it is over, in words."""
        return of_asked(self.n, self.asked, self.unit)


def of_asked(n: int, asked: int, unit: str = "prompts") -> str:
    """`100 prompts`, or `91 of 100 prompts` where some have no verdict."""
    return f"{asked} {unit}" if n == asked else f"{n} of {asked} {unit}"


WORDS = {"eval/loss": "loss", "eval/brier": "Brier score", "eval/ece": "calibration error"}
"""What is told of the measures."""


def measured_words(measures: Mapping[str, float]) -> list[str]:
    """What else was measured, by the names of metrics: `held-out loss 0.512 [0.498, 0.526]`."""
    words = []
    for name, word in WORDS.items():
        if name in measures:
            ends = [each for end in ("low", "high") if (each := measures.get(f"{name}_{end}")) is not None]
            within = " [{:.3f}, {:.3f}]".format(*ends) if ends else ""
            words.append(f"held-out {word} {measures[name]:.3f}{within}")
    return words


async def evaluate(parts: Runtime, prompts: Sequence[Prompt], *, pass_k: int) -> Evaluation:
    """Asks every prompt, or has the model say what it makes of every row."""
    if parts.data is not None:
        return await parts.data.evaluate(parts, prompts)
    return await evaluate_answers(parts, prompts, pass_k=pass_k)


async def evaluate_answers(parts: Runtime, prompts: Sequence[Prompt], *, pass_k: int) -> Evaluation:
    """Asks every prompt. RewardError if too many answers have no verdict."""
    greedy = await _answers(parts, prompts, attempts=1, temperature=0.0)
    groups, failed = greedy.groups, greedy.failed
    right = sum(_right(group) for group in groups)
    rewards = [reward for group in groups for reward in group.rewards if reward.judged]
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
        reward=fmean(reward.value for reward in rewards) if rewards else None,
        parts=part_means(rewards),
        length_mean=sum(lengths) / max(1, len(lengths)),
        n=len(groups),
        asked=len(prompts),
        pass_n=counts,
        failure=f"prompt {failed[0].prompt.id}: {failed[0].failure}" if failed else None,
        verdicts={group.prompt.id: _right(group) > 0 for group in groups},
        greedy=greedy,
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
