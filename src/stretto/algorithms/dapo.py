"""DAPO: a wider clip range upwards, the mean over all tokens, and groups without a contrast drawn again. Yu et al.
2025.

A group whose outcomes are all equal has no gradient. DAPO drops it and asks other prompts instead, so that every step
trains on full groups; groups count in the order in which they were launched, because the first to finish are the
short ones. Its penalty for overlong answers is a reward part of its own.
"""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import group_normalized
from stretto.algorithms.base import Algorithm
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import PolicyGradient
from stretto.types import Group


def without_contrast(group: Group) -> bool:
    """True if every attempt had the same outcome, shaping left aside."""
    return len({reward.outcome for reward in group.rewards}) < 2


def build(section: PolicyGradient) -> Algorithm:
    """DAPO with the recipe's numbers."""
    return Algorithm(
        name="dapo",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(section, denominator="tokens", scale="token"),
        advantage=partial(credit_by_group, advantages=group_normalized, kl=section.kl, credit=section.credit),
        drop=without_contrast,
    )
