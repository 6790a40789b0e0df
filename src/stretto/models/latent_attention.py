"""Attention whose keys and values come from a latent of each token (MLA), which is what an engine caches of it.

Such a family makes the keys and values of all heads out of some hundred numbers a token and hands them to the
attention; for a model of 671B they are seventy times the latent. A layout that keeps them for later gets the latent
instead. When queries look at what was kept, nobody makes keys and values of it: the matrix that would make keys is
multiplied with the queries, and the one that would make values with what was found (DeepSeek-AI 2024). The products are
the same ones, taken in another order.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from stretto.models.attention import KEYWORD, AttentionLayout
from stretto.models.cut_collectives import ALONE, Ranks, enter
from stretto.models.logprob_head import accum_dtype
from stretto.models.lora import active_pairs, base_of
from stretto.models.quantised import QuantisedLinear


class KeepingLayout(AttentionLayout, Protocol):
    """A layout that keeps keys and values for later: to attend is to keep, and then to look."""

    decodes: bool
    """Whether its queries look at what was kept, and not at the keys and values that came with them."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keeps (1, K, T, D) keys and values."""
        ...

    def look(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, T, D) as `attend`, once these are kept."""
        ...


class LatentAttention(nn.Module):
    """What such an attention becomes beside what it was."""

    kv_b_proj: Any
    """Makes keys without their turned part, and values, of latents."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    ranks: Ranks = ALONE
    """Processes with other heads."""
    asked: LatentLayout | None = None
    """Who attends in the forward under way, if that keeps anything."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As it was, for whoever keeps nothing."""
        layout = keywords.get(KEYWORD)
        if not hasattr(layout, "keep"):
            return super().forward(*arguments, **keywords)
        self.asked = keywords[KEYWORD] = LatentLayout(cast(KeepingLayout, layout), self)
        try:
            return super().forward(*arguments, **keywords)
        finally:
            self.asked = None

    def expand_kv(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """(1, 1, T, R) latents and (1, 1, T, D) turned parts of keys -> keys and values of all heads, if anybody needs
        these."""
        turned = enter(turned, self.ranks)
        if self.asked is not None:
            self.asked.latent, self.asked.both = latent, torch.cat([latent, turned], dim=-1)
            if self.asked.layout.decodes:
                return self.asked.both, latent
        found: tuple[Tensor, Tensor] = super().expand_kv(latent, turned)  # type: ignore[misc]  # the family's own
        return found

    def asked_of_latents(self, plain: Tensor) -> Tensor:
        """(1, H, T, D) queries' parts that are not turned -> (1, H, T, R) what they ask of latents."""
        keys, _ = self._halves(self._weight(plain.dtype))
        asked = (plain @ keys).to(accum_dtype(plain.dtype))
        for down, up, scale in active_pairs(self.kv_b_proj):  # never merged: rounding would lose a young adapter
            keys, _ = self._halves(up)
            asked += scale * (plain @ keys @ down)
        return asked

    def values_of_latents(self, found: Tensor) -> Tensor:
        """(1, H, T, R) mixed latents -> (1, H, T, V) the values that they are mixtures of."""
        _, values = self._halves(self._weight(found.dtype))
        said = (found @ values.transpose(1, 2)).to(accum_dtype(found.dtype))
        for down, up, scale in active_pairs(self.kv_b_proj):
            _, values = self._halves(up)
            said += scale * (found @ down.t() @ values.transpose(1, 2))
        return said.to(found.dtype)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """What makes keys and values, without its adapter."""
        base = base_of(self.kv_b_proj)
        found: Tensor = base.wide(dtype) if isinstance(base, QuantisedLinear) else base.weight
        return found

    def _halves(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """(H, D, X) the rows of a matrix that make keys, and (H, V, X) those that make values."""
        parts = matrix.reshape(-1, self.qk_nope_head_dim + self.v_head_dim, matrix.shape[-1])
        return parts[:, : self.qk_nope_head_dim], parts[:, self.qk_nope_head_dim :]


class LatentLayout:
    """A layout that keeps latents for an attention."""

    def __init__(self, layout: KeepingLayout, attention: LatentAttention) -> None:
        self.layout, self.attention = layout, attention
        self.latent = self.both = torch.empty(0)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, T, V)."""
        self.layout.keep(layer, self.both, self.latent)
        if not self.layout.decodes:
            return self.layout.look(layer, query, key, value, scale=scale, window=window)
        size = self.attention.qk_nope_head_dim
        asked = self.attention.asked_of_latents(query[..., :size])
        asked = torch.cat([asked, query[..., size:].to(asked.dtype)], dim=-1)
        found = self.layout.look(layer, asked, self.both, self.latent, scale=scale, window=window)
        return self.attention.values_of_latents(found)


def keep_latents(network: nn.Module) -> None:
    """Lets attentions of this kind hand over latents to whoever keeps something, if a network has no others."""
    attentions = [module for module in network.modules() if hasattr(module, "num_key_value_groups")]
    if len({module.kv_lora_rank if makes_of_latents(module) else 0 for module in attentions}) > 1:
        return  # a cache holds one kind
    for module in attentions:
        if makes_of_latents(module) and not isinstance(module, LatentAttention):
            kind = type(module)
            module.__class__ = type(kind.__name__, (LatentAttention, kind), {})


def makes_of_latents(module: nn.Module) -> bool:
    """True for an attention that makes its keys and values of latents, in transformers' words."""
    return all(hasattr(module, name) for name in ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim"))


def latent_of(network: nn.Module) -> int:
    """Numbers of a latent that a network's attention hands over; 0 if it hands over keys and values."""
    ranks = (module.kv_lora_rank for module in network.modules() if isinstance(module, LatentAttention))
    return next(ranks, 0)
