"""Decoders of the most common kind (Llama, Qwen, Mistral), written out for decode steps.

A decode step is a hundred small operations per layer, each of which costs more than its arithmetic: to call it, and to
fetch what it works on. Here a layer is a third of them. Queries, keys and values are one product and turn together;
what a layer adds to its input is added inside its last product. Norms, activations, rotations and weights stay the
network's own, so that a model is decoded with exactly the layers that are trained.

Only families are written out whose forward is known: others have the same parts and do more with them, some of it only
far into a context. And it is tried: a network's first step is computed both ways. Hooks on decoder layers do not see
decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stretto.models.attention import AttentionLayout

FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "gemma"}
"""Model types, by the names of transformers' modules."""

LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FEED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}

SAME = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""By how much the two ways may differ for a token, as a share of its states. Rounding of SmolLM2 comes to 0.02."""


class FusedLinears(Protocol):
    """Linear layers that are given the same states, as one product."""

    def of(self, states: Tensor, onto: Tensor | None = None) -> Tensor:
        """(T, I) -> (T, the outputs of all one after the other), added to `onto`."""
        ...


@dataclass(frozen=True, slots=True)
class LayoutProbe:
    """A layout that notes how it is asked."""

    layout: AttentionLayout
    """The layout that answers."""
    heard: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Layer -> the scale and the window of its attention."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """Attention, as the layout computes it."""
        self.heard[layer] = how
        return self.layout.attend(layer, query, key, value, **how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rotation of every token, by its position."""

    cosine: Tensor
    """(T, 1, D)."""
    sine: Tensor
    """(T, 1, D), the first half with its sign changed."""

    @classmethod
    def of(cls, cosine: Tensor, sine: Tensor) -> Rotation:
        """From (1, T, D) each."""
        half = sine.shape[-1] // 2
        signed = torch.cat([-sine[..., :half], sine[..., half:]], dim=-1)
        return cls(cosine=cosine[0, :, None], sine=signed[0, :, None])

    def __call__(self, heads: Tensor) -> Tensor:
        """(T, any, D) turned."""
        return (heads * self.cosine).addcmul_(heads.roll(heads.shape[-1] // 2, -1), self.sine)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedDecoder:
    """A network's decoder, layer by layer."""

    decoder: Any
    """The decoder's own modules."""
    together: Callable[[Sequence[nn.Module]], FusedLinears]
    """Makes one product of linear layers."""
    asked: Mapping[int, Mapping[str, Any]]
    """Layer -> the scale and the window of its attention."""

    def hidden(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """(T) token ids -> (T, W) states before the head."""
        states = self.decoder.embed_tokens(tokens)
        turn = Rotation.of(*self.decoder.rotary_emb(states[None], position_ids=positions[None]))
        for layer in self.decoder.layers:
            states = self._fed(layer, self._attended(layer, states, turn, layout))
        result: Tensor = self.decoder.norm(states)
        return result

    def _attended(self, layer: Any, states: Tensor, turn: Rotation, layout: AttentionLayout) -> Tensor:
        """The states with what the layer's attention adds."""
        attention = layer.self_attn
        size = attention.head_dim
        asking, told = attention.q_proj.out_features // size, attention.k_proj.out_features // size
        mixed = self.together((attention.q_proj, attention.k_proj, attention.v_proj)).of(layer.input_layernorm(states))
        heads = mixed.view(len(states), -1, size)
        turned = heads[:, : asking + told]
        if hasattr(attention, "q_norm"):
            turned = torch.cat([attention.q_norm(turned[:, :asking]), attention.k_norm(turned[:, asking:])], dim=1)
        turned = turn(turned)
        parts = (turned[:, :asking], turned[:, asking:], heads[:, asking + told :])
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        seen = layout.attend(attention.layer_idx, query, key, value, **self.asked[attention.layer_idx])
        return self.together((attention.o_proj,)).of(seen[0].transpose(0, 1).flatten(1), onto=states)

    def _fed(self, layer: Any, states: Tensor) -> Tensor:
        """The states with what the layer's feed-forward part adds."""
        feed = layer.mlp
        both = self.together((feed.gate_proj, feed.up_proj)).of(layer.post_attention_layernorm(states))
        gate, up = both.chunk(2, dim=-1)
        return self.together((feed.down_proj,)).of(feed.act_fn(gate).mul_(up), onto=states)


def is_common(decoder: Any, linear: Collection[nn.Module]) -> bool:
    """True if a decoder is of a known family and has the parts of it and no others; `linear` are the layers that can be
    products."""
    if type(decoder).__module__ not in {f"transformers.models.{name}.modeling_{name}" for name in FAMILIES}:
        return False
    if parts_of(decoder) != DECODER:
        return False
    turned = 2 * len(decoder.rotary_emb.inv_freq)
    return all(_is_common_layer(layer, linear, turned) for layer in decoder.layers)


def _is_common_layer(layer: Any, linear: Collection[nn.Module], turned: int) -> bool:
    """`turned` is how many numbers of a head are turned: all, in this kind."""
    if parts_of(layer) != LAYER or parts_of(layer.mlp) != FEED:
        return False
    if parts_of(layer.self_attn) not in (ATTENTION, ATTENTION | HEAD_NORMS):
        return False
    attention, feed = layer.self_attn, layer.mlp
    teams = (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (feed.gate_proj, feed.up_proj),
        (feed.down_proj,),
    )
    sizes = [getattr(attention, name).weight.shape[-1] for name in HEAD_NORMS if hasattr(attention, name)]
    if {attention.head_dim, *sizes} != {turned}:
        return False
    return all(each in linear for team in teams for each in team) and all(map(_is_team, teams))


def _is_team(layers: Sequence[Any]) -> bool:
    """True if all have biases or none, of one type."""
    return len({(layer.bias is None, layer.weight.dtype) for layer in layers}) == 1


def parts_of(module: Any) -> set[str]:
    """The names of a module's own modules."""
    return {name for name, _ in module.named_children()}


def close(found: Tensor, expected: Tensor) -> bool:
    """True if the states of no token differ by more than rounding."""
    apart, size = (states.float().norm(dim=-1) for states in (found - expected, expected))
    return bool((apart <= SAME[expected.dtype] * size).all())
