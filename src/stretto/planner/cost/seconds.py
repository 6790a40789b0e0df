"""Seconds that a stage takes on a cell: forwards, training, prefill, one tick of decoding, publishing, switching.

Arithmetic and traffic are added, collectives are added where nothing hides them. Devices come from `devices`, constants
from `rates`, sizes from `shapes`; lanes and strategies are put together by the scheduler on its virtual clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stretto.placement.rates import Rates
from stretto.placement.transport import TensorPath
from stretto.planner.cost.collectives import Wires
from stretto.planner.cost.decode_time import Decoding
from stretto.planner.cost.exchanges import held_of, over_copies, over_shards
from stretto.planner.cost.few_bits import widened_bytes
from stretto.planner.cost.mesh import Site
from stretto.planner.cost.precision import BYTES, UNAIDED, Precision, width
from stretto.planner.cost.shapes import ModelShape
from stretto.planner.cost.token_load import TokenLoad

DEFAULT = Rates()
"""The constants where nothing was measured."""

ROUTED_PASSES = 12.0
"""Times that a mixture's forward reads or writes each routed copy of a hidden vector: sorting, scattering, weighing."""
HEAD_PASSES = 4.0
"""Times that a forward reads or writes the logits in fp32."""
MICRO_BATCH = 16384.0
"""Tokens of a micro-batch per data parallel rank where nobody states a budget."""
ADAPTER_PASSES = 3.0
"""Times that the input and output of an adapted matrix are read or written once more, for the skinny products."""
NARROW = 128.0
"""Width at which a product reaches half of what a wide one does."""


Recorded = Literal["all", "alone", "none"]
"""Decode steps that an engine records: all, those of a device that generates alone without experts, or none."""


def narrow(size: float) -> float:
    """The share of a wide product's rate that one of this width reaches, as in calculon's table of sizes."""
    return size / (size + NARROW)


def with_transfers(computing: float, moving: float, site: Site) -> float:
    """Seconds for both: links of a GPU move bytes while it computes, and threads of a CPU do one after the other."""
    return max(computing, moving) if site.device.kind.has_own_memory else computing + moving


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The time model with its constants."""

    rates: Rates = DEFAULT
    """Shares of peaks and delays."""
    widens: bool = True
    """Whether an engine makes weights in few bits wide for a product, as the native one does."""
    recorded: Recorded = "all"
    """Which decode steps GPUs replay from recordings."""
    fp8_gain: float = 1.0
    """How much faster than in bf16 systems multiply that compute in fp8; ours only stores weights so."""

    def compute(
        self, shape: ModelShape, site: Site, load: TokenLoad, *, adapter: int = 0, precision: Precision = "bfloat16"
    ) -> float:
        """One forward over a load on all ranks of a cell, without messages; `adapter` is the rank of a LoRA."""
        return sum(self._computed(shape, site, load, adapter, precision))

    def _computed(
        self, shape: ModelShape, site: Site, load: TokenLoad, adapter: int, precision: Precision
    ) -> tuple[float, float]:
        """The same: attention by itself, behind everything else.

        Products: 2 FLOP per active parameter and token (Kaplan et al. 2020). Attention: 2 (d_qk + d_v) FLOP per head
        and pair. Traffic of everything that is no product, as in calculon (Isaev et al. 2023): hidden vectors read or
        written a number of times per layer, the copies that routing makes, and logits.
        """
        device, ranks = site.device, site.mesh.devices
        gain = self.gain(site, precision)
        routed_params = shape.moe_layers * shape.top_k * shape.expert_params
        products = (shape.active_params - routed_params) / narrow(shape.ffn / site.mesh.tp)
        if routed_params:
            cut = site.mesh.tp if site.mesh.ep == 1 else 1
            products += routed_params * self.skew(site) / narrow(shape.expert_ffn / cut)
        products *= 2 * load.tokens / (self.rates.matmul_share * gain)
        seen = min(load.pairs, load.tokens * shape.window) if shape.windowed_layers else 0.0
        pairs = (shape.layers - shape.windowed_layers) * load.pairs + shape.windowed_layers * seen
        attention = 2 * pairs * shape.heads * (shape.queries + shape.values)
        attention /= self.rates.attention_share * min(gain, 1.0)  # which nobody computes in 8 bits
        routed = ROUTED_PASSES * shape.moe_layers * shape.top_k
        vectors = shape.hidden * (self.rates.layer_passes * shape.layers + routed)
        if adapter:
            vectors += ADAPTER_PASSES * shape.active_inputs
        traffic = load.tokens * (width(precision) * vectors + 4 * HEAD_PASSES * shape.logits)
        ceiling = ranks * device.matmul
        return products / ceiling + traffic / (ranks * device.bandwidth), attention / ceiling

    def gain(self, site: Site, precision: Precision) -> float:
        """How much faster than in bf16 a device multiplies: full precision loses, but not on CPUs; few bits are made
        wide first."""
        if precision == "fp8":
            return self.fp8_gain
        return UNAIDED.get(precision, 1.0) if site.device.kind.has_matrix_units else 1.0

    def messages(
        self, shape: ModelShape, site: Site, load: TokenLoad, micro: float, precision: Precision = "bfloat16"
    ) -> float:
        """Messages of one forward in `micro` micro-batches: tensor and expert parallelism.

        Two all-reduces of the hidden vectors per layer (Shoeybi et al. 2019; sequence parallelism moves as much), two
        all-to-alls of the routed copies per layer with experts (Lepikhin et al. 2020).
        """
        mesh = site.mesh
        tokens = load.tokens / (mesh.dp * mesh.cp) / micro
        layers = shape.layers / mesh.pp
        seconds = 0.0
        if mesh.tp > 1:
            wires = Wires.between(site, mesh.tp, rates=self.rates)
            seconds += 2 * layers * wires.all_reduce(width(precision) * tokens * shape.hidden)
        if mesh.ep > 1:
            wires = Wires.between(site, mesh.ep, rates=self.rates)
            vectors = width(precision) * tokens / mesh.tp * shape.hidden
            seconds += 2 * shape.moe_layers / mesh.pp * wires.all_to_all(vectors, shape.top_k) * self.skew(site)
        return seconds * micro

    def skew(self, site: Site) -> float:
        """How much longer a layer with experts takes because all wait for the ranks whose experts are popular."""
        return self.rates.skew if site.mesh.ep > 1 else 1.0

    def gathers(self, shape: ModelShape, site: Site, precision: Precision) -> float:
        """Gathering a cell's sharded weights once, for one forward or backward."""
        each, routed = BYTES[precision], shape.routed_params
        return over_shards(site, each * (shape.params - routed), each * routed, self.rates)

    def forward(
        self, shape: ModelShape, site: Site, load: TokenLoad, *, precision: Precision = "bfloat16", budget: float = 0.0
    ) -> float:
        """A forward over a load: log-probabilities, values or rewards."""
        micro = self.micro_batches(site, load, budget)
        alone = self.compute(shape, site, load, precision=precision) * self.uneven(site, load)
        seconds = alone + self.messages(shape, site, load, micro, precision)
        return with_transfers(seconds * self.bubble(site, micro), micro * self.gathers(shape, site, precision), site)

    def train(
        self,
        shape: ModelShape,
        site: Site,
        load: TokenLoad,
        *,
        updates: int = 1,
        adapter: int = 0,
        recompute: bool = False,
        precision: Precision = "bfloat16",
        budget: float = 0.0,
    ) -> float:
        """Forwards, backwards and updates over a load; `adapter` is the rank of a LoRA, 0 for all weights.

        A backward costs two forwards, one where weights are frozen (their gradient is left out; attention has none),
        plus one forward where activations are recomputed (Chen et al. 2016). Messages run with each. Sharded weights
        are gathered twice a micro-batch, and gradients of what is trained are scattered in fp32.
        """
        portion = load.part(1 / updates)
        each = self.accumulate(
            shape, site, portion, adapter=adapter, recompute=recompute, precision=precision, budget=budget
        )
        return updates * (each + self.update(shape, site, adapter=adapter))

    def accumulate(
        self,
        shape: ModelShape,
        site: Site,
        load: TokenLoad,
        *,
        adapter: int = 0,
        recompute: bool = False,
        precision: Precision = "bfloat16",
        budget: float = 0.0,
        backwards: int = 1,
    ) -> float:
        """The forwards and backwards of `train`, without an update."""
        micro = self.micro_batches(site, load, budget)
        most, attention = self._computed(shape, site, load, adapter, precision)
        backward = backwards * self.rates.backward * ((1.0 if adapter else 2.0) * most + 2.0 * attention)
        alone = ((1.0 + recompute) * (most + attention) + backward) * self.uneven(site, load)
        messages = self.messages(shape, site, load, micro, precision) * (2 + recompute)
        common, routed = (max(4.0, BYTES[precision]) * each for each in shape.trained(adapter))
        scattered = over_shards(site, common, routed, self.rates)
        moving = micro * (2 * self.gathers(shape, site, precision) + scattered)
        return with_transfers((alone + messages) * self.bubble(site, micro), moving, site)

    def update(
        self,
        shape: ModelShape,
        site: Site,
        *,
        adapter: int = 0,
        cells: int = 1,
        path: TensorPath = TensorPath.NCCL,
        wire: float = 4.0,
    ) -> float:
        """One reduction of gradients over the copies, in this and `cells` - 1 equal cells, and one step of Adam; `path`
        is how tensors pass between cells, and `wire` the bytes that a gradient has there.

        Adam reads and writes fp32 state: 28 bytes per parameter.
        """
        trained = shape.trained(adapter)
        held = held_of(site, *trained)
        waiting = self.rates.update * math.ceil(math.log2(site.mesh.devices * cells))
        if path is TensorPath.GLOO and site.device.kind.has_own_memory:
            seconds = over_copies(site, *trained, 1, self.rates, wire=wire)
            seconds += self._through_hosts(site, wire * held, cells)
        else:
            seconds = over_copies(site, *trained, cells, self.rates, wire=wire)
        return seconds + 28.0 * held / site.device.bandwidth + waiting

    def _through_hosts(self, site: Site, size: float, cells: int) -> float:
        """What each rank holds, added up over cells by gloo: to the host's memory, round, and back."""
        if cells == 1:
            return 0.0
        return 2 * self.move(size, site) + 2 * (cells - 1) / cells * size / self.rates.gather

    def micro_batches(self, site: Site, load: TokenLoad, budget: float = 0.0) -> float:
        """How many micro-batches a rank works through; a pipeline wants at least as many as it has stages."""
        mesh = site.mesh
        sequences = max(1.0, load.sequences / mesh.dp)
        wanted = load.tokens / mesh.dp / (mesh.cp * (budget or MICRO_BATCH))
        if mesh.pp > 1:
            wanted = max(wanted, 4.0 * mesh.pp)
        return max(1.0, min(math.ceil(wanted), math.ceil(sequences)))

    def bubble(self, site: Site, micro: float) -> float:
        """How much longer a pipeline takes because it fills and drains: (p - 1) / (v m) (Narayanan et al. 2021)."""
        return 1 + (site.mesh.pp - 1) / (site.mesh.stages * micro)

    def uneven(self, site: Site, load: TokenLoad) -> float:
        """How much more than its share the busiest rank has, because a sequence is not cut in two.

        Somebody has the sequence that is left over, and somebody the longest one, however well the rest is dealt out.
        """
        copies = site.mesh.dp
        if load.sequences <= 0 or load.tokens <= 0:
            return 1.0
        left_over = math.ceil(load.sequences / copies - 1e-9) / (load.sequences / copies)
        return max(left_over, min(load.longest * copies / load.tokens, copies))

    def prefill(self, shape: ModelShape, site: Site, load: TokenLoad, *, precision: Precision = "bfloat16") -> float:
        """Reading prompts into the cache of one lane: a forward, or reading the weights once if that takes longer."""
        if load.tokens <= 0:
            return 0.0
        once = self.weight_bytes(shape, site, load.tokens, precision, moved=True) / (
            site.device.bandwidth * self.rates.decode_share
        )
        seconds = self.compute(shape, site, load, precision=precision)
        gathers = self.gathers(shape, site, precision) if site.mesh.gathers else 0.0
        return max(seconds + self.messages(shape, site, load, 1.0, precision), once, gathers)

    def weight_bytes(
        self, shape: ModelShape, site: Site, batch: float, precision: Precision, *, moved: bool = False
    ) -> float:
        """Weights that one rank holds if `batch` is infinite, or whose bytes are `moved` in a tick of so many tokens.

        Of the experts, those that some token visits: n (1 - (1 - k/n)^batch) if routing is even.
        """
        mesh = site.mesh
        head = width(precision) * shape.embedding_params  # never in few bits
        routed = 0.0
        if shape.moe_layers:
            routed = shape.routed_params * (1 - (1 - shape.top_k / shape.experts) ** batch)
        each = BYTES[precision]
        if moved and self.widens:
            each = widened_bytes(precision, site.device.kind) or each
        layers = each * (shape.common_params / mesh.tp + routed / max(mesh.tp, mesh.ep))
        return layers + head / mesh.tp

    def cache_bytes(self, shape: ModelShape, site: Site, context: float, precision: Precision = "bfloat16") -> float:
        """Cache of one sequence on one rank: split over heads, whole where there are fewer heads than ranks."""
        heads = 1 if shape.kv_rank else shape.kv_heads
        return shape.kv_bytes(context, width=width(precision)) / min(site.mesh.tp, heads)

    def tick(
        self,
        shape: ModelShape,
        site: Site,
        batch: float,
        context: float,
        *,
        precision: Precision = "bfloat16",
        adapter: int = 0,
    ) -> float:
        """One token for each of `batch` sequences of this mean length on one lane (the ranks of `site`).

        Bound by reading weights and caches, or by products (Pope et al. 2022), on top of launches, scheduling and
        sampling. `batch` is spread over the data parallel ranks; of pipeline stages that many groups take turns.
        """
        own = batch / (site.mesh.dp * site.mesh.pp)
        cache = own * self.cache_bytes(shape, site, context, precision)
        return self.decoding(shape, site, batch, precision=precision, adapter=adapter).seconds(cache)

    def decoding(
        self, shape: ModelShape, site: Site, batch: float, *, precision: Precision = "bfloat16", adapter: int = 0
    ) -> Decoding:
        """What a tick of so many sequences takes, but for reading their caches."""
        mesh, rates = site.mesh, self.rates
        own = batch / (mesh.dp * mesh.pp)
        ceiling = site.device.matmul * rates.matmul_share * self.gain(site, precision)
        products = 2 * shape.active_params * own / mesh.tp / ceiling
        layer = rates.tick_layer if self.records(shape, site) else max(rates.tick_layer, rates.plain_layer)
        if adapter and self.recorded != "all" and site.device.kind.has_own_memory:
            layer += rates.adapted_layer
        fixed = rates.tick + layer * shape.layers + rates.tick_request * own
        moved = TokenLoad(tokens=batch / mesh.pp, pairs=0.0, sequences=batch)
        messages = self.messages(shape, site, moved, 1.0, precision) * mesh.pp
        if mesh.gathers:
            messages += self.gathers(shape, site, precision)
        return Decoding(
            weights=self.weight_bytes(shape, site, batch / mesh.pp, precision, moved=True),
            bandwidth=site.device.bandwidth,
            share=rates.decode_share,
            products=products,
            fixed=fixed,
            messages=messages,
        )

    def records(self, shape: ModelShape, site: Site) -> bool:
        """Whether a GPU replays decode steps from recordings: the native engine has none of lanes, nor of experts."""
        alone = site.device.kind.has_own_memory and site.mesh.devices == 1 and not shape.experts
        return self.recorded == "all" or (self.recorded == "alone" and alone)

    def turn(self, devices: int) -> float:
        """What a stage costs the devices that serve it besides its work: all are called at once and the slowest is
        waited for, which takes longer by about as much with each doubling."""
        return self.rates.phase * (1 + math.log2(devices))

    def move(self, size: float, site: Site) -> float:
        """Bytes of one rank to host memory or back (engines that sleep, states that are offloaded)."""
        return size / (site.device.host_link * self.rates.host_share)
