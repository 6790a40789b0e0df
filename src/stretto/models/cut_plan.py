"""What of a network can be cut, read from the plan that its family has in transformers, and why it cannot be.

A plan names layers with a style each. Only styles whose arithmetic is known here are followed; a family with others is
refused, and so is one whose cut regions have parts with weights that the plan says nothing about. Attentions that make
their keys of latents (MLA) are cut by their heads whatever the plan says; the latents are everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from stretto.errors import Problem
from stretto.models.latent_attention import makes_of_latents
from stretto.models.lora import base_of
from stretto.models.quantised import QuantisedExperts

FIELD = "placement.cells"

COLUMNS, ROWS, SHARED, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce", "replicated"
MIXTURE, SPREAD = "moe_tp_experts", "ep_dispatch_experts"
INSIDE = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
"""How experts are cut inside: each parameter's style."""

LATENTS = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), COLUMNS),
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), WHOLE),
    "o_proj": ROWS,
}
"""How an attention is cut that makes its keys of latents."""

HEADS, KEYS = "heads", "key-value heads"
"""What an attention's layers are divided into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRegion:
    """Layers between one entrance and one exit: an attention, or a feed-forward layer."""

    name: str
    """Where it is in the network."""
    module: Any
    """The module that they are in."""
    columns: list[Any] = field(default_factory=list)
    """Cut by their outputs."""
    rows: list[Any] = field(default_factory=list)
    """Cut by their inputs."""
    shared: list[nn.Module] = field(default_factory=list)
    """In full everywhere, for a part of the states."""
    whole: list[nn.Module] = field(default_factory=list)
    """In full everywhere, before anything is divided."""

    @property
    def unnamed(self) -> list[str]:
        """Its own parts with weights that the plan does not name."""
        known = {id(each) for each in (*self.columns, *self.rows, *self.shared, *self.whole)}
        parts = [name for name, part in self.module.named_children() if id(part) not in known and _has_weights(part)]
        return parts + [name for name, _ in self.module.named_parameters(recurse=False)]

    def counted(self, layer: Any) -> tuple[int, str]:
        """What of a layer's outputs is divided, in the words of whoever knows the model."""
        if makes_of_latents(self.module):
            return self.module.num_heads, HEADS
        head: int | None = getattr(self.module, "head_dim", None)
        width: int = base_of(layer).out_features
        if head is None or width % head:
            return width, "numbers inside a feed-forward layer"
        return width // head, HEADS if width == max(base_of(each).out_features for each in self.columns) else KEYS

    def parts(self, tensor: int) -> list[tuple[Any, int]]:
        """Layers that are cut by their outputs, and how many different parts processes have of each: key-value heads
        that are fewer than the processes are parts that several of them have."""
        told = [(layer, *self.counted(layer)) for layer in self.columns]
        return [(layer, min(count, tensor) if what == KEYS else tensor) for layer, count, what in told]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlan:
    """A network's layers by what happens to them."""

    family: str
    """The model's type."""
    regions: list[CutRegion]
    """Attention and feed-forward layers."""
    mixtures: list[Any]
    """Modules that hold all experts of a layer."""
    spreads: bool
    """Whether experts stay whole."""
    strange: dict[str, str]
    """Name in the plan -> a style that is not known here."""

    def cached(self, tensor: int) -> int:
        """How many different parts processes have of keys and values; one where a family's attention is not cut."""
        headed = [region for region in self.regions if hasattr(region.module, "head_dim")]
        attentions = [region for region in headed if not makes_of_latents(region.module)]  # latents are not divided
        return min((parts for region in attentions for _, parts in region.parts(tensor)), default=1)

    def unknown(self, tensor: int) -> Iterator[Problem]:
        """Families whose plan is missing or cannot be followed."""
        if self.spreads and not self.mixtures:
            reason = f"{self.family}: there are no experts that could be spread"
            yield Problem(field=FIELD, reason=reason, fix="leave ep out of the cell's mesh")
        if tensor == 1:
            return
        if not self.regions and not self.mixtures:
            reason = f"{self.family}: transformers has no plan for cutting its matrices"
            yield Problem(field=FIELD, reason=reason, fix="use dp_shard in place of tp")
        for name, style in self.strange.items():
            reason = f"{self.family}: {name} would be cut as {style}, which is not available yet"
            yield Problem(field=FIELD, reason=reason, fix="use dp_shard in place of tp")
        for region in self.regions:
            if region.unnamed or not region.rows or not region.columns:
                told = ", ".join(region.unnamed) or "what it begins or ends with"
                reason = f"{self.family}: {region.name} has parts that its plan does not name ({told})"
                yield Problem(field=FIELD, reason=reason, fix="use dp_shard in place of tp")
                return

    def indivisible(self, tensor: int, every: int) -> Iterator[Problem]:
        """What so many processes cannot share equally: `tensor` matrices, and `every` one of them experts."""
        sizes = {region.counted(layer): None for region in self.regions for layer in region.columns}
        if not self.spreads:
            sizes |= {(_inner(module), "numbers inside an expert"): None for module in self.mixtures}
        if told := [f"{size} {what}" for size, what in sizes if not _divides(tensor, size, what)]:
            able = [str(n) for n in range(1, tensor) if all(_divides(n, size, what) for size, what in sizes)]
            reason = f"tp {tensor} does not divide the model's {', '.join(told)}"
            yield Problem(field=FIELD, reason=reason, fix=f"use tp {' or '.join(able)}")
        counts = {base_of(module).num_experts for module in self.mixtures} if self.spreads else set()
        for count in counts:
            if count % every:
                reason = f"ep {every} does not divide the model's {count} experts"
                yield Problem(field=FIELD, reason=reason, fix="use a divisor of them")

    def unsupported(self, tensor: int) -> Iterator[Problem]:
        """Layers of a kind that is not cut."""
        if tensor > 1 and any(base_of(layer).bias is not None for region in self.regions for layer in region.rows):
            reason = f"{self.family}: layers whose inputs are cut have biases, which is not available yet"
            yield Problem(field=FIELD, reason=reason, fix="use dp_shard in place of tp")
        for module in map(base_of, self.mixtures):
            plain = getattr(module, "has_gate", False) and getattr(module, "is_concatenated", False)
            ends_with_sum = self.spreads or not getattr(module, "has_post_expert_norm", True)
            if not plain or not ends_with_sum or module.is_transposed or module.has_bias:
                reason = f"experts stored as in {type(module).__name__} are not cut yet"
                yield Problem(field=FIELD, reason=reason, fix="leave ep and tp out of the cell's mesh")
                return


def cut_plan(network: PreTrainedModel, *, spreads: bool) -> CutPlan:
    """The plan of a network's family, put to its layers. Experts are cut inside, unless it `spreads` them."""
    decoder, config = network.get_decoder(), network.get_decoder().config
    styles: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    whole: Mapping[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    modules = dict(decoder.named_modules())
    regions: dict[str, CutRegion] = {}
    mixtures: list[Any] = []
    strange: dict[str, str] = {}
    for name, module in modules.items():
        if isinstance(module, QuantisedExperts):
            continue  # one of the matrices of a mixture
        if _style(whole, name) == SPREAD or _style(styles, name) == MIXTURE:
            mixtures.append(module)
            if not spreads:
                told = {part: _style(styles, f"{name}.{part}") for part in INSIDE}
                strange |= {part: str(style) for part, style in told.items() if style != INSIDE[part]}
        elif style := _of_latents(modules, name) or _style(styles, name):
            parent, _, leaf = name.rpartition(".")
            region = regions.setdefault(parent, CutRegion(name=parent, module=modules[parent]))
            if style == COLUMNS:
                region.columns.append(module)
            elif style == ROWS:
                region.rows.append(module)
            elif style == SHARED:
                region.shared.append(module)
            elif style == WHOLE:
                region.whole.append(module)
            else:
                strange[leaf] = style
    return CutPlan(
        family=str(config.model_type),
        regions=list(regions.values()),
        mixtures=mixtures,
        spreads=spreads,
        strange=strange,
    )


def _of_latents(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The style of a part of an attention that makes its keys of latents."""
    parent, _, leaf = name.rpartition(".")
    return LATENTS.get(leaf) if parent in modules and makes_of_latents(modules[parent]) else None


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """What a plan says about a name; a star in it stands for one part."""
    parts = name.split(".")
    for pattern, style in plan.items():
        told = pattern.split(".")
        if len(told) == len(parts) and all(one in ("*", other) for one, other in zip(told, parts, strict=True)):
            return style
    return None


def _has_weights(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _divides(tensor: int, size: int, what: str) -> bool:
    """Whether processes can share so many of something: each has equally many, or each key-value head equally many of
    them."""
    return size % tensor == 0 or (what == KEYS and tensor % size == 0)


def _inner(module: Any) -> int:
    width: int = base_of(module).down_proj.shape[-1]
    return width
