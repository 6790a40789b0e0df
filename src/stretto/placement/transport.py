"""By which path tensors pass between devices: a pure function of their names, for what prices a plan and what runs it.

It says nothing of how fast a path is (`placement.cost` prices it) and moves nothing (`workers.process_group` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from stretto.placement.devices import DeviceKind, kind_of
from stretto.placement.plan import Plan


class TensorPath(Enum):
    """How tensors pass between the processes of some devices."""

    SHARED = "shared"
    GLOO = "gloo"
    NCCL = "nccl"
    FILE = "file"
    """To an engine's own process on the same machine."""
    IPC = "ipc"
    """Between processes on one card. No plan of ours has it; published systems have, and are priced."""

    @property
    def sentence(self) -> str:
        """The path in words."""
        return SENTENCES[self]


SENTENCES = {
    TensorPath.SHARED: "the same tensors",
    TensorPath.GLOO: "gloo, through host memory",
    TensorPath.NCCL: "nccl, from card to card",
    TensorPath.FILE: "files in host memory, to the engine's own process",
    TensorPath.IPC: "CUDA IPC, on the same card",
}
"""Each path in words."""


def path_between(devices: Sequence[str], *, nccl: bool = False) -> TensorPath:
    """The path between devices such as "host0/gpu:3", one process each; `nccl` is `placement.nccl` of the recipe.

    NCCL needs cards that are all different. Where only some devices are GPUs, host memory is what all of them reach.
    """
    if len(set(devices)) < 2:
        return TensorPath.SHARED
    if nccl and len(set(devices)) == len(devices) and all(kind_of(each) is DeviceKind.GPU for each in devices):
        return TensorPath.NCCL
    return TensorPath.GLOO


def gradient_path(plan: Plan, *, nccl: bool = False) -> TensorPath:
    """The path by which training cells add up their gradients once per update: shard i with shard i."""
    training = [cell.devices for cell in plan.cells if cell.role == "train"]
    paths = [path_between(devices, nccl=nccl) for devices in zip(*training, strict=True)]
    return paths[0] if paths else TensorPath.SHARED


def weight_path(plan: Plan, *, nccl: bool = False) -> TensorPath:
    """The path by which devices that only generate get the new weights of those that train."""
    return path_between(plan.holders, nccl=nccl)
