"""The constants of the cost model that are no fact of a device: shares of peaks that programs reach, and delays.

Each is physical and holds for every model and cluster; none belongs to one measurement. The defaults are values that
public benchmarks agree on; those in `FITTED` were then moved by the published measurements of whole steps in
benchmarks/planner_cases.csv, and scripts/evidence/planner_cases shows how well a fit on half of them predicts the
other half. A machine's own, where they were measured, replace them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from stretto.errors import RecipeError
from stretto.placement.devices import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares, delays and fixed costs. `FITTED` names those that are fitted on published measurements."""

    matmul_share: float = 0.56
    """Of the best measured products, what a transformer's large products reach."""
    attention_share: float = 0.5
    """The same for attention (FlashAttention forward and backward together)."""
    layer_passes: float = 62.0
    """Times that a layer's forward reads or writes a hidden vector outside of products: norms, residuals, casts."""
    backward: float = 1.0
    """A backward, in forwards over what it has gradients for: 1 for inputs, 1 for weights."""
    decode_share: float = 0.77
    """Share of the memory bandwidth that decoding reaches."""
    tick: float = 3e-3
    """Seconds that a decode step takes however small it is: scheduling, sampling."""
    tick_layer: float = 3e-5
    """Seconds per layer that a decode step takes however small it is: launches of kernels."""
    plain_layer: float = 1.3e-3
    """The same where a GPU's steps are not replayed from recordings, so that the host starts kernel after kernel:
    measured on one H200, 31 and 45 ms in 24 layers. Threads of a CPU know no other steps."""
    adapted_layer: float = 7.5e-5
    """Seconds per layer that a GPU's decode step takes longer where the native engine multiplies with adapters, three
    products for one: measured on one H200, 2.7 ms in 36 layers and 2.1 in 28. On CPUs they are inside one."""
    tick_request: float = 2e-5
    """Seconds per request in a decode step: sampling, stop checks, bookkeeping on the host."""
    piece: float = 0.0
    """Seconds per layer that a micro-batch or a prefill takes however small it is: launches, packing. Nothing where
    large kernels hide it."""
    near_delay: float = 4e-6
    """Seconds of one hop inside a host."""
    far_delay: float = 1.75e-5
    """Seconds of one hop between hosts."""
    link_share: float = 0.75
    """Share of a link's bandwidth that collectives reach."""
    nic_share: float = 0.8
    """Of a network card's bandwidth, what collectives reach."""
    host_share: float = 0.75
    """Of the bandwidth to host memory, what copies reach."""
    gather: float = 2.6e9
    """Bytes/s at which processes hand tensors round, or add them up, through host memory (gloo). The default was
    measured between two processes of one host."""
    tensor: float = 1.1e-4
    """Seconds per tensor that a trainer's library exports whole, or that an engine's own loader takes in."""
    load: float = 5.6e-4
    """Seconds of one call of such a loader, with a bucket of tensors or with one."""
    handover: float = 0.28
    """Seconds that a hand-over to an engine of its own takes besides: it stops, is told and goes on."""
    wake: float = 1.4
    """Seconds in which an engine of its own wakes without its weights: vLLM publishes 0.8 to 2.6 (sleep level 2)."""
    skew: float = 1.5
    """How much more than their share the busiest ranks' experts are visited, where experts are spread over ranks."""
    phase: float = 7e-4
    """Seconds that a change of stage costs besides its work: a call to a worker process and its answer, and again per
    doubling of devices. The default was measured with Ray on one host: 0.7 ms for one process, 1.2 for two, 2.2 for
    four."""
    lone: float = 0.0
    """What a device saves of its time while the others of its host have no work, as threads of a CPU do that share
    clocks, caches and memory."""
    update: float = 0.03
    """Seconds that an optimizer update takes besides, per doubling of ranks: launches, norms, the slowest."""

    @classmethod
    def of(cls, measured: Mapping[str, float], *, kind: DeviceKind = DeviceKind.GPU, field: str = "rates") -> Rates:
        """The defaults for this kind of device with some replaced; a name that is none of ours is refused."""
        known = {item.name for item in fields(cls)}
        unknown = [name for name in measured if name not in known]
        if unknown:
            raise RecipeError.of(
                field, f"no rate is called {', '.join(unknown)}", f"the rates are {', '.join(sorted(known))}"
            )
        least = {name: SMALL if name in DIVISORS else 0.0 for name in measured}
        most = {name: MOST_LONE if name == "lone" else LARGE for name in measured}
        wrong = [f"{name} is {value:g}" for name, value in measured.items() if not least[name] <= value <= most[name]]
        if wrong:
            fix = f"give numbers up to {LARGE:g}: not below zero, and above it where something is divided by them"
            fix += f"; lone is a share, {MOST_LONE:g} at most"
            raise RecipeError.of(field, ", ".join(wrong), fix)
        return replace(cls() if kind.is_alike_everywhere else THREADS, **measured)


DIVISORS = (
    "matmul_share", "attention_share", "decode_share", "link_share", "nic_share", "host_share", "gather",
)  # fmt: skip
"""Rates that something is divided by."""

MOST_LONE = 0.9
"""Most that a device may save while others are idle: what it still takes is time."""

SMALL, LARGE = 1e-9, 1e18
"""Between these no sum of seconds overflows; no machine comes near them."""

THREADS = Rates(
    matmul_share=0.92, attention_share=1.3, layer_passes=21.0, backward=1.26, decode_share=5.6, tick=4.4e-3,
    tick_layer=5.5e-4, plain_layer=0.0, tick_request=2.5e-4, piece=5.6e-3, near_delay=1e-4, far_delay=1e-3,
    link_share=0.5, gather=1e9, phase=6e-3, lone=0.15, update=0.005,
)  # fmt: skip
"""Where devices are threads of a CPU: small models, no kernels to launch, processes next to each other. As they were
measured on one machine (benchmarks/placements-measured-2026-11-20.md), until they are measured where a plan is made.
What is above 1 is read from caches more than from memory. What a core saves that works alone is of another machine
(benchmarks/placements-measured-2026-11-29.md: its one-device steps are told best with it)."""

FITTED = ("matmul_share", "layer_passes", "decode_share", "tick", "tick_layer", "far_delay")
"""What scripts/evidence/planner_cases fits to steps; what it fits to changes of stage belongs to the systems that were
measured, and everything else stays as it is."""
