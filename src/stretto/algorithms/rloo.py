"""RLOO: each sample against the mean of the others; sum over tokens, mean over trajectories. Ahmadian et al. 2024."""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import leave_one_out
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import PolicyGradient


def build(section: PolicyGradient) -> Algorithm:
    """RLOO with the recipe's numbers."""
    return Algorithm(
        name="rloo",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(section, denominator="trajectories", scale="token"),
        advantage=partial(credit_by_group, advantages=leave_one_out, kl=section.kl, credit=section.credit),
        drop=keep,
    )
