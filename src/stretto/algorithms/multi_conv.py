"""Multi-conversation credit: one verdict for every token of all conversations of a trajectory.

The reward of the last conversation, less the mean of the group, is the advantage of every token that led to it; the
deviation does not divide. The loss is a mean over all tokens of the step, so a trajectory of many conversations weighs
more. `average: trajectory` gives every trajectory the same weight instead. Yu et al. 2025 (MemAgent), eq. 2 and 3.
"""

from __future__ import annotations

from functools import partial

from stretto.algorithms.advantages import group_centred
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import MultiConv


def build(section: MultiConv) -> Algorithm:
    """Multi-conversation credit with the recipe's numbers."""
    alike = section.average == "trajectory"
    return Algorithm(
        name="multi_conv",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(
            section, denominator="trajectories" if alike else "tokens", scale="trajectory" if alike else "token"
        ),
        advantage=partial(credit_by_group, advantages=group_centred, kl=section.kl, credit=section.credit),
        drop=keep,
    )
