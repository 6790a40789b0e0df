"""Drawing tokens with noise that is a function of (request key, position, token id) and of nothing else.

The Gumbel-max trick: the token with the largest log-probability plus Gumbel noise is a sample of the distribution. It
is robust against rounding (a tiny change of the logits changes the winner only at a near tie), where inverting a
cumulative sum is not. Noise for every id of a large vocabulary would cost more than the matrix products of a decode
step, so it comes in two levels: blocks of 256 ids compete with their log-sum-exp, then the ids of the winning block.
That is exact, because the maximum of Gumbel-perturbed log-probabilities of a block is its log-sum-exp plus Gumbel
noise.

B sequences, V vocabulary, M blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from stretto.train.head import Head, chunks, finished_logits

DRAWN_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Logits in the wide type at once: on a CPU what its cache holds."""

BLOCK = 256

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: Weyl increment of splitmix64
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def signed(key: int) -> int:
    """An unsigned 64-bit key as the signed number that torch can hold."""
    return key - (1 << 64) if key >= 1 << 63 else key


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap around, which is what it needs."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def gumbel(keys: Tensor, positions: Tensor, lanes: Tensor, *, level: int) -> Tensor:
    """Standard Gumbel noise (B, lanes) in fp64 for 64-bit keys (B), positions (B) and lane numbers (B or 1, lanes)."""
    start = _mix(keys + _mix((positions * 2 + level + 1) * _GOLDEN))
    bits = _mix(start[:, None] + (lanes + 1) * _GOLDEN)
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def draw(logits: Tensor, *, keys: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """(B, V) logits -> (B) tokens and (B) their log-probabilities.

    A temperature of 0 is greedy; its log-probabilities are those at temperature 1.
    """
    greedy = temperatures == 0
    scaled = logits / temperatures.masked_fill(greedy, 1.0)[:, None].to(logits.dtype)
    rows, vocabulary = scaled.shape
    blocks = pad(scaled, (0, -vocabulary % BLOCK), value=float("-inf")).view(rows, -1, BLOCK)
    weights = blocks.logsumexp(-1)
    lanes = torch.arange(max(weights.shape[1], BLOCK), device=logits.device)[None]
    noise = gumbel(keys, positions, lanes[:, : weights.shape[1]], level=0)
    block = (weights.double() + noise).argmax(-1)
    inside = blocks[torch.arange(rows, device=logits.device), block]
    noise = gumbel(keys, positions, lanes[:, :BLOCK] + block[:, None] * BLOCK, level=1)
    sampled = block * BLOCK + (inside.double() + noise).argmax(-1)
    tokens = torch.where(greedy, logits.argmax(-1), sampled)
    logprobs = scaled.gather(-1, tokens[:, None])[:, 0] - weights.logsumexp(-1)
    return tokens, logprobs


def draw_from(
    hidden: Tensor,
    head: Head,
    *,
    keys: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear,
) -> tuple[Tensor, Tensor]:
    """`draw` from (B, W) states: one product with the head, whose logits are widened some rows at a time."""
    raw = product(hidden, head.weight, head.bias)
    drawn = [
        draw(
            finished_logits(raw[part], head, 1.0),
            keys=keys[part],
            positions=positions[part],
            temperatures=temperatures[part],
        )
        for part in chunks(len(raw), raw.shape[1], DRAWN_NUMBERS[raw.device.type])
    ]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn]).double()
