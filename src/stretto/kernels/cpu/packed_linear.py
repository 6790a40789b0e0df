"""Decode steps on a CPU with weights in the order in which its matrix units read them.

A product of few rows spends its time on reading weights, and torch's plain product brings them into order each time
anew. Here that is done once for all steps between two updates: twice as fast for eight sequences, a quarter faster for
64, and in fp32 twice as fast for any number. Decoders of the most common kind are computed as `fused_decoder.py` writes
them out: there, layers that are given the same states, as queries, keys and values are, become one product, and so do
their adapters, whose many small products would take as long as the large ones. The copies take as much memory as the
weights; they are made when first needed, and made again when a weight has changed, which its version counter tells. Not
everything that writes to memory counts, so every publish forgets the copies of what is trained as well: none is ever
out of date.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.layout import DecodeLayout
from stretto.errors import EngineError
from stretto.kernels.cpu.backward import simple
from stretto.kernels.cpu.fused_decoder import FusedDecoder, LayoutProbe, close, is_common
from stretto.models.load import Policy
from stretto.models.lora import active_pairs, base_of
from stretto.weights.tensors import on_threads, same_bits, seal

SPOILED = (
    "the engine's copies of weights in another order are not the weights any more\n"
    "    fix: stretto resume goes on from the newest checkpoint; if it comes again, look at that device's memory, and "
    "please report it"
)
"""What is said when a copy was spoiled while it was read."""

ROWS = 64
"""How many rows the order is chosen for; products of other sizes come out right as well."""


Merged = Callable[[list[Tensor]], Tensor]
"""Makes one weight of several."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """A weight in order, made of one or several."""

    stamp: tuple[tuple[int, int], ...]
    """The moment of each of them."""
    weight: Tensor
    """The copy."""
    trained: bool
    """True if one of them is trained."""
    made_of: Sequence[Tensor]
    """The weights that it was made of."""
    merged: Merged
    """How several became one."""
    seal: int
    """Seal of the copy's own memory when it was made."""

    def broken(self) -> bool:
        """True if its memory is not what it was when the copy was made."""
        return seal(memory_of(self.weight)) != self.seal

    def spoiled(self) -> Tensor | None:
        """What the copy holds, in the order of the weights, if that is not they; a copy that is out of date is never
        read again. One that stays for the whole run was compared when it was made, and is known by its seal since."""
        if self.stamp != stamp_of(self.made_of) or not (self.trained or self.broken()):
            return None
        return self.unlike()

    def unlike(self) -> Tensor | None:
        """As `spoiled`, compared with the weights bit by bit."""
        held, wanted = self.weight.to_dense(), [weight.detach() for weight in self.made_of]
        if self.merged is torch.cat:
            parts = held.split([len(weight) for weight in wanted])
            sound = all(same_bits(part, weight) for part, weight in zip(parts, wanted, strict=True))
        else:
            sound = same_bits(held, self.merged(wanted))
        return None if sound else held


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Layers that are given the same states, ready to be computed as one."""

    watched: Sequence[Tensor]
    """What it was made of."""
    stamp: tuple[tuple[int, int], ...]
    """The moment of each."""
    weight: Tensor
    """Their weights one below the other, in order."""
    bias: Tensor | None
    """Their biases."""
    adapters: tuple[Tensor, Tensor] | None
    """First halves of all their adapters, in order, and second halves, as `staircase` lays them."""

    def of(self, states: Tensor, onto: Tensor | None = None) -> Tensor:
        """(T, I) -> (T, O) what each of them gives, one after the other, added to `onto`."""
        out = times(states, self.weight, self.bias, onto)
        if self.adapters is not None:
            low, high = self.adapters
            # Added in fp32 and rounded once, as in training.
            out = times(times(states, low), high, onto=out)
        return out


class PackedSteps(Steps):
    """Computes every step as it comes, with ordered weights."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        adapted = [module for module in policy.network.modules() if simple(module)]
        inside = {part for module in adapted for part in module.modules()}
        plain = [each for each in policy.network.modules() if type(each) is nn.Linear and each not in inside]
        self.forwards = {module: partial(self._layer, module) for module in (*adapted, *plain)}
        self.written: FusedDecoder | None = None
        self.tried = not is_common(policy.network.get_decoder(), self.forwards)
        self.ready: dict[nn.Module, Product] = {}
        self.ordered: dict[Hashable, Ordered] = {}

    def product(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """States times an ordered weight."""
        return times(states, self._order("head", [weight], torch.cat), bias)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: DecodeLayout) -> Tensor:
        """Hidden states, as the policy computes them."""
        # Adapters are switched on and off only while nothing is decoded, and after that all is made anew.
        self.ready = {first: each for first, each in self.ready.items() if each.stamp == stamp_of(each.watched)}
        if not self.tried:
            return self._try(tokens, positions, layout)
        if self.written is not None:
            return self.written.hidden(tokens, positions, layout)
        with self._instead():
            return super().hidden(tokens, positions, layout)

    def weights_changed(self) -> None:
        """Forgets copies of weights that are trained."""
        self.ready.clear()
        self.ordered = {name: found for name, found in self.ordered.items() if not found.trained}

    def spoiled(self) -> dict[int, Tensor]:
        """By a fault of this machine or of ours; copies are no word of anybody's, so they are read again."""
        ordered = list(self.ordered.values())
        found = zip(ordered, on_threads(Ordered.spoiled, ordered), strict=True)
        return {id(weight): held for each, held in found if held is not None for weight in each.made_of}

    def rest(self) -> None:
        """Training follows as a rule, needs the memory, and changes what is trained.

        What was sampled with copies that go now is trained on only if they were the weights until the end.
        """
        if any(on_threads(Ordered.broken, [each for each in self.ordered.values() if each.trained])):
            raise EngineError(SPOILED)
        self.cache.clear()
        self.prefixes.clear()
        self.weights_changed()

    def release(self) -> None:
        """Gives the copies back too."""
        super().release()
        self.ready.clear()
        self.ordered.clear()

    def _try(self, tokens: Tensor, positions: Tensor, layout: DecodeLayout) -> Tensor:
        """A step computed both ways; from now on as it is written here, if that gives the same."""
        listening = LayoutProbe(replace(layout, kernels=None))  # by torch's operations alone
        expected = self.policy.hidden(tokens, positions, listening)
        decoder = self.policy.network.get_decoder()
        written = FusedDecoder(decoder, self._together, asked=listening.heard, kernels=self.kernels)
        found = written.hidden(tokens, positions, layout)
        self.tried = True
        if not close(found, expected):
            self.ready.clear()
            self.ordered.clear()
            return super().hidden(tokens, positions, layout)  # what was written to the cache is written again
        self.written = written
        return found

    @contextmanager
    def _instead(self) -> Iterator[None]:
        """Lets the linear layers compute that way for a moment; whoever trains them never sees it."""
        for module, forward in self.forwards.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in self.forwards:
                del module.__dict__["forward"]

    def _layer(self, module: nn.Module, states: Tensor) -> Tensor:
        """What a layer gives."""
        flat = self._together((module,)).of(states.reshape(-1, states.shape[-1]))
        return flat.view(*states.shape[:-1], -1)

    def _together(self, layers: Sequence[nn.Module]) -> Product:
        """Layers with the same input as one product."""
        return self.ready.get(layers[0]) or self._get_ready(layers)

    def _get_ready(self, layers: Sequence[nn.Module]) -> Product:
        """Puts the weights of some layers into order."""
        first = layers[0]
        bases = [base_of(layer) for layer in layers]
        heights = [len(base.weight) for base in bases]
        adapters = [adapter for place, layer in enumerate(layers) for adapter in adapters_of(layer, place)]
        pair = None
        if adapters:
            places, downs, ups, scales = zip(*adapters, strict=True)
            raised = partial(staircase, places=places, scales=scales, heights=heights)
            pair = self._order((first, "low"), downs, torch.cat), self._order((first, "high", scales), ups, raised)
        halves = [half for _, down, up, _ in adapters for half in (down, up)]
        watched = [*(weight for base in bases for weight in base.parameters()), *halves]
        found = self.ready[first] = Product(
            watched=watched,
            stamp=stamp_of(watched),
            weight=self._order((first, "weight"), [base.weight for base in bases], torch.cat),
            bias=None if bases[0].bias is None else torch.cat([base.bias for base in bases]),
            adapters=pair,
        )
        return found

    def _order(self, name: Hashable, weights: Sequence[Tensor], merged: Merged) -> Tensor:
        stamp = stamp_of(weights)
        found = self.ordered.get(name)
        if found is None or found.stamp != stamp:
            plain = [weight.detach() for weight in weights]
            whole = plain[0] if len(plain) == 1 and merged is torch.cat else merged(plain)
            copy = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)
            trained = any(weight.requires_grad for weight in weights)
            found = self.ordered[name] = Ordered(stamp, copy, trained, weights, merged, seal(memory_of(copy)))
            if not trained and found.unlike() is not None:
                raise EngineError(SPOILED)
        return found.weight


def moment(weight: Tensor) -> tuple[int, int]:
    """Where a weight is, and how often it has been changed in place."""
    return weight.data_ptr(), weight._version


def stamp_of(weights: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """The moment of each."""
    return tuple(map(moment, weights))


def memory_of(ordered: Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """The memory of a weight in order, as bytes."""
    place, size = torch.ops.mkldnn.data_ptr(ordered), torch.ops.mkldnn._nbytes(ordered)
    return (ctypes.c_uint8 * size).from_address(place)


def times(states: Tensor, ordered: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """(T, I) states times a weight in order, added to `onto`."""
    out: Tensor
    if onto is None:
        out = torch.ops.mkldnn._linear_pointwise(states, ordered, bias, "none", [], "")
    else:
        out = torch.ops.mkldnn._linear_pointwise.binary(states, onto, ordered, bias, "add")
    return out


def adapters_of(module: Any, place: int) -> list[tuple[int, Tensor, Tensor, float]]:
    """(place, down, up, scale) of each active adapter."""
    return [(place, *pair) for pair in active_pairs(module)]


def staircase(ups: list[Tensor], *, places: Sequence[int], scales: Sequence[float], heights: Sequence[int]) -> Tensor:
    """Second halves of adapters as one weight: each reads its own columns and writes the rows of its layer."""
    stair = ups[0].new_zeros(sum(heights), sum(up.shape[1] for up in ups))
    column = 0
    for up, place, scale in zip(ups, places, scales, strict=True):
        row = sum(heights[:place])
        stair[row : row + len(up), column : column + up.shape[1]] = up * scale
        column += up.shape[1]
    return stair


def packs(policy: Policy) -> bool:
    """True if ordered weights are possible here, and give what plain ones give. One small product is tried."""
    if policy.device.type != "cpu" or policy.dtype not in (torch.bfloat16, torch.float32):
        return False
    states, weight = torch.ones(3, 32, dtype=policy.dtype), torch.eye(32, dtype=policy.dtype)
    try:
        ordered = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        found = torch.ops.mkldnn._linear_pointwise(states, ordered, None, "none", [], "")
        twice = torch.ops.mkldnn._linear_pointwise.binary(states, found, ordered, None, "add")
    except (AttributeError, RuntimeError, NotImplementedError):  # another build of torch, or a CPU without bf16
        return False
    return bool(torch.equal(found, states) and torch.equal(twice, 2 * states))
