"""Attention over a packed row as one kernel on a GPU: FlexAttention, whose mask is the tree of segments.

A row stands depth first, so whatever continues a segment follows it without a gap. A token is then seen by exactly the
tokens from its own place up to where the last continuation of its segment ends: its place and that end are the entry
and exit of an Euler tour, and the whole tree is one number per token. Which blocks of the mask are empty or full
follows from the same numbers, so nothing of the size of a row squared is ever made.

Compiled once for all lengths (`dynamic=True`): rows differ in length nearly every time, and a compilation takes longer
than many steps. Not for CPUs, whose kernel has no backward, nor for fp64; there, and wherever the trial below fails,
`attention.py` cuts the row into blocks, which is exact too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
import torch
import torch._functorch.config as functorch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from stretto.kernels.trials import fault_of, largest_difference
from stretto.models.segments import Segment, reach_of

GRAIN = 128
"""Tokens of a block of the mask. Rows are padded to a multiple, so that their length is all that varies."""

LEAST = 2 * GRAIN
"""Shortest padded row: torch takes a size of 1 for a constant, so a row of one block would be compiled anew."""

MODELS = 64
"""Compilations of one process: two or three for each set of heads and type, of a policy, a critic, a reward model. The
compiler's own limit is 8, after which a run would end."""

SMALLEST_HEAD = 16
"""Below this size of a head the kernel refuses."""

ALLOWED = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-2}
"""Largest relative difference in the trial: what each type rounds, fp32 with products in TF32 included."""

Table = NDArray[np.int32]

Heads = tuple[int, int, int, int]
"""Query heads, key heads, size of a head, size of its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexTree:
    """A packed row as the kernel sees it."""

    reach: Table
    """(T') per token, where in the row the last token stands that may see it, plus 1; pads see themselves alone."""
    positions: Table
    """(T') positions on the branch, for sliding windows."""
    device: torch.device
    """Where masks go."""
    masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """Window -> mask, made when the first layer asks for it and kept for all others."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> FlexTree:
        """The tables of a row. ValueError if its segments do not stand depth first."""
        reach = np.repeat(reaches(segments), [segment.length for segment in segments])
        first = [reach_of(segments, index) - segment.start for index, segment in enumerate(segments)]
        positions = np.arange(len(reach)) + np.repeat(first, [segment.length for segment in segments])
        more = max(LEAST, -(-len(reach) // GRAIN) * GRAIN) - len(reach)
        return cls(
            reach=np.concatenate([reach, len(reach) + np.arange(more) + 1]).astype(np.int32),
            positions=np.pad(positions, (0, more), mode="edge").astype(np.int32),
            device=device,
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor | None:
        """(1, H, T, D), or nothing if the kernel cannot do it."""
        heads, length = (query.shape[1], key.shape[1], query.shape[3], value.shape[3]), query.shape[2]
        # Left out where it can be: a number that varies would be a reason to compile again.
        scale = None if scale is None or math.isclose(scale, query.shape[3] ** -0.5) else scale
        if not usable(query.device, query.dtype, heads, scale):
            return None
        query, key, value = (padded(states, len(self.reach)) for states in (query, key, value))
        output: Tensor = compiled()(
            query,
            key,
            value,
            block_mask=self.mask(window),
            scale=scale,
            enable_gqa=heads[0] != heads[1],
        )
        return output[:, :, :length]

    def mask(self, window: int | None) -> BlockMask:
        """The mask: which token sees which."""
        if window not in self.masks:
            first = np.zeros_like(self.positions) if window is None else self.positions - (window - 1)
            some, whole = blocks(self.reach, self.positions, first)
            tables = (torch.as_tensor(table, device=self.device) for table in (self.reach, self.positions, first))
            self.masks[window] = BlockMask.from_kv_blocks(
                *listed(some, self.device),
                *listed(whole, self.device),
                BLOCK_SIZE=GRAIN,
                mask_mod=sight(*tables),
                seq_lengths=(len(self.reach), len(self.reach)),
            )
        return self.masks[window]


def reaches(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Per segment, where in the row the last segment ends that continues it."""
    for index, segment in enumerate(segments[1:]):
        if (*segments[index].ancestors, index)[: len(segment.ancestors)] != segment.ancestors:
            raise ValueError(f"segment {index + 1} does not continue the path of the one before it; order depth first")
    ends = np.array([segment.start + segment.length for segment in segments])
    for index in reversed(range(len(segments))):
        for parent in segments[index].ancestors[-1:]:
            ends[parent] = max(ends[parent], ends[index])
    return ends


def sight(reach: Tensor, positions: Tensor, first: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a function of places; `first` is the earliest position that a token's window lets it see.

    It holds tensors alone: a plain number in it would be compiled in, and every other window would compile again.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach[key]) & (first[query] <= positions[key])

    return sees


def blocks(reach: Table, positions: Table, first: Table) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(queries, keys) in blocks: where some pairs may see each other, and where all do.

    With a window, a block may be called mixed that is empty: its mask says so again, token by token.
    """
    reach, positions, first = (table.reshape(-1, GRAIN) for table in (reach, positions, first))
    row, column = np.arange(len(reach))[:, None], np.arange(len(reach))[None, :]
    any_seen = (reach.max(1) > row * GRAIN) & (positions.max(1) >= first.min(1)[:, None])
    all_seen = (reach.min(1) >= (row + 1) * GRAIN) & (positions.min(1) >= first.max(1)[:, None])
    whole = (column < row) & all_seen
    return (column <= row) & any_seen & ~whole, whole


def listed(dense: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks as the kernel wants them: for every row how many there are, and which, those first."""
    number, which = dense.sum(1, dtype=np.int32), np.argsort(~dense, axis=1, kind="stable").astype(np.int32)
    return torch.as_tensor(number, device=device)[None, None], torch.as_tensor(which, device=device)[None, None]


def padded(states: Tensor, length: int) -> Tensor:
    """(1, heads, length, D), token after token in memory, as models make it: one layout, so one compilation."""
    by_token = states.transpose(1, 2)
    return pad(by_token, (0, 0, 0, 0, 0, length - states.shape[2])).contiguous().transpose(1, 2)


@cache
def compiled() -> Callable[..., Tensor]:
    """The kernel. Whole or not at all: in pieces it would hold all scores of a row at once."""
    import torch._dynamo.config as dynamo  # a second, which a run without a GPU need not wait for

    # A loss with several denominators goes backward once for each, so what a backward reads must outlive it.
    functorch.donated_buffer = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, MODELS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@lru_cache(maxsize=64)
def usable(device: torch.device, dtype: torch.dtype, heads: Heads, scale: float | None) -> bool:
    """Whether the kernel does such heads: tried once, forward and backward, against plain attention; said if not.

    It refuses, for one, sizes that need more shared memory than there is.
    """
    if dtype not in ALLOWED:
        return False
    if min(heads[2:]) < SMALLEST_HEAD:
        return refused(heads, f"heads are smaller than {SMALLEST_HEAD}")
    fault = fault_of(lambda: trial(device, dtype, heads, scale), ALLOWED[dtype])
    return fault is None or refused(heads, fault)


def refused(heads: Heads, reason: str) -> bool:
    """Says that another way is taken."""
    what = f"{heads[0]} query and {heads[1]} key heads of size {heads[2]}, values of size {heads[3]}"
    warnings.warn(f"no FlexAttention for {what}, but exact attention in blocks: {reason}", stacklevel=2)
    return False


def trial(device: torch.device, dtype: torch.dtype, heads: Heads, scale: float | None) -> float:
    """The largest relative difference from plain attention, in an output or a gradient, on a small tree."""
    # Sizes that are equal while it is compiled are compiled as one, so no number of heads may be that of blocks.
    length = GRAIN * next(count for count in (3, 5, 7, 11, 13) if count not in heads)
    middle = Segment(start=GRAIN + 9, length=50, ancestors=(0,))
    last = Segment(start=GRAIN + 59, length=length - GRAIN - 59, ancestors=(0,))
    mask = FlexTree.of((Segment(start=0, length=GRAIN + 9, ancestors=()), middle, last), device).mask(None)
    place = torch.arange(length, device=device)
    visible = mask.mask_mod(place, place, place[:, None], place[None, :])
    generator = torch.Generator().manual_seed(0)
    shapes = (heads[0], heads[2]), (heads[1], heads[2]), (heads[1], heads[3]), (heads[0], heads[3])
    *states, outgoing = (
        torch.randn(1, count, length, size, generator=generator).to(device=device, dtype=dtype)
        for count, size in shapes
    )
    grouped = heads[0] != heads[1]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=grouped)

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)

    results = []
    for attention in (plain, fused):
        inputs = [padded(tensor, length).detach().requires_grad_() for tensor in states]
        output = attention(*inputs)
        gradients = [torch.autograd.grad(output, inputs, outgoing, retain_graph=True) for _ in range(2)]
        with torch.no_grad():
            # As a forward without gradients has them, which is another compilation than one whose inputs want some.
            alone = attention(*(tensor.detach() for tensor in inputs))
            found = (output, alone, *gradients[0], *gradients[1])
        results.append([tensor.detach() for tensor in found])
    return largest_difference(zip(*results, strict=True))
