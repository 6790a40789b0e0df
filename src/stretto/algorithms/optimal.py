"""V*: what the best policy near the reference can expect of a prompt, from rewards of the reference's own answers.

With the goal "reward less beta KL to the reference", the optimum is V* = beta log E_ref[exp(r / beta)]; here the
expectation is the mean over a few answers. Pure numpy; where the rewards come from is for `runtime.value_table`.
Brantley et al. 2025 (A*PO), eq. 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.algorithms.base import Streams
from stretto.types import Trajectory, trajectory_key


def optimal_value(rewards: Sequence[float], beta1: float) -> float:
    """beta1 * log(mean(exp(r / beta1))). Towards 0 it becomes the largest reward, towards infinity their mean."""
    if not rewards:
        raise ValueError("V* needs at least one reward")
    values = np.asarray(rewards, dtype=np.float64)
    best = values.max()
    if beta1 == 0:
        return float(best)
    return float(best + beta1 * np.log(np.exp((values - best) / beta1).mean()))


def value_of(trajectory: Trajectory, streams: Streams) -> float:
    """V* of the trajectory's prompt, which stands in the stream of its first conversation."""
    return float(streams["vstar"][(*trajectory_key(trajectory), 0)][0])
