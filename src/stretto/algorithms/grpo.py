"""GRPO: rewards normalized within the group; mean over an answer's tokens, then over answers. Shao et al. 2024."""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import group_normalized
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import PolicyGradient


def build(section: PolicyGradient) -> Algorithm:
    """GRPO with the recipe's numbers."""
    return Algorithm(
        name="grpo",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(section, denominator="conversations", scale="answer"),
        advantage=partial(credit_by_group, advantages=group_normalized, kl=section.kl, credit=section.credit),
        drop=keep,
    )
