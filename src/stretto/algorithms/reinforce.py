"""REINFORCE: the reward is the advantage; sum over tokens, mean over trajectories. Williams 1992."""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import reward_itself
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import PolicyGradient


def build(section: PolicyGradient) -> Algorithm:
    """REINFORCE with the recipe's numbers."""
    return Algorithm(
        name="reinforce",
        scope="sample",
        needs=needed_streams(section),
        min_samples=1,
        terms=policy_terms(section, denominator="trajectories", scale="token"),
        advantage=partial(credit_by_group, advantages=reward_itself, kl=section.kl, credit=section.credit),
        drop=keep,
    )
