"""A model whose parameters, gradients and optimizer are spread over the processes of one cell, in lockstep (FSDP2).

It is a policy or a critic; what is only asked is cut likewise (`sliced_scorer`).

Every process holds a slice of each parameter, in the wide type. A layer's weights are gathered, in the type that the
model computes in, when it runs, and given back after it; gradients are summed and cut into slices again. All processes
of a cell get the same pieces in the same order and share their rows; one without a row of its own computes one that
counts for nothing, because each must take part in every gathering. Where a cell cuts matrices or spreads experts too
(`models.tensor_parallel`), those that share matrices compute the same rows, and what is sharded is what a process has.
What a process accumulates, reduces over cells and updates are plain tensors: its slices.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from stretto.algorithms.base import Algorithm, TokenStreams
from stretto.errors import RecipeError, StrettoError, TrainingError
from stretto.models import attention
from stretto.models.cut_collectives import add_up
from stretto.models.load import Policy
from stretto.models.logprob_head import accum_dtype
from stretto.models.memory import OutOfMemory, memory_errors
from stretto.models.tensor_parallel import copies_made_equal, cut_network
from stretto.models.unpacked import is_apart
from stretto.models.value_model import ValueModel
from stretto.training.accumulators import square_sum
from stretto.training.optimizer import MasterAdamW, Places, wide_master
from stretto.training.packing import MicroBatch, divide
from stretto.training.parallel.mesh import CellMesh, counted_once, place_of, shard_experts, whole_of, widen
from stretto.training.rows import Numbers, asked, in_order
from stretto.training.trainer import Trainer
from stretto.types import Conversation, Sample, Weights


class GatheredForward(nn.Module):
    """The whole way from a row of tokens to log-probabilities as one module: what is gathered stays until its end.

    The head is used past the network's own forward, and may share its weight with the embedding.
    """

    def __init__(self, policy: Policy | ValueModel, temperature: float) -> None:
        super().__init__()
        # What a critic may still have of a language model's head says nothing, and is not cut.
        asked = [policy.network.get_decoder(), policy.scalar] if isinstance(policy, ValueModel) else [policy.network]
        self.parts = nn.ModuleList(asked)
        self.policy, self.temperature = policy, temperature

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: attention.AttentionLayout,
        sources: Tensor,
        targets: Tensor,
        kept: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a row's trained tokens."""
        hidden = self.policy.hidden(tokens, positions, layout, experts=experts)
        return self.policy.read(hidden[sources], targets, temperature=self.temperature, kept=kept)


def on_the_same_tensors(policy: Policy) -> Policy:
    """A second policy, for slices that are made layer by layer: what of it is not cut yet takes no memory."""
    network = policy.network
    shared: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach(), requires_grad=weight.requires_grad) for weight in network.parameters()
    }
    return copy.deepcopy(policy, shared | {id(policy.tokenizer): policy.tokenizer})


class SlicedModel:
    """A model in slices as one process has it: whatever is computed with it goes through one module."""

    def __init__(self, whole: nn.Module, network: PreTrainedModel, mesh: CellMesh, *heads: nn.Linear) -> None:
        """Takes a model that every process has loaded alike: `whole` is all of it, `network` has its layers, `heads`
        may compute in another type. What it had in full is freed."""
        if is_apart(network):  # processes gather a layer together, and would not compute equally many conversations
            raise RecipeError.of(
                "placement",
                "a model that cannot be given packed rows cannot be cut over several devices",
                "train an adapter, or give each of its cells one device",
            )
        self.rows, self.mesh = whole, mesh
        self.rank, self.size = mesh.shards.get_local_rank(), mesh.shards.size()
        self.layout = cut_network(network, tensor=mesh.tensor, experts=mesh.experts)
        computes = network.dtype
        shard_experts(self.layout, mesh, computes=computes, wide=accum_dtype(computes))
        pieces = [(layer, computes) for layer in layers(network)] + [(head, head.weight.dtype) for head in heads]
        for module, dtype in (*pieces, (whole, computes)):
            wide = accum_dtype(dtype)
            widen(module, wide)  # one by one: all of it need never be there wide
            fully_shard(module, mesh=mesh.shards, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide))
        for part in self._gathered():
            # Sums, never means: what they are divided by is known at the end of the step.
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)

    def tensors(self) -> Iterator[Tensor]:
        """This process's part of everything, trained or not."""
        return (local(weight.detach()) for weight in self.rows.parameters())

    def each_row(self, rows: Sequence[Sequence[Sample]], do: Callable[..., None]) -> None:
        """Does something with this process's share of some rows; those that have one less take part in the last one."""
        mine = deque(rows[self.rank :: self.size])
        try:
            with memory_errors():  # whatever finds none: a layer's gathering, too
                for _ in range(-(-len(rows) // self.size)):
                    counts = bool(mine)
                    do(mine.popleft() if counts else min(rows, key=_tokens), counts=counts)
        except OutOfMemory as error:
            self._forget_row()
            raise TrainingError(
                f"process {self.rank} of a cell of {self.size} has too little memory for its rows; lower "
                "batch.token_budget"
            ) from error

    def _forget_row(self) -> None:
        """Takes away what a row that failed half-way has left behind, or the next would add to its gradients: FSDP2
        begins anew, with no layer gathered."""
        for weight in self.rows.parameters():  # of a layer that is gathered still, its own
            weight.grad = None
        if not isinstance(self.rows, FSDPModule) or not hasattr(self.rows, "reset_iter_state"):
            raise StrettoError("a row found no memory, and slices go on from that with torch 2.13 or newer; update it")
        with suppress(AttributeError):  # what it has only from its first forward on
            self.rows.reset_iter_state()

    def ask(
        self,
        conversations: Sequence[Conversation],
        *,
        budget: int,
        numbers: Callable[[Sequence[Sample]], Sequence[Numbers]],
    ) -> list[Numbers]:
        """The numbers of each conversation: every process computes those of its rows, then all of them know all."""
        found: dict[int, Numbers] = {}

        def note(row: Sequence[Sample], *, counts: bool) -> None:
            told = numbers(row)
            if counts:
                found.update({sample.key[3]: mine for sample, mine in zip(row, told, strict=True)})

        with torch.no_grad():
            self.each_row(divide(asked(conversations), budget), note)
        for module in self._gathered():
            module.reshard()  # what no backward follows would outlive the next update
        everywhere: list[Any] = [None] * self.size
        dist.all_gather_object(everywhere, found, group=self.mesh.shards.get_group())
        return in_order({index: mine for one in everywhere for index, mine in one.items()}, len(conversations))

    def _gathered(self) -> Iterator[FSDPModule]:
        """What is gathered one after the other."""
        return (module for module in self.rows.modules() if isinstance(module, FSDPModule))


class Shards(SlicedModel):
    """A policy or a critic that is trained, cut into the slices of a cell's processes."""

    def __init__(
        self, policy: Policy | ValueModel, mesh: CellMesh, *, temperature: float, serving: Policy | None = None
    ) -> None:
        """`serving` is a full copy, which gets the weights under every new version."""
        self.policy, self.serving = policy, serving
        self.computes = {name: weight.dtype for name, weight in policy.trained().items()}
        heads = [policy.scalar] if isinstance(policy, ValueModel) else []
        super().__init__(GatheredForward(policy, temperature), policy.network, mesh, *heads)
        self.trained = policy.trained()

    def slices(self) -> dict[str, nn.Parameter]:
        """This process's part of every trained parameter, in the memory where it is."""
        return {name: nn.Parameter(local(weight.detach())) for name, weight in self.trained.items()}

    def places(self) -> Places:
        """Where the slices lie in their parameters."""
        found = {}
        for name, weight in self.trained.items():
            assert isinstance(weight, DTensor)
            found[name] = place_of(name, weight, self.layout)
        return found

    def cut(self, name: str, full: Tensor) -> Tensor:
        """This process's part of a tensor that has the rows of parameter `name`."""
        like = self._like(name)
        mine = self.layout.part(name, full).to(like.device)
        return local(distribute_tensor(mine, like.device_mesh, like.placements, src_data_rank=None)).clone()

    def cut_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This process's part of the state of one device's optimizer."""
        masters, moments = state["masters"], state["moments"]
        return {
            **state,
            "masters": {name: self.cut(name, wide_master(masters[name])) for name in masters},
            "moments": {
                name: {
                    key: self.cut(name, value) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in moments[name].items()  # those of a parameter have its rows; there are numbers too
                }
                for name in moments
            },
        }

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The tensor that the parts of all processes make; all of them ask together."""
        like = self._like(name)
        spread = DTensor.from_local(
            part.to(like.device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return whole_of(name, spread.full_tensor(), self.layout, self.mesh)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """One trained parameter after the other, in full and in the type that the model computes in; all processes ask
        together."""
        return ((name, self.gather(name)) for name in self.trained)

    def gather(self, name: str) -> Tensor:
        """One of them."""
        return self.whole(name, local(self.trained[name].detach()).to(self.computes[name]))

    def serve(self) -> None:
        """Brings the full copy up to date, if there is one; all processes ask together."""
        if self.serving is None:
            return
        served = self.serving.trained()
        for name, full in self.gathered():
            if name in served:
                served[name].data.copy_(full)

    def _like(self, name: str) -> DTensor:
        weight = self.trained[name]
        assert isinstance(weight, DTensor)
        return weight

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of what every process of the cell has."""
        dist.all_reduce(tensor, group=self.mesh.shards.get_group())
        return add_up(tensor, self.mesh.tensor)


def layers(network: PreTrainedModel) -> list[nn.Module]:
    """The blocks that are gathered one by one: a decoder's own list of them, not one of experts within a layer."""
    return next((list(each) for each in network.get_decoder().children() if isinstance(each, nn.ModuleList)), [])


def local(tensor: Tensor) -> Tensor:
    """A process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedTrainer(Trainer):
    """The trainer of one process of a cell; each holds and updates its slices."""

    in_lockstep = True

    def __init__(self, shards: Shards, algorithm: Algorithm, optimizer: MasterAdamW | None, **settings: Any) -> None:
        """Settings are those of the trainer of one device."""
        self.shards = shards
        # It asks of a critic what both have.
        super().__init__(shards.policy, algorithm, optimizer, **settings)  # type: ignore[arg-type]
        self.trained = shards.slices()

    def weights(self) -> Weights:
        """As the full copy has them, if there is one; all processes ask together."""
        self.shards.serve()
        return super().weights()

    def score(
        self, conversations: Sequence[Conversation], *, reference: Policy | None = None, without_adapter: bool = False
    ) -> list[Numbers]:
        """What is trained is asked by all processes together; another model by each on its own."""
        if without_adapter or (reference is not None and reference is not self.policy):
            return super().score(conversations, reference=reference, without_adapter=without_adapter)
        return self.shards.ask(conversations, budget=self.token_budget, numbers=partial(self._numbers, self.policy))

    def _halves(self, piece: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        """What a process asks alone is cut for it alone: rows of the cell are divided alike by all."""
        before = self.token_budget
        parts = super()._halves(piece)
        self.token_budget = before
        return parts

    def _accumulate(self, samples: Sequence[Sample]) -> None:
        """Every process takes its rows of the piece."""
        self.shards.each_row(self.rows_of(samples), self._row)

    def _row(self, samples: Sequence[Sample], *, counts: bool) -> None:
        begun = time.perf_counter()
        batch = self._pack(samples, self.policy)
        logprobs, entropy, rows = self._forward(batch, self.policy)
        losses = self._losses(logprobs, rows)
        self._backward(losses if counts else {kind: 0 * loss for kind, loss in losses.items()})
        if counts and self.shards.mesh.leads:
            self.meter.count(batch, logprobs.detach(), entropy, losses)
            self.meter.time(batch, time.perf_counter() - begun)

    def _forward(self, batch: MicroBatch, policy: Policy) -> tuple[Tensor, Tensor, TokenStreams]:
        """Through the slices, unless it is another model that is asked, which every process has in full."""
        if policy is not self.policy:
            return super()._forward(batch, policy)
        logprobs, entropy = self.shards.rows(
            batch.tokens, batch.positions, batch.layout, batch.sources, batch.targets, batch.kept, batch.experts
        )
        return logprobs, entropy, batch.rows

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        """What is left of a gradient after it was summed over the processes is this one's slice."""

        def collect(weight: Tensor) -> None:
            assert weight.grad is not None
            gradient, weight.grad = local(weight.grad), None
            self._add(name, gradient)

        return collect

    def _mean_gradients(self) -> dict[str, Tensor]:
        """Complete for what this process has."""
        gradients = super()._mean_gradients()
        copies_made_equal(gradients, self.shards.layout)
        return gradients

    def _squares(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Over all slices."""
        return self.shards.add(square_sum(counted_once(gradients, self.shards.layout), self.policy.device))


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.conversation.tokens) for sample in samples)
