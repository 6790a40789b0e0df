"""An algorithm of one's own, explained in docs/concepts/algorithms.md. The recipe names it as `centered:build`."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.catalog import CLIPPED, AlgorithmFacts
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import AlgorithmSection


def centered(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each reward less the mean of its group; not divided by the deviation."""
    return rewards - rewards.mean()


def build(section: AlgorithmSection) -> Algorithm:
    """Centered rewards; every token of the step counts the same."""
    return Algorithm(
        name="centered",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(section, denominator="tokens", scale="token"),
        advantage=partial(credit_by_group, advantages=centered, kl=section.kl),
        drop=keep,
    )


FACTS = AlgorithmFacts(
    name="centered",
    module="centered",
    summary="Rewards less the mean of their group, mean over all tokens of the step.",
    scope="group",
    min_samples=2,
    clip=(0.2, 0.2),
    advantage="A = R - mean(R of the group)",
    surrogate=CLIPPED,
    average="1/tokens * sum over tokens",
)
