"""What one process of a run is told to be: its device, its roles there, and what it is made from."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stretto.algorithms.base import Algorithm, build
from stretto.recipe.schema import Recipe, VllmEngineSection


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """A process's place in a cell of several devices that generates."""

    cell: str
    """The cell."""
    rank: int
    """Which of its processes it is; the first speaks for all."""
    size: int
    """How many there are."""
    spreads: bool = False
    """Whether each has some of the experts as a whole, and not a part of every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker is made from; plain values, so that it can be sent to another host."""

    recipe: Recipe
    """What is trained."""
    root: Path
    """What the recipe's relative paths count from."""
    folders: tuple[str, ...] = ()
    """Where modules of the user's are looked for."""
    base: Path | None
    """The run's own copy of the base model, if it has one."""
    device: str
    """The plan's name of its device, such as "localhost/cpu:0"."""
    roles: frozenset[str]
    """Roles of the cells on it."""
    token_budget: int
    """Tokens in a forward; running out of memory lowers it."""
    threads: int | None = None
    """Threads of a CPU device; all of the process's if none."""
    mates: int = 1
    """Processes that train one copy of the policy together, itself included."""
    lane: LaneSpec | None = None
    """Its place among processes that generate together; none where it generates by itself, or not at all."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """How they share it: degrees as a plan's cell has them; shards where nothing is said."""
    recompute: bool = False
    """Whether the policy's trainer recomputes activations from the first row on, whatever the recipe leaves open."""
    cuts_reference: bool = False
    """Whether a reference of its own is cut over the processes that train together."""
    sharers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Role that trains -> devices that share its optimizer, in the order of their parts; none if each has all of it."""
    whitens: bool = False
    """Whether gradients are whitened at the end of a step, instead of credit before it."""
    sleeps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Role -> phases in which it leaves the device's memory to others."""
    start_by: float | None = None
    """Unix time until which it has to load, if anybody waits for that."""
    logs: Path | None = None
    """Where what other programs say is kept: the run's folder, if there is one and this host has it."""

    @property
    def where(self) -> str:
        """This worker, for messages about what only it cannot do."""
        return f"the worker of {self.device} on {socket.gethostname()}"

    def algorithm(self) -> Algorithm:
        """What its trainer computes, built where it is used."""
        return build(self.recipe.algorithm, self.folders, where=self.where)

    @property
    def torch_device(self) -> torch.device:
        """The device, as torch calls it."""
        return torch_device(self.device)

    @property
    def parted(self) -> bool:
        """Whether what trains here has a part of the optimizer that nobody else has."""
        return self.mates > 1 or any(len(devices) > 1 for devices in self.sharers.values())

    def part(self, role: str) -> int:
        """Which part of the optimizer a device has that trains in a role."""
        sharers = self.sharers.get(role, ())
        return sharers.index(self.device) if self.device in sharers else 0

    @property
    def readers(self) -> frozenset[str]:
        """Roles that read the policy in full: not those that train slices of it, nor a reference that is a copy or a
        teacher, nor an engine that has one, or parts of one."""
        elsewhere = set()
        if self.lane is not None or isinstance(self.recipe.engine, VllmEngineSection):  # it has weights of its own
            elsewhere.add("generate")
        if self.mates > 1:
            elsewhere.add("train")
        if self.recipe.model.adapter is None or self.recipe.roles.teacher is not None:
            elsewhere.add("reference")
        return self.roles & {"generate", "train", "reference"} - elsewhere

    @property
    def serving_device(self) -> torch.device:
        """Where the policy lies in full: host memory, if nothing on the device reads it."""
        return self.torch_device if self.readers else torch.device("cpu")


def torch_device(name: str) -> torch.device:
    """What torch calls a device of this process."""
    kind, _, number = name.rpartition("/")[2].partition(":")
    # A process that was given one GPU sees it as the first.
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(number) % torch.cuda.device_count())
