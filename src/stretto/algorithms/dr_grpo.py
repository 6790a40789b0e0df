"""Dr. GRPO: GRPO without its two biases. Rewards are centered, not divided by their deviation, and a token counts the
same in
a short and in a long answer: sums over answers are divided by one constant. Liu et al. 2025."""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import group_centred
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import DrGrpo


def build(section: DrGrpo) -> Algorithm:
    """Dr. GRPO with the recipe's numbers."""
    factor = 1 / (section.constant or 1)
    return Algorithm(
        name="dr_grpo",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(section, denominator="trajectories", scale="token", factor=factor),
        advantage=partial(credit_by_group, advantages=group_centred, kl=section.kl, credit=section.credit),
        drop=keep,
    )
