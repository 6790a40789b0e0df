"""Log-probabilities of given tokens without ever holding the logits of a whole batch.

The head's logits are N x V numbers, the largest tensor of a step at a vocabulary of 49k and more. Here they exist for a
chunk of rows at a time: the forward keeps log-probabilities and normalisers, the backward makes each chunk's logits
again. Where one chunk is all there is, it is kept: its backward comes next, and nothing else is alive then. No loss
sees logits, which is why the seam between model and algorithm is the vector of log-probabilities.

N trained tokens, W hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from stretto.kernels.cpu.library import readable
from stretto.kernels.cpu.logprob_kernels import logprob_kernels
from stretto.kernels.cuda import fused_logprobs

CHUNK_NUMBERS = 1 << 27
"""Most logits alive at once, in the model's type: 256 MiB in bf16. Each chunk costs the head's gradient once more."""

CACHED_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Most logits alive at once in the wide type: on a CPU what its cache holds, or every pass waits for memory."""

LOWEST = 1e30
"""In place of infinity where that is multiplied by 0."""

ROUND = 32
"""Matrix products over a number of rows that is no multiple of this take up to a third longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What turns hidden states into logits."""

    weight: Tensor
    """(V, W)."""
    bias: Tensor | None = None
    """(V), for the few models that have one."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap), as Gemma's do."""


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that normalisers are computed in: fp32, or fp64 where the model is."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_logits(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    """Logits of a chunk of rows at the sampling temperature, in the wide type."""
    return finished_logits(linear(hidden, head.weight, head.bias), head, temperature)


def finished_logits(raw: Tensor, head: Head, temperature: float) -> Tensor:
    """What the head's product becomes: a copy in the wide type, capped, and divided by the temperature."""
    logits = raw.to(accum_dtype(raw.dtype), copy=True)
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits if temperature == 1.0 else logits / temperature


def row_padding(rows: int) -> int:
    """How many rows to add for faster products; none where they would cost more than they gain."""
    spare = -rows % ROUND
    return spare if spare * ROUND <= rows else 0


def chunks(rows: int, vocabulary: int, numbers: int) -> list[slice]:
    """Slices of rows whose logits are at most so many."""
    size = max(1, numbers // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class LogitKernels(Protocol):
    """What makes numbers of rows of logits, and then their gradient."""

    def forward(self, raw: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """(b, V) logits, (b) tokens -> their log-probabilities, normalisers, entropies (b)."""
        ...

    def backward(self, raw: Tensor, targets: Tensor, normalisers: Tensor, outgoing: Tensor, temperature: float) -> None:
        """Logits become their gradient, in place."""
        ...


class _Logprobs(torch.autograd.Function):
    """(hidden (N, W), weight, bias, targets (N)) -> log-probabilities (N), entropies (N, without gradient).

    With `kept` (N, K), ids filled up with -1, the distribution is that over these ids alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        temperature: float,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight=weight, bias=bias, softcap=softcap)
        logprobs = hidden.new_empty(len(hidden), dtype=accum_dtype(hidden.dtype))
        normalisers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        parts = chunks(len(hidden), len(weight), CHUNK_NUMBERS)
        ctx.kept = None
        for rows in parts:
            raw = linear(hidden[rows], weight, bias)
            if len(parts) == 1 and any(ctx.needs_input_grad):
                ctx.kept = raw
            ids = None if kept is None else kept[rows]
            numbers = _numbers(raw, head, targets[rows], temperature, ids)
            logprobs[rows], normalisers[rows], entropies[rows] = numbers
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, kept)
        ctx.softcap, ctx.temperature = softcap, temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers, ids_kept = ctx.saved_tensors
        head = Head(weight=weight, bias=bias, softcap=ctx.softcap)
        hidden_grad = torch.empty_like(hidden)
        trains_head = ctx.needs_input_grad[1]
        weight_grad = torch.zeros_like(weight, dtype=accum_dtype(weight.dtype)) if trains_head else None
        bias_grad = torch.zeros_like(bias, dtype=accum_dtype(bias.dtype)) if ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, None  # its memory is used for the gradient
        for rows in chunks(len(hidden), len(weight), CHUNK_NUMBERS):
            raw = linear(hidden[rows], weight, bias) if kept is None else kept
            ids = None if ids_kept is None else ids_kept[rows]
            _become_slopes(raw, head, targets[rows], normalisers[rows], gradients[0][rows], ctx.temperature, ids)
            hidden_grad[rows] = raw @ weight
            if weight_grad is not None:
                weight_grad += raw.T @ hidden[rows]
            if bias_grad is not None:
                bias_grad += raw.sum(0)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _numbers(
    raw: Tensor, head: Head, targets: Tensor, temperature: float, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, normalisers and entropies of a chunk of rows from the head's products."""
    if (kernels := _kernels_for(raw, head, kept)) is not None:
        return kernels.forward(raw, targets, temperature)
    logprobs = raw.new_empty(len(raw), dtype=accum_dtype(raw.dtype))
    normalisers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
    for part in chunks(len(raw), len(head.weight), CACHED_NUMBERS[raw.device.type]):
        logits = finished_logits(raw[part], head, temperature)
        chosen = logits.gather(-1, targets[part, None])[:, 0]
        if kept is not None:
            logits = _only(logits, kept[part])
        top = logits.amax(-1)
        logits -= top[:, None]
        shares = logits.exp()
        total = shares.sum(-1)
        logprobs[part] = chosen - top - total.log()
        normalisers[part] = top + total.log()
        shares.mul_(logits if kept is None else logits.clamp(min=-LOWEST))  # of ids that are left out: 0 * -inf
        entropies[part] = total.log() - shares.sum(-1) / total
    return logprobs, normalisers, entropies


def _become_slopes(
    raw: Tensor,
    head: Head,
    targets: Tensor,
    normalisers: Tensor,
    outgoing: Tensor,
    temperature: float,
    kept: Tensor | None,
) -> None:
    """The head's products of a chunk of rows become their gradients: they are needed no more."""
    if (kernels := _kernels_for(raw, head, kept)) is not None:
        kernels.backward(raw, targets, normalisers, outgoing, temperature)
        return
    for part in chunks(len(raw), len(head.weight), CACHED_NUMBERS[raw.device.type]):
        logits = finished_logits(raw[part], head, temperature)
        slope = None if head.softcap is None else 1 - (logits * temperature / head.softcap) ** 2
        logits -= normalisers[part, None]
        if kept is None:
            grad = logits.exp_().mul_(-outgoing[part, None])
        else:
            ids = kept[part].long()
            shares = _only(logits, ids).exp_().mul_(-outgoing[part, None])
            grad = torch.zeros_like(logits).scatter_add_(-1, ids.clamp(min=0), shares)
        grad.scatter_add_(-1, targets[part, None], outgoing[part, None].to(grad.dtype))
        if slope is not None:
            grad *= slope
        raw[part] = grad if temperature == 1.0 else grad / temperature


def _kernels_for(raw: Tensor, head: Head, kept: Tensor | None) -> LogitKernels | None:
    """What does all that comes after the head's product at once, if anything does."""
    if head.softcap is not None or kept is not None:
        return None
    if readable(raw.dtype, raw) and raw.is_contiguous():
        return logprob_kernels(raw.dtype)
    return fused_logprobs if fused_logprobs.usable(raw.device, raw.dtype) else None


def _only(logits: Tensor, kept: Tensor) -> Tensor:
    """(b, V) logits -> (b, K) those of the ids that are kept, -inf where a row has fewer."""
    return logits.gather(-1, kept.long().clamp(min=0)).masked_fill_(kept < 0, float("-inf"))


def logprobs_of(
    hidden: Tensor, head: Head, targets: Tensor, *, temperature: float, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target given its hidden state, and the entropy of the distribution it was taken from.

    That is the one over `kept` (N, K), if given: ids that have the target among them, filled up with -1.
    """
    count, spare = len(hidden), row_padding(len(hidden))
    if spare:
        hidden, targets = pad(hidden, (0, 0, 0, spare)), pad(targets, (0, spare))
        kept = None if kept is None else pad(kept, (0, 0, 0, spare))
    logprobs, entropies = _Logprobs.apply(hidden, head.weight, head.bias, targets, head.softcap, temperature, kept)
    return logprobs[:count], entropies[:count]
