"""Bytes that a cell needs on each of its ranks, per phase and part by part, and what must fit side by side.

Counts of states and activations, with constants that public trainers share; nothing is allocated here. A plan adds
what stays resident to the largest phase and compares with the device; what sleeps is charged to host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import add
from typing import Literal, NamedTuple

from stretto.placement.devices import GB, Device
from stretto.planner.cost.few_bits import held_bytes
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.precision import BYTES, Precision, width
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import ModelShape

Activations = Literal["keep", "recompute", "offload"]
"""Kept for the backward, recomputed from each layer's input, or those inputs in host memory."""

CONTEXT = 1.5 * GB
"""A process on a GPU before it does anything: the driver's context, kernels, buffers of the message library."""
HOST_CONTEXT = 0.75 * GB
"""The same where a device is a host's cores: Python, torch and the libraries of models."""
BITSANDBYTES = 0.13 * GB
"""What the library that stores NF4 adds to that."""
LIVE = 2.2
"""The layer that is worked on, in units of what it keeps: values, their gradients, what kernels need besides."""
HEAD_BYTES = 14.0
"""Per logit while log-probabilities are taken: bf16 and fp32 logits, their softmax, their gradient."""
HEAD_CHUNK = 2**28
"""Bytes for logits where the head is chunked: a chunk in bf16, and a part of it in fp32."""
UNIT_BYTES = 8.0
"""Per parameter of the unit that is gathered: two units in bf16 (one is prefetched), each with a copy in flight."""
BUCKET = 1.0 * GB
"""Most of the weights that are in two layouts at once where a hand-over goes in buckets."""
NARROW = {"adamw16bit": (4.0, 2.0), "adamw8bit": (2.0, 2.0)}
"""Optimizer -> bytes of both moments, and of what masters have beside the weights."""
USABLE = 0.92
"""Of a device's memory: the rest is lost to fragmentation."""


class RankMemory(NamedTuple):
    """Bytes on one rank, by what they are for. A tuple, because a search adds up thousands of them."""

    weights: float = 0.0
    """Weights as they are stored."""
    gradients: float = 0.0
    """Accumulated gradients."""
    optimizer: float = 0.0
    """Moments, and fp32 masters."""
    activations: float = 0.0
    """What the backward needs, and the layer that is worked on."""
    head: float = 0.0
    """Logits and what is made of them."""
    gathered: float = 0.0
    """Weights gathered from shards or made wide, gradients before they are scattered, a hand-over in flight."""
    cache: float = 0.0
    """Keys and values."""
    context: float = 0.0
    """The process itself."""

    @property
    def total(self) -> float:
        """All of it."""
        return math.fsum(self)

    @property
    def states(self) -> float:
        """What outlives a phase: weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def largest(self) -> str:
        """The part that takes most: what to blame where it does not fit."""
        return max(self._fields, key=lambda name: getattr(self, name))

    def __add__(self, other: RankMemory) -> RankMemory:  # type: ignore[override]  # part by part, unlike other tuples
        if self is NOTHING or other is NOTHING:  # most of what is added up in a search
            return self if other is NOTHING else other
        return RankMemory(*map(add, self, other))


NOTHING = RankMemory()
"""No bytes."""


def context_of(device: Device, base: Precision = "bfloat16") -> float:
    """What a process takes on a device before it does anything, with a base in this type."""
    if device.kind.has_own_memory:
        return CONTEXT
    return HOST_CONTEXT + (BITSANDBYTES if base == "nf4" else 0.0)


def weights(shape: ModelShape, site: Site, precision: Precision = "bfloat16") -> float:
    """Bytes of a frozen copy: over tensor and pipeline ranks, experts over theirs, shards under ZeRO-3. Embedding and
    head are never stored in few bits."""
    mesh = site.mesh
    shards = mesh.sharding if mesh.zero == 3 else 1
    common = _common(shape, mesh) / shards
    routed = shape.routed_params / (mesh.pp * max(mesh.tp, mesh.ep, mesh.model // mesh.pp * shards))
    return BYTES[precision] * (common + routed) + width(precision) * shape.plain_params / (mesh.uncut * shards)


def _common(shape: ModelShape, mesh: Mesh) -> float:
    """Parameters that a rank has of the layers, without routed experts and before anything is sharded."""
    return (shape.common_params - shape.uncut_params) / mesh.model + shape.uncut_params / mesh.uncut


def states(
    shape: ModelShape, site: Site, *, adapter: int = 0, base: Precision = "bfloat16", optimizer: str = "adamw"
) -> RankMemory:
    """Weights, gradients and optimizer of what is trained.

    Mixed precision after Micikevicius et al. 2018 as ZeRO counts it (Rajbhandari et al. 2020): 2 bytes of bf16 weights,
    4 of fp32 gradients, 12 of fp32 masters and two moments, each over the ranks that share it; sharded weights are
    kept in fp32 and are their own masters, like those of a model in fp32 or fp64. Narrow moments take 4 bytes, or 2
    (Dettmers et al. 2022), and beside bf16 weights their masters 2. An adapter of rank r has r (in + out) parameters
    per matrix (Hu et al. 2022); what it adapts is frozen and stored as `base`.
    """
    mesh = site.mesh
    moments, masters = NARROW.get(optimizer, (8.0, 4.0))
    if adapter:
        trained = adapter * shape.linear_inputs / mesh.model
        shards = mesh.sharding if mesh.zero == 3 else 1
        small = trained / shards
        return RankMemory(
            weights=weights(shape, site, base) + 2 * small, gradients=4 * small, optimizer=(masters + moments) * small
        )
    common = _common(shape, mesh) + shape.plain_params / mesh.uncut
    routed = shape.routed_params / (mesh.pp * max(mesh.ep, mesh.tp if mesh.ep == 1 else 1))
    copies = mesh.expert_copies if mesh.ep > 1 else mesh.sharding

    def over(stage: int) -> float:
        sharded = mesh.zero >= stage
        return common / (mesh.sharding if sharded else 1) + routed / (copies if sharded else 1)

    if mesh.zero == 3 or BYTES[base] >= 4:
        wide = max(4.0, BYTES[base])
        return RankMemory(weights=wide * over(3), gradients=wide * over(2), optimizer=moments * wide / 4 * over(1))
    return RankMemory(weights=2 * over(3), gradients=4 * over(2), optimizer=(masters + moments) * over(1))


def layer_bytes(shape: ModelShape, precision: Precision = "bfloat16") -> float:
    """What one layer keeps per token for its backward, with fused attention, norms and gates: what goes into both norms
    and comes out of them, queries, keys, values and their mix, gate, up and the product of both.

    In a layer with experts each token's share counts, plus three sorted copies of the routed hidden vectors.
    """
    heads = 2 * shape.heads * shape.queries + 2 * shape.kv_heads * shape.head_dim
    inner = 3.0 * shape.ffn
    if shape.experts:
        inner = 3.0 * (shape.top_k + shape.shared_experts) * shape.expert_ffn + 3.0 * shape.top_k * shape.hidden
    return width(precision) * (4.0 * shape.hidden + heads + inner)


def activations(
    shape: ModelShape,
    site: Site,
    tokens: float,
    kind: Activations = "recompute",
    precision: Precision = "bfloat16",
) -> float:
    """For micro-batches of this many tokens per data parallel rank (Chen et al. 2016; Korthikanti et al. 2022).

    The first pipeline stage holds as many micro-batches as there are stages, so that depth cancels.
    """
    own = tokens / site.mesh.cp
    layer = _own_layer(shape, site.mesh, precision)
    if kind == "keep":
        return own * (shape.layers + LIVE - 1) * layer
    inputs = shape.layers if kind == "recompute" else 2
    return own * (_states(shape, site.mesh, precision) * inputs + LIVE * layer)


def _own_layer(shape: ModelShape, mesh: Mesh, precision: Precision) -> float:
    """Of `layer_bytes` what is on one rank. Where states between layers are in full, so is what goes into norms and
    comes out of them, and so are rows that were sorted for experts which are cut inside."""
    whole = layer_bytes(shape, precision)
    if mesh.cuts_all:
        return whole / mesh.tp
    sorted_rows = 6.0 * shape.top_k if shape.experts and mesh.ep == 1 else 0.0
    full = width(precision) / 2 * (8.0 + sorted_rows) * shape.hidden
    return full + (whole - full) / mesh.tp


def _states(shape: ModelShape, mesh: Mesh, precision: Precision) -> float:
    """Bytes on one rank of what one layer hands to the next, per token."""
    return width(precision) * shape.hidden / (mesh.tp if mesh.cuts_all else 1)


def head(
    shape: ModelShape,
    site: Site,
    tokens: float,
    *,
    chunked: bool = True,
    trained: bool = False,
    precision: Precision = "bfloat16",
) -> float:
    """Logits of a micro-batch, or of one chunk of it where their backward recomputes them (Wijmans et al. 2024).

    Where the head is trained, its gradient is summed over chunks in fp32, and each chunk's comes beside it.
    """
    ranks = site.mesh.tp if site.mesh.cuts_all else 1
    whole = tokens / site.mesh.cp * shape.logits / ranks * HEAD_BYTES
    gradient = (4 + width(precision)) * shape.embedding_params / ranks if trained and site.mesh.zero < 3 else 0.0
    return (min(whole, HEAD_CHUNK) if chunked else whole) + gradient


def widened(shape: ModelShape, site: Site, base: Precision) -> float:
    """A matrix of a base in few bits while it is multiplied with."""
    return held_bytes(base, site.device.kind) * shape.largest_matrix / site.mesh.tp


def gathered(shape: ModelShape, site: Site, *, trained: bool) -> float:
    """Working set of sharded weights: the unit at work and the next; with its fp32 gradient and a copy to scatter.

    Of experts that are spread over ranks only a rank's own are gathered, and only where they have copies.
    """
    mesh = site.mesh
    if mesh.zero < 3:
        return 0.0
    cast = UNIT_BYTES if mesh.sharding > 1 else UNIT_BYTES / 2  # alone, nothing is in flight
    layer = (_common(shape, mesh) + shape.routed_params / mesh.model) / shape.layers
    unit = max(layer, shape.embedding_params / mesh.uncut)
    if mesh.ep > 1 and shape.routed_params:
        common = max(_common(shape, mesh) / shape.layers, shape.embedding_params / mesh.uncut)
        routed = shape.routed_params / shape.moe_layers / (mesh.pp * mesh.ep)
        unit = common + (routed if mesh.expert_copies > 1 else 0.0)
    return (cast + (8.0 if trained else 0.0)) * unit


def training(
    shape: ModelShape,
    site: Site,
    tokens: float,
    *,
    adapter: int = 0,
    base: Precision = "bfloat16",
    optimizer: str = "adamw",
    kind: Activations = "recompute",
    chunked: bool = True,
) -> RankMemory:
    """Everything that training holds at its peak, micro-batches being of this many tokens per data parallel rank."""
    return states(shape, site, adapter=adapter, base=base, optimizer=optimizer) + RankMemory(
        activations=activations(shape, site, tokens, kind),
        head=head(shape, site, tokens, chunked=chunked, trained=not adapter),
        gathered=gathered(shape, site, trained=not adapter) + widened(shape, site, base),
        context=context_of(site.device, base),
    )


def scoring(shape: ModelShape, site: Site, tokens: float, *, precision: Precision = "bfloat16") -> RankMemory:
    """A frozen model's forward (reference, reward, value): weights, one live layer, a chunk of logits."""
    own, mesh = tokens / site.mesh.cp, site.mesh
    return RankMemory(
        weights=weights(shape, site, precision),
        activations=own * (2 * _states(shape, mesh, precision) + _own_layer(shape, mesh, precision)),
        head=head(shape, site, tokens),
        gathered=gathered(shape, site, trained=False) + widened(shape, site, precision),
        context=context_of(site.device),
    )


def generating(shape: ModelShape, site: Site, tokens: float, *, precision: Precision = "bfloat16") -> RankMemory:
    """An engine whose caches hold this many tokens on the whole lane (Kwon et al. 2023, paged without waste)."""
    own = tokens / site.mesh.dp
    return RankMemory(
        weights=_engine_weights(shape, site, precision) / (site.mesh.sharding if site.mesh.gathers else 1),
        gathered=(gathered(shape, site, trained=False) if site.mesh.gathers else 0.0) + widened(shape, site, precision),
        cache=Costs().cache_bytes(shape, site, own, precision),
        activations=8192.0 * _own_layer(shape, site.mesh, precision),
        context=context_of(site.device),
    )


def _engine_weights(shape: ModelShape, site: Site, precision: Precision) -> float:
    mesh, wide = site.mesh, width(precision)
    embedding = 0.0 if shape.tied else wide * shape.embedding_params / mesh.tp
    held = Costs().weight_bytes(shape, site, math.inf, precision) / mesh.pp + embedding
    if mesh.cuts_all or mesh.tp == 1:
        return held
    plain = wide * (shape.embedding_params / mesh.pp + (0 if shape.tied else shape.embedding_params))
    return held + (1 - 1 / mesh.tp) * (plain + BYTES[precision] * shape.uncut_params / mesh.pp)


def ordered(shape: ModelShape, site: Site, base: Precision = "bfloat16", product: Precision = "bfloat16") -> float:
    """Copies of its weights that the native engine multiplies with on a CPU, in this type; of a base in few bits, of
    the head's."""
    matrices = shape.params if BYTES[base] >= 2 else shape.embedding_params
    return width(product) * matrices / site.mesh.tp


def handover(shape: ModelShape, engine: Site, *, bucketed: bool = True) -> float:
    """Weights that exist twice while an engine takes them over: its whole part, or one bucket (HybridFlow 2024)."""
    part = _engine_weights(shape, engine, "bfloat16")
    return min(part, BUCKET) if bucketed else part


def asleep(held: Iterable[RankMemory], ranks: int) -> float:
    """Host memory for the states of so many ranks of one host that sleep, with a pinned bucket each for the copies.

    Caches are dropped, not kept, and activations never outlive their phase (ZeRO-Offload, Ren et al. 2021).
    """
    return ranks * (math.fsum(each.states for each in held) + BUCKET)


def fits(size: float, site: Site) -> bool:
    """Whether this much fits a rank, with room for fragmentation."""
    return size <= USABLE * site.device.memory
