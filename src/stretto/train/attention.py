"""Attention over packed rows, plugged into transformers' attention interface, so that one file serves any decoder.

A forward passes its layout as the keyword `stretto_layout` (never as global state: with gradient checkpointing the
backward recomputes a forward later, and a global would then describe another row). The layout decides who sees whom.
Two exist: the tree of segments here, for training and prefill, and the decode batch of `stretto.rollout.cache`.

Shapes: T tokens of the row, H query heads, K key and value heads, D head size; query is (1, H, T, D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of consecutive tokens of the row that continues the path of its ancestors."""

    start: int
    """Where it begins in the row."""
    length: int
    """How many tokens it has."""
    ancestors: tuple[int, ...]
    """Indices of the segments before it on its path, root first; empty for a root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """A token sees its ancestors' segments whole and its own up to itself; branches do not see each other."""

    segments: tuple[Segment, ...]
    """In row order, parents before children, covering the row without gaps."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """One exact attention per segment, so that no work is spent on padding or on masked branches."""
        outputs = [
            attend_segment(query, key, value, segment=segment, path=self.path(segment), scale=scale, window=window)
            for segment in self.segments
        ]
        return torch.cat(outputs, dim=2)

    def path(self, segment: Segment) -> tuple[Segment, ...]:
        """The segments that a segment's tokens may see, itself last."""
        return (*(self.segments[index] for index in segment.ancestors), segment)


def attend_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment: Segment,
    path: tuple[Segment, ...],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention of one segment's queries over the keys and values of its path."""
    queries = query[:, :, segment.start : segment.start + segment.length]
    keys, values = gather_path(key, path), gather_path(value, path)
    before = keys.shape[2] - segment.length
    grouped = query.shape[1] != key.shape[1]
    if before == 0 and (window is None or window >= segment.length):
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = causal_mask(before=before, length=segment.length, window=window, device=query.device)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def gather_path(states: Tensor, path: tuple[Segment, ...]) -> Tensor:
    """Keys or values along a path, root first."""
    pieces = [states[:, :, segment.start : segment.start + segment.length] for segment in path]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def causal_mask(*, before: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """(length, before + length), True where a key may be seen; distances are those on the branch, not in the row."""
    row = torch.arange(before, before + length, device=device)[:, None]
    column = torch.arange(before + length, device=device)[None, :]
    mask = column <= row
    return mask if window is None else mask & (row - column < window)


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
        raise ValueError("this model caps its attention scores or has attention sinks, which is not available yet")
    layer: int = module.layer_idx  # type: ignore[assignment]  # every attention layer of transformers has it
    output = layout.attend(layer, query, key, value, scale=scaling, window=sliding_window)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
