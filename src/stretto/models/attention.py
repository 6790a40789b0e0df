"""Attention over packed rows, plugged into transformers' attention interface, so that one file serves any decoder.

A forward passes its layout as the keyword `stretto_layout` (never as global state: with gradient checkpointing the
backward recomputes a forward later, and a global would then describe another row). The layout decides who sees whom.
Two exist: the tree of segments here, for training and prefill, and the decode batch of `stretto.engines.native.layout`.

Shapes: T tokens of the row, H query heads, K key and value heads, D head size; query is (1, H, T, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from stretto.errors import RecipeError
from stretto.kernels.cpu.row_attention import RowAttention
from stretto.kernels.cpu.tiles import blocks_of
from stretto.kernels.cuda.flex_attention import FlexTree
from stretto.models.segments import Cut, Segment, bounds_of, kin_of, positions_of, spans_of

NAME = "stretto"
"""What models are loaded with as `attn_implementation`."""

KEYWORD = "stretto_layout"
"""The forward keyword that carries the layout."""

WRONG = ", so it would be trained wrongly; this family is not available yet"
"""How every refusal of a family ends."""


class AttentionLayout(Protocol):
    """Which tokens of one row see which."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, H, T, D)."""
        ...


BLOCK = 256
"""Consecutive segments are attended to together up to this many tokens: small ones would each cost a kernel call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Some consecutive segments as one attention: their queries against every key that any of them may see."""

    queries: slice
    """Where the queries stand in the row; their own keys come last among the keys."""
    before: tuple[slice, ...]
    """Where the keys of ancestors outside the block stand."""
    visible: Tensor | None
    """(queries, keys), True where a query may look; none for a single root, which is plainly causal."""
    positions: Tensor
    """(keys) position of each key on its branch, for sliding windows."""

    def attend(self, query: Cut, key: Cut, value: Cut, *, scale: float | None, window: int | None) -> Tensor:
        """(1, H, queries, D)."""
        queries, keys, values = query[self.queries], self._reach(key), self._reach(value)
        mask = self.visible
        if window is not None:
            distance = self.positions[-queries.shape[2] :, None] - self.positions[None, :]
            mask = (distance < window) & ((distance >= 0) if mask is None else mask)
        grouped = queries.shape[1] != keys.shape[1]
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )

    def _reach(self, states: Cut) -> Tensor:
        return torch.cat([states[place] for place in (*self.before, self.queries)], dim=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """A token sees its ancestors' segments whole and its own up to itself; branches do not see each other."""

    segments: tuple[Segment, ...]
    """In row order, depth first, covering the row without gaps."""
    whole: FlexTree | None = None
    """All of it for one kernel, on a GPU."""
    row: RowAttention | None = None
    """All of it on a CPU."""
    blocks: list[AttentionBlock] = field(default_factory=list)
    """All of it in pieces for torch's kernels, made when neither of the others can be used."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> TreeLayout:
        """The tree in the form that costs least on this device."""
        whole = FlexTree.of(segments, device) if device.type == "cuda" else None
        blocks = blocks_of(segments) if device.type == "cpu" else ()
        return cls(segments=tuple(segments), whole=whole, row=RowAttention(blocks=blocks) if blocks else None)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Exact attention; no work is spent on padding, and little on masked branches."""
        if self.row is not None:
            return self.row.attend(query, key, value, scale=scale, window=window)
        if self.whole is not None:
            output = self.whole.attend(query, key, value, scale=scale, window=window)
            if output is not None:
                return output
        if not self.blocks:
            self.blocks.extend(cut(self.segments, query.device))
        bounds = bounds_of(span for block in self.blocks for span in (*block.before, block.queries))
        q, k, v = (Cut(states, bounds) for states in (query, key, value))
        return torch.cat([block.attend(q, k, v, scale=scale, window=window) for block in self.blocks], dim=2)


def cut(segments: Sequence[Segment], device: torch.device) -> list[AttentionBlock]:
    """Consecutive segments, together up to `BLOCK` tokens."""
    blocks: list[list[int]] = []
    size = 0
    for index, segment in enumerate(segments):
        size += segment.length
        if not blocks or size > BLOCK:
            blocks.append([])
            size = segment.length
        blocks[-1].append(index)
    return [make_block(segments, members, device) for members in blocks]


def make_block(segments: Sequence[Segment], members: Sequence[int], device: torch.device) -> AttentionBlock:
    """One block of consecutive segments."""
    start = segments[members[0]].start
    stop = segments[members[-1]].start + segments[members[-1]].length
    outside, visible = kin_of(segments, members)
    plain = len(members) == 1 and not outside
    return AttentionBlock(
        queries=slice(start, stop),
        before=spans_of(segments, outside),
        visible=None if plain else torch.as_tensor(visible, device=device),
        positions=torch.as_tensor(positions_of(segments, [*outside, *members]), device=device),
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer."""
    layout: AttentionLayout | None = keywords.get(KEYWORD)
    if layout is None:
        raise ValueError(
            f"a model loaded by stretto was called without `{KEYWORD}`; use stretto.models.load.Policy.hidden"
        )
    if keywords.get("softcap") is not None or keywords.get("s_aux") is not None:
        raise RecipeError.of(
            "model.name",
            f"it caps its attention scores or has attention sinks{WRONG}",
            "use a decoder such as Llama, Qwen, Mistral or Gemma 3",
        )
    layer: int = module.layer_idx  # type: ignore[assignment]  # every attention layer of transformers has it
    output = layout.attend(layer, query, key, value, scale=scaling, window=sliding_window)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
