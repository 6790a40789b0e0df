"""Advantages of the rewards of one group, as plain numpy: (samples) -> (samples)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_VARIANCE = 1e-8
"""What is added to a variance before its root is taken."""


def reward_itself(rewards: Floats) -> Floats:
    """No baseline."""
    return rewards


def leave_one_out(rewards: Floats) -> Floats:
    """Each reward less the mean of the others: an unbiased baseline. Kool et al. 2019.

    One without others has nothing to be compared with, and advantage 0.
    """
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


def group_normalized(rewards: Floats, *, epsilon: float = 1e-4) -> Floats:
    """Centered and divided by the sample standard deviation (ddof 1). Shao et al. 2024, eq. 3.

    A group without variance has advantage 0, and so has a group of one.
    """
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon)


def group_centred(rewards: Floats) -> Floats:
    """Each reward less the mean of its group. Liu et al. 2025."""
    return rewards - rewards.mean()


def whitened(values: Floats) -> Floats:
    """Centered and divided by the (unbiased) standard deviation of all of them; a single one is only centered."""
    centered = values - values.mean()
    return centered / np.sqrt(values.var(ddof=1) + LEAST_VARIANCE) if len(values) > 1 else centered
