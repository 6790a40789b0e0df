"""What a check gets and gives: facts about a machine and a recipe in, one sentence out, with a fix where it fails.

Facts are gathered elsewhere (`machine`), so that most checks are pure functions of them. A check that has nothing to
say about a recipe gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stretto.placement.build import OPEN, hosts_of, named_by_cells, uses_gpu
from stretto.placement.cluster import parse_cluster
from stretto.recipe.schema import Placement, Recipe

GB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of one check."""

    name: str
    """What was looked at, in a word or two."""
    ok: bool
    """True if nothing is wrong."""
    text: str
    """What was found, in one sentence."""
    fix: str | None = None
    """What the user can do; none where nothing is wrong."""
    silent: bool = False
    """True if what is wrong is that somebody did not answer in time, as whoever waits for a deadline would be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    """The GPU's name, as its driver calls it."""
    memory: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts about the machine."""

    cores: int
    """That this process may use: affinity, or a container's share where that is less."""
    shown: int
    """Cores that a library sees, which knows nothing of a container's share."""
    busy: float = 0.0
    """Cores that other programs keep busy."""
    memory: int
    """Bytes that this process may use: all of it, or a container's limit."""
    shared: int | None
    """Free bytes of /dev/shm; none where there is no such place."""
    files: int | None
    """Files that a process may have open; none where that has no limit."""
    address: str | None
    """The host's own address; none if it has only loopback."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs that are visible."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed distribution -> its version."""
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Distribution -> what its metadata asks for."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """What is checked."""

    machine: MachineFacts
    """Where a run would be."""
    recipe: Recipe | None = None
    """What would be run; none for the machine alone."""
    root: Path = Path()
    """The recipe's folder."""

    @property
    def devices(self) -> int:
        """Devices that the recipe uses; without one, the GPUs that there are."""
        if self.recipe is None:
            return max(1, len(self.machine.gpus))
        section = self.recipe.placement
        if section.cells is not None:
            return len(named_by_cells(section))
        return 1 if section.cluster in OPEN else len(parse_cluster(section.cluster))

    @property
    def hosts(self) -> int:
        """Hosts that the recipe uses."""
        return hosts_of(Placement() if self.recipe is None else self.recipe.placement)

    @property
    def uses_gpu(self) -> bool:
        """True if it would run on a GPU."""
        section = Placement() if self.recipe is None else self.recipe.placement
        return uses_gpu(section, visible=bool(self.machine.gpus))


Function = Callable[[MachineCheck], Check | None]
"""A check; none where it has nothing to say."""
