"""Sums of gradients: what they begin as, and all of a model's as one tensor, which is added up over cells in one go.

Whose gradients they are, and what they are divided by, is the trainer's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.algorithms.base import Denominator
from stretto.models.logprob_head import accum_dtype

Accumulators = dict[Denominator, dict[str, Tensor]]


def empty_sum(weight: Tensor) -> Tensor:
    """What gradients of a weight are added to."""
    return torch.zeros_like(weight, dtype=accum_dtype(weight.dtype))


def as_one(sums: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """The sums of all weights in one tensor; zeros where nothing of the step touched one."""
    found = (sums[name] if name in sums else empty_sum(weight) for name, weight in weights.items())
    return torch.cat([each.flatten() for each in found])


def by_name(flat: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same apart again."""
    parts = flat.split([weight.numel() for weight in weights.values()])
    return {name: part.view_as(weight) for (name, weight), part in zip(weights.items(), parts, strict=True)}


def joint_norm(tensors: Mapping[str, Tensor]) -> float:
    """The norm of all of them together. Their device is waited for once."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors.values()]
    return math.hypot(*torch.stack(norms).tolist()) if norms else 0.0
