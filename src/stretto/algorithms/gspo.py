"""GSPO: the ratio, and with it the clipping, belongs to the whole answer instead of to each token. Zheng et al.
2025."""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import group_normalized
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import clipped_sequence_share, policy_terms, sequence_surrogate
from stretto.recipe.schema import PolicyGradient


def build(section: PolicyGradient) -> Algorithm:
    """GSPO with the recipe's numbers."""
    return Algorithm(
        name="gspo",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(
            section,
            denominator="conversations",
            scale="answer",
            surrogate=sequence_surrogate,
            clipped=clipped_sequence_share,
        ),
        advantage=partial(credit_by_group, advantages=group_normalized, kl=section.kl, credit=section.credit),
        drop=keep,
    )
