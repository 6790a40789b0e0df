"""Attention over packed rows, plugged into transformers' attention interface, so that one file serves any decoder.

A forward passes its layout as the keyword `stretto_layout` (never as global state: with gradient checkpointing the
backward recomputes a forward later, and a global would then describe another row). The layout decides who sees whom.
Two exist: the tree of segments here, for training and prefill, and the decode batch of `stretto.rollout.cache`.

Shapes: T tokens of the row, H query heads, K key and value heads, D head size; query is (1, H, T, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from stretto.errors import RecipeError
from stretto.train.flex import FlexTree
from stretto.train.segments import Cut, Segment, bounds_of, reach_of, spans_of
from stretto.train.siblings import MOST_PAIRS, Siblings, batches_of, make_siblings

NAME = "stretto"
"""What models are loaded with as `attn_implementation`."""

KEYWORD = "stretto_layout"
"""The forward keyword that carries the layout."""


class Layout(Protocol):
    """Who sees whom in one row."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, H, T, D)."""
        ...


BLOCK = 256
"""Consecutive segments are attended to together up to this many tokens: small ones would each cost a kernel call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
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
    blocks: list[Block | Siblings]
    """The same in the pieces in which it is computed; on a GPU made only if they are needed."""
    whole: FlexTree | None
    """All of it for one kernel, on a GPU."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> TreeLayout:
        """The tree as one kernel or in pieces, whichever costs less on this device."""
        if device.type == "cuda":
            return cls(segments=tuple(segments), blocks=[], whole=FlexTree.of(segments, device))
        return cls(segments=tuple(segments), blocks=cut(segments, device), whole=None)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Exact attention; no work is spent on padding, and little on masked branches."""
        if self.whole is not None:
            output = self.whole.attend(query, key, value, scale=scale, window=window)
            if output is not None:
                return output
            if not self.blocks:
                self.blocks.extend(cut(self.segments, query.device))
        bounds = bounds_of(span for block in self.blocks for span in (*block.before, block.queries))
        q, k, v = (Cut(states, bounds) for states in (query, key, value))
        return torch.cat([block.attend(q, k, v, scale=scale, window=window) for block in self.blocks], dim=2)


def cut(segments: Sequence[Segment], device: torch.device) -> list[Block | Siblings]:
    """A tree in the pieces that cost least."""
    blocks: list[Block | Siblings] = []
    plain: list[int] = []
    for run in runs(segments):
        siblings = [segments[index] for index in run] if device.type == "cpu" else []
        batches = batches_of(siblings, ancestors=reach_of(segments, run[0]), block=BLOCK)
        if batches:
            blocks += [piece(segments, members, device) for members in _blocks(segments, plain)]
            plain = []
            blocks += [make_siblings(segments, run[batch.start : batch.stop], device) for batch in batches]
        else:
            plain += run
    return blocks + [piece(segments, members, device) for members in _blocks(segments, plain)]


def piece(segments: Sequence[Segment], members: Sequence[int], device: torch.device) -> Block | Siblings:
    """Consecutive segments that are no siblings; a small one by itself, such as a prompt, is an only child."""
    length = segments[members[0]].length
    pairs = length * (reach_of(segments, members[0]) + length)
    if device.type == "cpu" and len(members) == 1 and pairs <= MOST_PAIRS:
        return make_siblings(segments, members, device)
    return make_block(segments, members, device)


def runs(segments: Sequence[Segment]) -> list[list[int]]:
    """Consecutive segments with the same ancestors."""
    return [list(run) for _, run in groupby(range(len(segments)), key=lambda index: segments[index].ancestors)]


def _blocks(segments: Sequence[Segment], plain: Sequence[int]) -> list[list[int]]:
    """Segments that follow each other, together up to `BLOCK` tokens."""
    blocks: list[list[int]] = []
    size = 0
    for index in plain:
        size += segments[index].length
        if not blocks or size > BLOCK:
            blocks.append([])
            size = segments[index].length
        blocks[-1].append(index)
    return blocks


def make_block(segments: Sequence[Segment], members: Sequence[int], device: torch.device) -> Block:
    """One block of consecutive segments."""
    start = segments[members[0]].start
    stop = segments[members[-1]].start + segments[members[-1]].length
    outside = sorted({ancestor for member in members for ancestor in segments[member].ancestors} - set(members))
    key_segment = np.concatenate([np.full(segments[index].length, index) for index in [*outside, *members]])
    key_position = np.concatenate([_positions(segments, index) for index in [*outside, *members]])
    visible = None
    if len(members) > 1 or outside:
        path = np.zeros((len(segments), len(segments)), dtype=np.bool_)
        for member in members:
            path[member, [*segments[member].ancestors, member]] = True
        queries = slice(len(key_segment) - (stop - start), None)
        visible = path[key_segment[queries, None], key_segment[None, :]]
        visible &= key_position[queries, None] >= key_position[None, :]
    return Block(
        queries=slice(start, stop),
        before=spans_of(segments, outside),
        visible=None if visible is None else torch.as_tensor(visible, device=device),
        positions=torch.as_tensor(key_position, device=device),
    )


def _positions(segments: Sequence[Segment], index: int) -> NDArray[np.int64]:
    """Positions of a segment's tokens on their branch."""
    first = sum(segments[ancestor].length for ancestor in segments[index].ancestors)
    return np.arange(first, first + segments[index].length)


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
    layout: Layout | None = keywords.get(KEYWORD)
    if layout is None:
        raise ValueError(
            f"a model loaded by stretto was called without `{KEYWORD}`; use stretto.train.model.Policy.hidden"
        )
    if keywords.get("softcap") is not None or keywords.get("s_aux") is not None:
        raise RecipeError.of(
            "model.name",
            "it caps its attention scores or has attention sinks, which is not available yet",
            "use a decoder such as Llama, Qwen, Mistral or Gemma 3",
        )
    layer: int = module.layer_idx  # type: ignore[assignment]  # every attention layer of transformers has it
    output = layout.attend(layer, query, key, value, scale=scaling, window=sliding_window)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
