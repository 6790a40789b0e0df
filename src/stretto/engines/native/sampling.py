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

from stretto.models.logprob_head import CACHED_NUMBERS, Head, accum_dtype, chunks, finished_logits

BLOCK = 256

Weigh = Callable[[Tensor, Tensor, int], Tensor]
"""(B, V) products, (B, 1) temperatures and the ids of a block -> (B, M) log of the summed exponentials of each."""

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


def draw(
    raw: Tensor,
    *,
    keys: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    finish: Callable[[Tensor], Tensor] = Tensor.clone,
    some_greedy: bool = True,
    weigh: Weigh | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, V) products with a head -> (B) tokens and (B) their log-probabilities; `finish` makes logits of any of them.

    A temperature of 0 is greedy; its log-probabilities are those at temperature 1. Logits in the wide type exist for a
    few rows at a time and for the winning blocks, and not at all where a kernel does `weigh` blocks of products that
    need no finish but their temperature. Who knows that no temperature is 0 says so, and saves a pass.
    """
    rows, vocabulary = raw.shape
    greedy = temperatures == 0
    heat = temperatures.masked_fill(greedy, 1.0)[:, None].to(accum_dtype(raw.dtype))
    if weigh is not None:
        weights = weigh(raw, heat, BLOCK)
    else:
        parts = chunks(rows, vocabulary, CACHED_NUMBERS[raw.device.type])
        weights = torch.cat([_block_weights(finish(raw[part]).div_(heat[part])) for part in parts])
    lanes = torch.arange(max(weights.shape[1], BLOCK), device=raw.device)[None]
    noise = gumbel(keys, positions, lanes[:, : weights.shape[1]], level=0)
    ids = (weights.double() + noise).argmax(-1, keepdim=True) * BLOCK + lanes[:, :BLOCK]
    inside = finish(raw.gather(1, ids.clamp(max=vocabulary - 1))).div_(heat)
    noise = gumbel(keys, positions, ids, level=1).masked_fill_(ids >= vocabulary, float("-inf"))
    tokens = ids.gather(1, (inside.double() + noise).argmax(-1, keepdim=True))
    if some_greedy:
        tokens = torch.where(greedy[:, None], raw.argmax(-1, keepdim=True), tokens)
    chosen = finish(raw.gather(1, tokens)).div_(heat)[:, 0]
    return tokens[:, 0], (chosen - weights.logsumexp(-1)).double()


def _block_weights(logits: Tensor) -> Tensor:
    """(b, V) -> (b, M) log of the summed exponentials of each block; the logits are used up."""
    top = logits.amax(-1, keepdim=True)
    shares = logits.sub_(top).exp_()
    if shares.shape[1] % BLOCK:
        shares = pad(shares, (0, -shares.shape[1] % BLOCK))
    return shares.view(len(shares), -1, BLOCK).sum(-1).log_().add_(top)


def draw_from(
    hidden: Tensor,
    head: Head,
    *,
    keys: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear,
    some_greedy: bool = True,
    weigh: Weigh | None = None,
) -> tuple[Tensor, Tensor]:
    """`draw` from (B, W) states."""
    return draw(
        product(hidden, head.weight, head.bias),
        keys=keys,
        positions=positions,
        temperatures=temperatures,
        finish=lambda raw: finished_logits(raw, head, 1.0),
        some_greedy=some_greedy,
        weigh=weigh if head.softcap is None else None,
    )
