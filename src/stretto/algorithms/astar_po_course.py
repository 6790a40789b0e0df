"""The A*PO of a course report that many have met: log-likelihood weighted by R - V*, with V* the best reward seen.

It is not the regression of the paper (`astar_po`), and it is here to be compared with it. With rewards of 0 and 1 and a
prompt that the reference solved even once, V* is 1 and no answer ever has a positive weight: right answers are left
alone, wrong ones are pushed away, and nothing says where to. Only prompts that the reference never solved reinforce, so
more samples for V* make it worse. docs/concepts/astar-po.md shows the curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from stretto.algorithms.astar_po import goal
from stretto.algorithms.base import Algorithm, LoggedTerm, Streams, TokenStreams, keep
from stretto.algorithms.correction import correction_weight
from stretto.algorithms.credit import conversation_samples, needed_streams, shaped_rewards
from stretto.algorithms.losses import policy_terms
from stretto.algorithms.optimal import value_of
from stretto.recipe.schema import AstarPo, Correction, Kl
from stretto.types import Group, Sample


def credit(groups: Sequence[Group], streams: Streams, *, kl: Kl) -> tuple[Sample, ...]:
    """Every token with its answer's R - V*."""
    return tuple(
        sample
        for group in groups
        for trajectory, value in zip(group.trajectories, shaped_rewards(group, streams, kl), strict=True)
        for sample in conversation_samples(trajectory, float(value) - value_of(trajectory, streams), streams)
    )


def weighted_likelihood(
    logprobs: Tensor, rows: TokenStreams, *, clip: tuple[float, float], correction: Correction
) -> Tensor:
    """-A lp, weighted by the correction; there is no ratio, so there is nothing to clip."""
    return -rows.advantage * logprobs * correction_weight(logprobs, rows, correction=correction)


def build(section: AstarPo) -> Algorithm:
    """The variant with the recipe's numbers."""
    return Algorithm(
        name="astar_po_course",
        scope="sample",
        needs=needed_streams(section) | {"vstar"},
        min_samples=1,
        terms=policy_terms(
            section,
            denominator="conversations",
            scale="answer",
            surrogate=weighted_likelihood,
            clipped=None,
            watched={"astar/gap": LoggedTerm(numbers=goal, per="conversations")},
        ),
        advantage=partial(credit, kl=section.kl),
        drop=keep,
    )
