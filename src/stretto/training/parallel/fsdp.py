"""A model whose parameters, gradients and optimizer are spread over the processes of one cell, in lockstep (FSDP2).

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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # its stubs forget it
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from stretto.algorithms.base import Algorithm, TokenStreams
from stretto.errors import RecipeError, TrainingError
from stretto.models import attention
from stretto.models.load import Policy
from stretto.models.logprob_head import accum_dtype
from stretto.models.memory import OutOfMemory
from stretto.models.tensor_parallel import copies_made_equal, cut_network
from stretto.training.optimizer import MasterAdamW, Places, wide_master
from stretto.training.packing import MicroBatch
from stretto.training.parallel.mesh import CellMesh, counted_once, mesh_of, place_of, shard_experts, whole_of, widen
from stretto.training.rows import Numbers, asked, in_order
from stretto.training.trainer import Trainer
from stretto.types import Conversation, Sample, Weights


def join(
    store: Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    seconds: float,
    degrees: Mapping[str, int] | None = None,
) -> CellMesh:
    """Meets the other processes of a cell, whose mesh has these degrees; they are this process's default group from
    then on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    return mesh_of(device, size, degrees or {})


def leave() -> None:
    """Parts from them."""
    dist.destroy_process_group()


class GatheredForward(nn.Module):
    """The whole way from a row of tokens to log-probabilities as one module: what is gathered stays until its end.

    The head is used past the network's own forward, and may share its weight with the embedding.
    """

    def __init__(self, policy: Policy, temperature: float) -> None:
        super().__init__()
        self.network = policy.network
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


class Shards:
    """A policy cut into the slices of a cell's processes."""

    def __init__(self, policy: Policy, mesh: CellMesh, *, temperature: float, serving: Policy | None = None) -> None:
        """Takes a policy that every process has loaded alike; what it had in full is freed.

        `serving` is a full copy, which gets the weights under every new version.
        """
        if policy.apart:  # processes gather a layer together, and would not compute equally many conversations
            raise RecipeError.of(
                "placement",
                "a model that cannot be given packed rows cannot be cut over several devices",
                "train an adapter, or give each train cell one device",
            )
        self.policy, self.mesh, self.computes, self.serving = policy, mesh, policy.dtype, serving
        self.rank, self.size = mesh.shards.get_local_rank(), mesh.shards.size()
        self.model = cut_network(policy.network, tensor=mesh.tensor, experts=mesh.experts)
        self.rows, wide = GatheredForward(policy, temperature), accum_dtype(self.computes)
        shard_experts(self.model, mesh, computes=self.computes, wide=wide)
        for part in (*layers(policy.network), self.rows):
            widen(part, wide)  # one by one: all of it need never be there wide
            types = MixedPrecisionPolicy(param_dtype=self.computes, reduce_dtype=wide)
            fully_shard(part, mesh=mesh.shards, mp_policy=types)
        for module in self.rows.modules():
            if isinstance(module, FSDPModule):
                # Sums, never means: what they are divided by is known at the end of the step.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def slices(self) -> dict[str, nn.Parameter]:
        """This process's part of every trained parameter, in the memory where it is."""
        return {name: nn.Parameter(local(weight.detach())) for name, weight in self.policy.trained().items()}

    def tensors(self) -> Iterator[Tensor]:
        """This process's part of everything, trained or not."""
        return (local(weight.detach()) for weight in self.rows.parameters())

    def places(self) -> Places:
        """Where the slices lie in their parameters."""
        found = {}
        for name, weight in self.policy.trained().items():
            assert isinstance(weight, DTensor)
            found[name] = place_of(name, weight, self.model, self.mesh)
        return found

    def cut(self, name: str, full: Tensor) -> Tensor:
        """This process's part of a tensor that has the rows of parameter `name`."""
        like, cut = self._like(name), self.model.cuts.get(name)
        mine = (full if cut is None else cut.part(full)).to(like.device)
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
        return whole_of(name, spread.full_tensor(), self.model, self.mesh)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """One trained parameter after the other, in full and in the type that the model computes in; all processes ask
        together."""
        for name, part in self.slices().items():
            yield name, self.whole(name, part.detach()).to(self.computes)

    def serve(self) -> None:
        """Brings the full copy up to date; all processes ask together."""
        served = self.serving.trained() if self.serving is not None else {}
        for name, full in self.gathered():
            if name in served:
                served[name].data.copy_(full)

    def forget(self) -> None:
        """Gives back what is gathered, after forwards that no backward follows: it would outlive the next update."""
        for module in self.rows.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def told(self, found: Mapping[int, Numbers]) -> dict[int, Numbers]:
        """What all processes of the cell have found; all of them ask together."""
        everywhere: list[Any] = [None] * self.size
        dist.all_gather_object(everywhere, dict(found), group=self.mesh.shards.get_group())
        return {index: numbers for one in everywhere for index, numbers in one.items()}

    def _like(self, name: str) -> DTensor:
        weight = self.policy.network.get_parameter(name)
        assert isinstance(weight, DTensor)
        return weight

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of what every process of the cell has."""
        dist.all_reduce(tensor)
        return tensor


def layers(network: PreTrainedModel) -> list[nn.Module]:
    """The blocks that are gathered one by one: a decoder's own list of them, not one of experts within a layer."""
    return next((list(each) for each in network.get_decoder().children() if isinstance(each, nn.ModuleList)), [])


def local(tensor: Tensor) -> Tensor:
    """A process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedTrainer(Trainer):
    """The trainer of one process of a cell; each holds and updates its slices."""

    in_lockstep = True

    def __init__(
        self,
        shards: Shards,
        algorithm: Algorithm,
        optimizer: MasterAdamW | None,
        reference: Shards | None = None,
        **settings: Any,
    ) -> None:
        """`reference` is another model that the same processes have slices of."""
        self.shards, self.reference = shards, reference
        super().__init__(shards.policy, algorithm, optimizer, **settings)
        self.trained = shards.slices()

    def weights(self) -> Weights:
        """As the full copy has them, if there is one; all processes ask together."""
        self.shards.serve()
        return super().weights()

    def score(
        self, conversations: Sequence[Conversation], *, reference: Policy | None = None, without_adapter: bool = False
    ) -> list[Numbers]:
        """What is cut is asked by all processes together, each about its rows; then every one of them knows all.

        Another model is asked by each on its own.
        """
        scorer = reference or self.policy
        shards = self._slices_of(scorer)
        if shards is None or without_adapter:
            return super().score(conversations, reference=reference, without_adapter=without_adapter)
        found: dict[int, Numbers] = {}

        def ask(row: Sequence[Sample], *, counts: bool) -> None:
            numbers = self._numbers(scorer, row)
            if counts:
                found.update({sample.key[3]: mine for sample, mine in zip(row, numbers, strict=True)})

        with torch.no_grad():
            self._each_row(asked(conversations), ask)
        shards.forget()
        return in_order(shards.told(found), len(conversations))

    def _slices_of(self, policy: Policy) -> Shards | None:
        """The slices of a model, if it is cut."""
        return next((each for each in (self.shards, self.reference) if each and each.policy is policy), None)

    def _accumulate(self, samples: Sequence[Sample]) -> None:
        """Every process takes its rows of the piece."""
        self._each_row(samples, self._row)

    def _each_row(self, samples: Sequence[Sample], do: Callable[..., None]) -> None:
        """Does something with this process's rows of a piece; those that have one less take part in the last one."""
        rows, rank, size = self.rows_of(samples), self.shards.rank, self.shards.size
        mine = deque(rows[rank::size])
        try:
            for _ in range(-(-len(rows) // size)):
                counts = bool(mine)
                do(mine.popleft() if counts else min(rows, key=_tokens), counts=counts)
        except OutOfMemory as error:
            raise TrainingError(
                f"process {rank} of a cell of {size} has too little memory for its rows; lower batch.token_budget"
            ) from error

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
        shards = self._slices_of(policy)
        if shards is None:
            return super()._forward(batch, policy)
        logprobs, entropy = shards.rows(
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
        copies_made_equal(gradients, self.shards.model)
        return gradients

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The gradient norm over all slices."""
        total = next(iter(gradients.values())).new_zeros(())
        for gradient in counted_once(gradients, self.shards.model, self.shards.mesh):
            total += gradient.square().sum()
        return float(self.shards.add(total).sqrt())


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.conversation.tokens) for sample in samples)
