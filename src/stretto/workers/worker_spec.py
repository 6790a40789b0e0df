"""What one process of a run is told to be: its device, its roles there, and what it is made from."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stretto.algorithms.base import Algorithm, build
from stretto.placement.devices import DeviceKind, kind_of, number_of
from stretto.placement.plan import SliceMeeting
from stretto.recipe.schema import ApartEngineSection, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """A process's place in a cell of several devices that generates."""

    cell: str
    """The cell."""
    rank: int
    """Which of its processes it is."""
    size: int
    """How many there are."""
    team: int
    """How many of them, one after the other, share every matrix and decode the same requests; the first speaks for
    them."""
    spreads: bool = False
    """Whether each has some of the experts as a whole, and not a part of every one."""
    devices: tuple[str, ...] = ()
    """All of the cell's, in the order of their ranks."""
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES calls them, where whoever starts the processes has picked them."""


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
    slices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Role -> devices of its cell, in roles whose model is cut over several."""
    meeting: SliceMeeting | None = None
    """Whom it meets before anything is cut."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """How the processes of its training cell share the policy: degrees as a plan's cell has them; slices where nothing
    is said."""
    lane: LaneSpec | None = None
    """Its place among processes that generate together; none where it generates by itself, or not at all."""
    memory_share: float | None = None
    """Share of the device's memory for the caches of the native engine, where the plan says one."""
    recomputes: frozenset[str] = frozenset()
    """Roles whose trainer recomputes activations from the first row on, whatever the recipe leaves open."""
    sharers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Role that trains -> devices that share its optimizer, in the order of their parts; none if each has all of it."""
    whitens: bool = False
    """Whether gradients are whitened at the end of a step, instead of credit before it."""
    sleeps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Role -> phases in which it leaves the device's memory to others."""
    run: str | None = None
    """What no other workers were told, by which those of a host find what they share; none in threads of a process."""
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
    def cut(self) -> bool:
        """Whether a model here is cut over several processes, each of which loads it."""
        return bool(self.slices) or self.lane is not None

    def parted(self, role: str) -> bool:
        """Whether what is trained in a role ends with any who train it: each has a slice of it, or a part of its
        optimizer. The same for all of them, who add up alike; what else one of them has slices of changes nothing."""
        return role in self.slices or len(self.sharers.get(role, ())) > 1

    def share(self, role: str) -> tuple[int, int]:
        """Which part of the optimizer of what it trains in a role a device has, of how many: one for each cell."""
        sharers, width = self.sharers.get(role, ()), len(self.slices.get(role, (self.device,)))
        count = max(1, len(sharers) // width)
        return (sharers.index(self.device) if self.device in sharers else 0) % count, count

    @property
    def readers(self) -> frozenset[str]:
        """Roles that read the policy in full: not those that train slices of it, nor a reference that is a copy or a
        teacher, nor an engine that has one, or parts of one."""
        elsewhere = set()
        engine = self.recipe.engine
        if self.lane is not None or (isinstance(engine, ApartEngineSection) and engine.url is None):
            elsewhere.add("generate")  # its weights are its own; beside a server the policy is what it is compared with
        if "train" in self.slices:
            elsewhere.add("train")
        if self.recipe.model.adapter is None or self.recipe.roles.teacher is not None:
            elsewhere.add("reference")
        return self.roles & {"generate", "train", "reference"} - elsewhere

    def device_of(self, role: str) -> torch.device:
        """Where a role's model is loaded: in host memory if it is cut, because all of it may be too much elsewhere."""
        return torch.device("cpu") if role in self.slices else self.torch_device

    @property
    def serving_device(self) -> torch.device:
        """Where the policy lies in full: host memory, if nothing on the device reads it."""
        return self.torch_device if self.readers else torch.device("cpu")


def torch_device(name: str) -> torch.device:
    """What torch calls a device of this process."""
    if kind_of(name) is DeviceKind.CPU:
        return torch.device("cpu")
    # A process that was given one GPU sees it as the first.
    return torch.device("cuda", number_of(name) % torch.cuda.device_count())
