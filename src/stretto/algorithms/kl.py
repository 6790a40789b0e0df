"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

With u = reference - policy: k1 = -u is unbiased with high variance, k2 = u^2/2 has the gradient of each token's reverse
KL when used as a loss on policy, k3 = exp(u) - 1 - u is unbiased and never negative. Beyond one token, the optimum of a
reward with k2 in the loss is not pi_ref exp(R / coef): the KL of a token does not reach the tokens before it. As a loss
k1 has no expected gradient on policy. In the reward only k1 has that of the KL: there the estimator is what log pi's
gradient is weighted with, E[(log pi - log ref) grad log pi] is the gradient of the KL, and the square punishes tokens
that have become too rare like those that have become too likely. The formulas work on torch tensors and numpy arrays
alike. Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms.catalog import estimator_of
from stretto.recipe.schema import Kl


def k1(policy: Any, reference: Any) -> Any:
    """Log-ratio."""
    return policy - reference


def k2(policy: Any, reference: Any) -> Any:
    """Half the squared log-ratio."""
    return (policy - reference) ** 2 / 2


def k3(policy: Any, reference: Any) -> Any:
    """exp(u) - 1 - u, computed without cancellation near u = 0."""
    u = reference - policy
    return (torch.expm1(u) if isinstance(u, Tensor) else np.expm1(u)) - u


ESTIMATORS: dict[str, Callable[[Any, Any], Any]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name in recipes -> estimator."""


def estimator(kl: Kl) -> Callable[[Any, Any], Any]:
    """The one that a recipe asks for, (policy, reference) -> estimate."""
    return ESTIMATORS[estimator_of(kl.estimator, kl.where)]
