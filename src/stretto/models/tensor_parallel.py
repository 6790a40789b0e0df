"""A model cut over several processes: each has a part of every large matrix, and some of the experts.

How a family is cut is its own plan in transformers (`base_model_tp_plan`, `base_model_ep_plan`): some layers by their
outputs, those that read these by their inputs, experts inside or as a whole. What a process then has are ordinary
modules, only smaller: fewer heads, a narrower feed-forward layer, fewer experts. Their parameters keep their names and
are plain tensors. The processes talk in two places (Shoeybi et al. 2019): what enters a cut region goes in as it is,
and its gradient is the sum of everybody's; what leaves it is the sum of everybody's part, and the gradient goes back
as it is. Embedding, head, norms and routers are not cut. An adapter is cut like the layer that it is on. A key-value
head that several processes have queries for is in full with each of them, and each has a share of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.errors import Problem, RecipeError
from stretto.models.cut_collectives import (
    ALONE,
    Ranks,
    add_up,
    enter,
    gather_rows,
    keep_rows,
    leave,
    rows_of_each,
    with_gradient,
)
from stretto.models.cut_plan import CutPlan, cut_plan
from stretto.models.latent_attention import LatentAttention, keep_latents
from stretto.models.lora import adapters_of, base_of
from stretto.models.parameter_cut import ParameterCut
from stretto.models.quantised import QuantisedExperts, QuantisedLinear
from stretto.models.quantised_parts import keep_part


@dataclass(slots=True, kw_only=True)
class CutModel:
    """How a network was cut."""

    tensor: Ranks
    """Processes that share its matrices; all of them compute the same rows."""
    experts: Ranks | None
    """Processes with other rows over which experts are spread besides; none if experts are cut inside."""
    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    """Parameter -> the part of it that is here; what is not named is here in full."""
    stored: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """What of a matrix in few bits -> its bytes to those that are here."""
    partial: set[str] = field(default_factory=set)
    """Parameters that are here in full and whose gradients are only a share: the sum over `tensor` is the gradient."""
    apart: list[nn.Module] = field(default_factory=list)
    """Modules of experts that lie with processes of other rows."""
    heads: int = 1
    """What the model's number of key-value heads is divided by here: 1 where a family's attention is not cut."""

    @property
    def spread(self) -> frozenset[str]:
        """Parameters of experts that lie with processes of other rows."""
        return frozenset(name for name, cut in self.cuts.items() if self.apart and cut.size > self.tensor.size)

    def part(self, name: str, full: Tensor) -> Tensor:
        """What is here of a parameter."""
        if name in self.stored:
            return self.stored[name](full)
        return self.cuts[name].part(full) if name in self.cuts else full

    def copies(self, name: str) -> int:
        """How many processes of `tensor`, one after the other, have the same part of a parameter."""
        return max(1, self.tensor.size // self.cuts[name].size) if name in self.cuts else self.tensor.size

    def counts(self, name: str) -> bool:
        """Whether this process speaks for all who have this part."""
        return self.tensor.rank % self.copies(name) == 0


def cut_network(network: PreTrainedModel, *, tensor: Ranks = ALONE, experts: Ranks | None = None) -> CutModel:
    """Keeps this process's part of every layer that is cut, in place, and lets the layers talk.

    Experts are cut inside, over `tensor`. If `experts` are given, whole experts are spread over these and `tensor`
    together; they have other rows than this process, and give theirs to whoever has an expert. RecipeError if the model
    cannot be cut so (`cut_problems`); nothing has changed then.
    """
    if problems := cut_problems(network, tensor=tensor.size, experts=None if experts is None else experts.size):
        raise RecipeError(*problems)
    found = CutModel(tensor=tensor, experts=experts)
    if tensor.size > 1 or experts is not None:
        _Cutting(network, found).run()
    return found


def cut_problems(network: PreTrainedModel, *, tensor: int = 1, experts: int | None = None) -> list[Problem]:
    """Why a network cannot be cut over so many processes; one without weights will do.

    `experts` is how many processes with other rows experts are spread over besides, if they are spread.
    """
    if tensor == 1 and experts is None:
        return []
    plan = cut_plan(network, spreads=experts is not None)
    return [*plan.unknown(tensor), *plan.indivisible(tensor, tensor * (experts or 1)), *plan.unsupported(tensor)]


class _Cutting:
    """One network on its way."""

    def __init__(self, network: PreTrainedModel, found: CutModel) -> None:
        self.found, self.tensor, self.experts = found, found.tensor, found.experts
        self.plan: CutPlan = cut_plan(network, spreads=found.experts is not None)
        self.names = {id(weight): name for name, weight in network.named_parameters()}
        keep_latents(network)

    def run(self) -> None:
        """Layer by layer: all of it need never be there twice."""
        if self.tensor.size > 1:
            self.found.heads = self.plan.cached(self.tensor.size)  # while layers are whole
            for region in self.plan.regions:
                entrance = _Entrance(self.tensor)
                for layer, parts in region.parts(self.tensor.size):
                    self._linear(layer, self._own(0, parts=parts))
                    layer.register_forward_pre_hook(entrance.of)
                for layer in region.rows:
                    self._linear(layer, self._own(1))
                    layer.register_forward_hook(partial(_leaving, self.tensor))
                for layer in region.shared:
                    self.found.partial |= {self.names[id(weight)] for weight in layer.parameters()}
                region.module.register_forward_hook(entrance.forget)
                if isinstance(region.module, LatentAttention):
                    region.module.ranks = self.tensor
        for module in self.plan.mixtures:
            if self.experts is not None:
                self._spread(module, self.experts)
            elif self.tensor.size > 1:
                self._narrow(module)

    def _own(self, dim: int, *, blocks: int = 1, parts: int | None = None) -> ParameterCut:
        """This process's part along a dimension of a matrix, of so many: neighbors have the same if these are fewer
        than the processes."""
        size = self.tensor.size if parts is None else parts
        return ParameterCut(dim=dim, blocks=blocks, rank=self.tensor.rank * size // self.tensor.size, size=size)

    def _linear(self, layer: Any, cut: ParameterCut) -> None:
        """A linear layer, and adapters on it, by its outputs or its inputs."""
        base = base_of(layer)
        self._keep(base, cut)
        for each in adapters_of(layer):
            self._adapt(each, cut)
            each.in_features, each.out_features = base.in_features, base.out_features

    def _adapt(self, layer: Any, cut: ParameterCut) -> None:
        """An adapter by its outputs or its inputs: one of its two matrices is cut, and the other in full everywhere."""
        for down, up in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
            self._keep(down if cut.dim else up, cut)
            self.found.partial.add(self.names[id((up if cut.dim else down).weight)])

    def _keep(self, layer: Any, cut: ParameterCut) -> None:
        """This process's outputs or inputs of a linear layer."""
        name = "in_features" if cut.dim else "out_features"
        self._matrix(layer if isinstance(layer, QuantisedLinear) else layer.weight, cut)
        if layer.bias is not None and cut.dim == 0:
            self._cut(layer.bias, cut)
        setattr(layer, name, getattr(layer, name) // cut.size)

    def _matrix(self, held: Any, cut: ParameterCut) -> None:
        """A matrix, or those of all experts one after the other, in full or in few bits."""
        if isinstance(held, QuantisedLinear | QuantisedExperts):
            names = {leaf: self.names[id(weight)] for leaf, weight in held.named_parameters() if leaf != "bias"}
            self.found.stored |= {names[leaf]: part for leaf, part in keep_part(held, cut).items()}
        else:
            self._cut(held, replace(cut, dim=cut.dim + held.dim() - 2))

    def _narrow(self, module: Any) -> None:
        """Every expert by its inner width."""
        base, opening, closing = base_of(module), self._own(0, blocks=2), self._own(1)
        self._matrix(base.gate_up_proj, opening)
        self._matrix(base.down_proj, closing)
        for each in adapters_of(module):
            self._adapt(each, opening if each.parameter_name == "gate_up_proj" else closing)
        module.register_forward_pre_hook(partial(_entering_experts, self.tensor))
        module.register_forward_hook(partial(_leaving, self.tensor))

    def _spread(self, module: Any, others: Ranks) -> None:
        """Some experts as a whole, with the shares of adapters that are theirs."""
        base, every = base_of(module), others.size * self.tensor.size
        rank, count = others.rank * self.tensor.size + self.tensor.rank, base.num_experts // every
        for weight in base.parameters():
            self._cut(weight, ParameterCut(dim=0, rank=rank, size=every))
        for each in adapters_of(module):
            for down, up in zip(each.lora_A.values(), each.lora_B.values(), strict=True):
                ranks = down.out_features // each.num_experts  # (experts, ranks, in), and (out, ranks, experts)
                self._cut(down.weight, ParameterCut(dim=0, rank=rank, size=every))
                self._cut(up.weight, ParameterCut(dim=1, blocks=ranks, rank=rank, size=every))
                down.out_features = up.in_features = ranks * count
            each.num_experts = count
        base.num_experts, base._is_expert_parallel = count, True  # the number after the last one stands for any other
        self.found.apart += [module] if others.size > 1 else []
        dispatch = _Dispatch(self.tensor, others, first=rank * count, count=count)
        module.register_forward_pre_hook(dispatch.send)
        module.register_forward_hook(dispatch.take)

    def _cut(self, weight: nn.Parameter, cut: ParameterCut) -> None:
        weight.data = cut.part(weight.detach()).clone(memory_format=torch.contiguous_format)
        self.found.cuts[self.names[id(weight)]] = cut


class _Entrance:
    """Where states enter a region: layers that read the same ones share their entrance, and so one sum of gradients."""

    def __init__(self, tensor: Ranks) -> None:
        self.tensor = tensor
        self.before: Tensor | None = None
        self.inside: Tensor | None = None

    def of(self, layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """A layer's input."""
        if self.before is not arguments[0] or self.inside is None:
            self.before, self.inside = arguments[0], enter(arguments[0], self.tensor)
        return self.inside, *arguments[1:]

    def forget(self, *ignored: Any) -> None:
        """The region has been left."""
        self.before = self.inside = None


def _leaving(tensor: Ranks, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
    return leave(output, tensor)


def _entering_experts(tensor: Ranks, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    states, chosen, shares = arguments
    return enter(states, tensor), chosen, enter(shares, tensor)


class _Dispatch:
    """Rows on their way to the experts of other processes, and back.

    Every process gets the rows of all and adds what its own experts make of them. That sends more than rows to the
    experts that they chose, but with several choices a token most rows go to most processes anyway.
    """

    def __init__(self, tensor: Ranks, others: Ranks, *, first: int, count: int) -> None:
        self.tensor, self.others, self.first, self.count = tensor, others, first, count
        self.rows: list[int] = []
        self.asked: tuple[Tensor, ...] = ()

    def send(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the experts here are asked: of other experts nothing, with no share."""
        states, chosen, shares = arguments
        self.rows = rows_of_each(states, self.others)
        states, chosen, shares = (gather_rows(each, self.others, self.rows) for each in (states, chosen, shares))
        here = (chosen >= self.first) & (chosen < self.first + self.count)
        shares = torch.where(here, enter(shares, self.tensor), 0)
        self.asked = states, shares = enter(states, self.tensor), shares
        return states, torch.where(here, chosen - self.first, self.count), shares

    def take(self, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        """What all experts have made of this process's rows."""
        asked, self.asked = self.asked, ()
        if torch.is_grad_enabled() and not output.requires_grad:  # nobody chose an expert that is here
            output = with_gradient(output, [each for each in (*asked, *module.parameters()) if each.requires_grad])
        return keep_rows(leave(output, self.tensor), self.others, self.rows)


def copies_made_equal(gradients: Mapping[str, Tensor], cut: CutModel) -> None:
    """Adds up what are shares of a gradient, and lets processes that hold the same parameter agree on its gradient.

    Those that have it in full compute the same but for the order of sums that a device may choose; a parameter that is
    updated from other bits on every process would come apart. Those that have the same key-value head have each a share
    of its gradient.
    """
    if cut.tensor.size == 1:
        return
    for name, gradient in sorted(gradients.items()):  # in one order everywhere
        if name not in cut.cuts:
            add_up(gradient, cut.tensor)
            if name not in cut.partial:
                gradient /= cut.tensor.size
        elif cut.copies(name) > 1:
            part = cut.cuts[name]
            every = gradient.new_zeros(part.size, *gradient.shape)  # small, and needs no group for each head
            every[part.rank] = gradient
            gradient.copy_(add_up(every, cut.tensor)[part.rank])
