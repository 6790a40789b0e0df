"""The processes of one training cell as a grid: which of them compute the same rows, and which share parameters.

Neighbors share matrices, because they are closest to each other; processes with other rows come after them. Experts
are spread over neighbors, and beyond them over processes with other rows. Everything is sharded over processes with
other rows that hold the same part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # its stubs forget it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stretto.models.cut_collectives import ALONE, Ranks
from stretto.models.tensor_parallel import CutModel
from stretto.training.optimizer import Place

AXIS, TENSOR, OUTER, EXPERTS = "dp_shard", "tp", "dp_outer", "ep"
"""Axes: the two that a plan's mesh has, and the two that spread experts make of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellMesh:
    """One process's place in the grid."""

    shards: DeviceMesh
    """Processes with other rows and the same parts of matrices; parameters are sharded over them."""
    tensor: Ranks = ALONE
    """Processes with the same rows, which share matrices."""
    experts: Ranks | None = None
    """Processes with other rows over which experts are spread too; none if experts are cut like other matrices."""
    outer: DeviceMesh | None = None
    """Processes with other rows and the same experts, where those of `shards` have others."""

    @property
    def leads(self) -> bool:
        """True for one of those that compute the same rows: it counts them for all."""
        return self.tensor.rank == 0


def join(store: Store, *, rank: int, size: int, device: torch.device, seconds: float) -> None:
    """Meets the other processes of cells; they are this process's default group from then on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def mesh_over(ranks: Sequence[int], *, device: torch.device, seconds: float) -> CellMesh | None:
    """The mesh of slices of some of those who have met, which all of them make together; none for who is not among
    them."""
    if len(ranks) == dist.get_world_size():
        return mesh_of(device, len(ranks), {})
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))
    if dist.get_rank() not in ranks:
        return None
    return CellMesh(shards=DeviceMesh.from_group(group, device.type, mesh_dim_names=(AXIS,)))


def leave() -> None:
    """Parts from them."""
    dist.destroy_process_group()


def mesh_of(device: torch.device, size: int, degrees: Mapping[str, int]) -> CellMesh:
    """The grid that a mesh of these degrees makes of so many processes, which have met."""
    tensor, spread = degrees.get(TENSOR, 1), degrees.get(EXPERTS, 1)
    grid = init_device_mesh(device.type, (size // tensor, tensor), mesh_dim_names=(AXIS, TENSOR))
    outer, experts = None, None if spread == 1 else ALONE
    if spread > tensor:
        sizes, names = (size // spread, spread // tensor, tensor), (OUTER, EXPERTS, TENSOR)
        finer = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        outer, experts = finer[OUTER], ranks_of(finer[EXPERTS])
    return CellMesh(shards=grid[AXIS], tensor=ranks_of(grid[TENSOR]), experts=experts, outer=outer)


def ranks_of(axis: DeviceMesh) -> Ranks:
    """The processes along one axis."""
    return Ranks(axis.get_local_rank(), axis.size(), axis.get_group()) if axis.size() > 1 else ALONE


def shard_experts(model: CutModel, mesh: CellMesh, *, computes: torch.dtype, wide: torch.dtype) -> None:
    """Shards experts that lie with processes of other rows over those that have the same ones."""
    # Shares of experts keep the type that their router gave them.
    types = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=wide, cast_forward_inputs=False)
    for experts in model.apart:
        assert mesh.outer is not None
        widen(experts, wide)
        fully_shard(experts, mesh=mesh.outer, mp_policy=types)


def place_of(name: str, weight: DTensor, model: CutModel) -> Place:
    """Where this process's slice of a parameter lies in it."""
    over, cut, shape = weight.device_mesh, model.cuts.get(name), list(weight.shape)
    first = min(over.get_local_rank() * -(-len(weight) // over.size()), len(weight))
    if cut is not None:
        shape[cut.dim] *= cut.size
    return Place(shape=torch.Size(shape), cut=cut, first=first, told=model.counts(name))


def whole_of(name: str, part: Tensor, model: CutModel, mesh: CellMesh) -> Tensor:
    """A parameter of the parts of it that processes have; all of them ask together."""
    cut = model.cuts.get(name)
    if cut is None:
        return part
    parts = _everybodys([part], mesh.tensor)[:: model.copies(name)]
    if cut.size > len(parts) and mesh.experts is not None:
        parts = _everybodys(parts, mesh.experts)
    return cut.whole(parts)


def _everybodys(parts: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """The parts of one process after those of the other."""
    if ranks.size == 1:
        return parts
    mine = torch.stack(parts)
    found = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(found, mine, group=ranks.group)
    return [part for each in found for part in each]


def counted_once(gradients: Mapping[str, Tensor], model: CutModel) -> list[Tensor]:
    """Those of this process that no other has counted."""
    return [gradient for name, gradient in gradients.items() if model.counts(name)]


def widen(module: nn.Module, dtype: torch.dtype) -> None:
    """Makes what is trained as wide as its masters, which slices are themselves; what is frozen stays as it is."""
    for weight in module.parameters():
        if weight.requires_grad and not isinstance(weight, DTensor):
            weight.data = weight.data.to(dtype)
