"""Decoders of the most common kind (Llama, Qwen, Mistral), written out for decode steps.

A decode step is a hundred small operations per layer, each of which costs more than its arithmetic: to call it, and to
fetch what it works on. Here a layer is four products and as many kernels. Queries, keys and values are one product;
what a layer adds to its input is added inside its last product. Norms, gates, rotations and attention are kernels in C
where these give what the network's own layers give; otherwise these are asked. Weights are always the network's own.

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
from torch.nn.functional import silu

from stretto.kernels.by_hand import eps_of
from stretto.kernels.cpu.backward import is_plain
from stretto.kernels.cpu.decode_kernels import QUERIES, DecodeKernels, HeadTurn
from stretto.models.attention import AttentionLayout

FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "gemma"}
"""Model types, by the names of transformers' modules."""

LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = ("q_norm", "k_norm")
FEED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}

SAME = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""By how much the two ways may differ for a token, as a share of its states. Rounding of SmolLM2 comes to 0.02."""


class FusedLinears(Protocol):
    """Linear layers that are given the same states, as one product."""

    def of(self, states: Tensor, onto: Tensor | None = None) -> Tensor:
        """(T, I) -> (T, the outputs of all one after the other), added to `onto`."""
        ...


class TurningLayout(AttentionLayout, Protocol):
    """A layout that turns heads before it looks, where it is told how."""

    def attend_rows(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        turn: HeadTurn | None = None,
    ) -> Tensor:
        """(T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
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
class FusedLayer:
    """A layer's parts, in the order in which they are computed."""

    number: int
    """Whose cache it reads."""
    norm: Any
    """What its attention is given passes through it."""
    mixed: Sequence[nn.Module]
    """Queries, keys and values."""
    asking: int
    """Heads of queries."""
    told: int
    """Heads of keys."""
    size: int
    """Numbers of a head."""
    head_norms: Sequence[Any]
    """Of queries and of keys, in models that have them."""
    how: Mapping[str, Any]
    """The scale and the window of its attention."""
    output: Sequence[nn.Module]
    """What was found, on its way back."""
    feed_norm: Any
    """What its feed-forward part is given passes through it."""
    gates: Sequence[nn.Module]
    """Gates, and what passes through them."""
    activation: Any
    """Of the gates."""
    down: Sequence[nn.Module]
    """What passed, on its way back."""

    @classmethod
    def of(cls, layer: Any, asked: Mapping[int, Mapping[str, Any]]) -> FusedLayer:
        """`asked` tells of each layer how its attention is asked."""
        attention, feed = layer.self_attn, layer.mlp
        size = attention.head_dim
        return cls(
            number=attention.layer_idx,
            norm=layer.input_layernorm,
            mixed=(attention.q_proj, attention.k_proj, attention.v_proj),
            asking=attention.q_proj.out_features // size,
            told=attention.k_proj.out_features // size,
            size=size,
            head_norms=tuple(getattr(attention, name) for name in HEAD_NORMS if hasattr(attention, name)),
            how=asked[attention.layer_idx],
            output=(attention.o_proj,),
            feed_norm=layer.post_attention_layernorm,
            gates=(feed.gate_proj, feed.up_proj),
            activation=feed.act_fn,
            down=(feed.down_proj,),
        )


class FusedDecoder:
    """A network's decoder, layer by layer."""

    def __init__(
        self,
        decoder: Any,
        together: Callable[[Sequence[nn.Module]], FusedLinears],
        *,
        asked: Mapping[int, Mapping[str, Any]],
        kernels: DecodeKernels | None,
    ) -> None:
        """`together` makes one product of linear layers, and `asked` tells of each layer the scale and the window of
        its attention. What is between products the `kernels` compute, where this machine has them; otherwise the
        network's own layers are asked."""
        self.decoder, self.together, self.kernels = decoder, together, kernels
        self.layers = [FusedLayer.of(layer, asked) for layer in decoder.layers]
        self.alike = _alike(decoder, self.layers, kernels.dtype) if kernels is not None else set()

    def hidden(self, tokens: Tensor, positions: Tensor, layout: TurningLayout) -> Tensor:
        """(T) token ids -> (T, W) states before the head."""
        states = self.decoder.embed_tokens(tokens)
        rotation = Rotation.of(*self.decoder.rotary_emb(states[None], position_ids=positions[None]))
        for layer in self.layers:
            states = self._fed(layer, self._attended(layer, states, rotation, layout))
        return self._normed(self.decoder.norm, states)

    def _attended(self, layer: FusedLayer, states: Tensor, rotation: Rotation, layout: TurningLayout) -> Tensor:
        """The states with what the layer's attention adds."""
        heads = self.together(layer.mixed).of(self._normed(layer.norm, states)).view(len(states), -1, layer.size)
        keys, values = layer.asking, layer.asking + layer.told  # where they begin
        if (turn := self._turn_of(layer, rotation)) is not None:
            parts = (heads[:, :keys], heads[:, keys:values], heads[:, values:])
            seen = layout.attend_rows(layer.number, *parts, **layer.how, turn=turn)
        else:
            turned = rotation(self._head_normed(layer, heads[:, :values]))
            parts = (turned[:, :keys], turned[:, keys:], heads[:, values:])
            query, key, value = (part.transpose(0, 1)[None] for part in parts)
            seen = layout.attend(layer.number, query, key, value, **layer.how)[0].transpose(0, 1)
        return self.together(layer.output).of(seen.flatten(1), onto=states)

    def _fed(self, layer: FusedLayer, states: Tensor) -> Tensor:
        """The states with what the layer's feed-forward part adds."""
        both = self.together(layer.gates).of(self._normed(layer.feed_norm, states))
        return self.together(layer.down).of(self._gated(layer.activation, both), onto=states)

    def _normed(self, norm: Any, states: Tensor) -> Tensor:
        """What a norm gives."""
        if self.kernels is not None and norm in self.alike:
            return self.kernels.layers.norm(states, norm.weight, eps_of(norm) or 0.0)
        result: Tensor = norm(states)
        return result

    def _turn_of(self, layer: FusedLayer, rotation: Rotation) -> HeadTurn | None:
        """How heads are turned, if attention is to do that."""
        kernels, norms = self.kernels, layer.head_norms
        if kernels is None or rotation.cosine.dtype != kernels.dtype or not self.alike.issuperset(norms):
            return None
        if layer.asking // layer.told * layer.size > QUERIES:
            return None
        weights = (norms[0].weight, norms[1].weight) if norms else None
        return HeadTurn(rotation.cosine, rotation.sine, weights, (eps_of(norms[0]) or 0.0) if norms else 0.0)

    def _head_normed(self, layer: FusedLayer, heads: Tensor) -> Tensor:
        """(T, queries and keys, D), normed where the layer does that."""
        if not layer.head_norms:
            return heads
        parts = heads.split((layer.asking, layer.told), dim=1)
        return torch.cat([norm(part) for norm, part in zip(layer.head_norms, parts, strict=True)], dim=1)

    def _gated(self, activation: Any, both: Tensor) -> Tensor:
        """(T, 2F) -> (T, F): the activation of the first half, times the second."""
        if self.kernels is not None and activation in self.alike:
            return self.kernels.layers.gate(*both.chunk(2, dim=-1))
        gate, up = both.chunk(2, dim=-1)
        result: Tensor = activation(gate).mul_(up)
        return result


@torch.no_grad()
def _alike(decoder: Any, layers: Sequence[FusedLayer], dtype: torch.dtype) -> set[nn.Module]:
    """Norms and activations of the kind that kernels for states of this type compute, which is tried."""
    norms = [decoder.norm, *(norm for each in layers for norm in (each.norm, each.feed_norm, *each.head_norms))]
    states = torch.linspace(-9, 9, 99, dtype=dtype)
    activations = [each.activation for each in layers if torch.equal(each.activation(states), silu(states))]
    return {*(norm for norm in norms if is_plain(norm) and norm.weight.dtype == dtype), *activations}


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
    if parts_of(layer.self_attn) not in (ATTENTION, ATTENTION | {*HEAD_NORMS}):
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
