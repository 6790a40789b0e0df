"""Log-probabilities of tokens from rows of logits in C (`logprob_kernels.c`), and the gradient of the logits.

As they come they are some twenty passes over the logits in fp32, the largest numbers of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from stretto.kernels.cpu.library import COUNT, POINTER, REAL, Kernel, confirmed, random

ARGUMENTS = {
    "logprobs": (*repeat(POINTER, 5), *repeat(COUNT, 2), REAL),
    "logprobs_backward": (*repeat(POINTER, 4), *repeat(COUNT, 2), REAL),
}
"""Of every kernel, as C has them."""


@dataclass(frozen=True, slots=True)
class LogprobKernels:
    """The kernels for contiguous logits of one type."""

    of: Mapping[str, Kernel]
    """By their names in C."""

    def forward(self, raw: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """(b, V) logits, (b) tokens -> their log-probabilities, normalisers, entropies (b), in fp32."""
        logprobs, normalisers, entropies = torch.empty(3, len(raw), dtype=torch.float32)
        used = (raw, targets.long().contiguous(), logprobs, normalisers, entropies)
        if self.of["logprobs"](*(each.data_ptr() for each in used), *raw.shape, temperature):
            raise IndexError("a target is no token of the head's vocabulary")
        return logprobs, normalisers, entropies

    def backward(self, raw: Tensor, targets: Tensor, normalisers: Tensor, outgoing: Tensor, temperature: float) -> None:
        """Logits become their gradient, in place."""
        used = (raw, targets.long().contiguous(), normalisers.contiguous(), outgoing.contiguous())
        self.of["logprobs_backward"](*(each.data_ptr() for each in used), *raw.shape, temperature)


@cache
def logprob_kernels(dtype: torch.dtype) -> LogprobKernels | None:
    """The kernels for logits of this type; none if this machine cannot have them."""
    return confirmed(dtype, ARGUMENTS, LogprobKernels, lambda kernels: _tried(kernels, dtype))


@torch.no_grad()
def _tried(kernels: LogprobKernels, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """What kernels and torch make of a few rows."""
    raw, targets, outgoing = 6 * random(dtype, 3, 1500), torch.tensor([0, 1499, 700]), random(torch.float32, 3)
    logs = (raw.float() / 0.9).log_softmax(-1)
    slopes = (one_hot(targets, 1500) - logs.exp()) * outgoing[:, None] / 0.9
    chosen = logs.gather(-1, targets[:, None])[:, 0]
    expected = [chosen, (raw.float() / 0.9).logsumexp(-1), -(logs.exp() * logs).sum(-1), slopes]
    found = kernels.forward(raw, targets, 0.9)
    kernels.backward(raw, targets, found[1], outgoing, 0.9)
    return list(zip([*found, raw], expected, strict=True))
