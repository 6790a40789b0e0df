"""CISPO: clips the importance weight instead of the gradient, so that rare but decisive tokens keep theirs. MiniMax
2025.

The cap has two conventions in the field. Here `clip: [low, high]` clamps the weight to [1 - low, 1 + high], as
everywhere in this project; a cap said to be "5" directly is a high of 4, and "no lower bound" is a low of 1, which
are the defaults.
"""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import group_normalized
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import clipped_weight, policy_terms
from stretto.recipe.schema import PolicyGradient


def build(section: PolicyGradient) -> Algorithm:
    """CISPO with the recipe's numbers."""
    return Algorithm(
        name="cispo",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(section, denominator="tokens", scale="token", surrogate=clipped_weight),
        advantage=partial(credit_by_group, advantages=group_normalized, kl=section.kl, credit=section.credit),
        drop=keep,
    )
