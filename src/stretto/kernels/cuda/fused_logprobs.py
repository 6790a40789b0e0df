"""Log-probabilities, normalisers and entropies of rows of logits, and their gradient, each as one kernel on a GPU.

As they come they are some twenty passes over the logits in fp32, the largest numbers of a step; here the logits are
read once in their own type, and once more to become their gradient.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from stretto.kernels.trials import largest_difference, works

ALLOWED = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative difference in the trial, by type of the logits."""

COLUMNS = 4096
"""Logits of a row that a program holds."""


def forward(raw: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(b, V) logits, (b) tokens -> their log-probabilities, normalisers, entropies (b), in fp32."""
    from stretto.kernels.cuda import triton_kernels as kernels

    rows, vocabulary = raw.shape
    found = [torch.empty(rows, dtype=torch.float32, device=raw.device) for _ in range(3)]
    kernels.launch(kernels.logprobs_forward, (rows,), raw, targets, *found, vocabulary, temperature, BLOCK=COLUMNS)
    logprobs, normalisers, entropies = found
    return logprobs, normalisers, entropies


def backward(raw: Tensor, targets: Tensor, normalisers: Tensor, outgoing: Tensor, temperature: float) -> None:
    """Logits become their gradient, in place."""
    from stretto.kernels.cuda import triton_kernels as kernels

    rows, vocabulary = raw.shape
    grid = (rows, -(-vocabulary // COLUMNS))
    kernels.launch(
        kernels.logprobs_backward,
        grid,
        raw,
        targets,
        normalisers,
        outgoing.contiguous(),
        vocabulary,
        temperature,
        BLOCK=COLUMNS,
    )


@lru_cache(maxsize=8)
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels do such logits here: tried once, and said if not."""
    if device.type != "cuda" or dtype not in ALLOWED:
        return False
    return works("log-probabilities", lambda: _trial(device, dtype), ALLOWED[dtype])


def _trial(device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative difference from plain operations in fp64."""
    raw = (torch.arange(3 * 5003, device=device).view(3, -1) * 0.7).sin().mul(6).to(dtype)
    targets, outgoing = torch.tensor([0, 4999, 5002], device=device), torch.tensor([0.5, -1.0, 2.0], device=device)
    logits = (raw.double() / 0.9).requires_grad_()
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, targets[:, None])[:, 0]
    (slope,) = torch.autograd.grad(chosen, logits, outgoing.double())
    expected = [chosen, logits.logsumexp(-1), -(logs.exp() * logs).sum(-1), slope / 0.9]
    found = [*forward(raw, targets, 0.9)]
    backward(raw, targets, found[1], outgoing, 0.9)
    return largest_difference(zip(expected, [*found, raw], strict=True))
