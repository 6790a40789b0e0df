"""Workers as Ray actors, on this host or many; the only file that imports Ray.

A run starts a Ray of its own (`address="local"`, never a cluster that happens to be there), unless RAY_ADDRESS names
one. Devices are claimed by a placement group, one bundle each, and the wait for it has a deadline that ends with what
is missing. Calls and answers are records; nothing a model wrote is sent but as token ids and text.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs forget it

from stretto.errors import CellLost, DeadlineError, StrettoError, TrainingError
from stretto.execution.reaper import Reaper
from stretto.execution.worker import Assignment, Worker

Make = Callable[[Assignment], Worker]


class Actor:
    """What runs in a worker's process: one call after the other."""

    def __init__(self, make: Make, assignment: Assignment) -> None:
        self.worker = make(assignment)

    def call(self, what: str, arguments: Sequence[Any]) -> Any:
        """A method of the worker. An error of ours comes back as itself, so that its boundary is still known."""
        try:
            return ("answer", getattr(self.worker, what)(*arguments))
        except StrettoError as error:
            return ("error", error)

    def process(self) -> int:
        """Its process's id."""
        return os.getpid()


class Remote:
    """A worker in an actor."""

    def __init__(self, device: str, actor: Any, process: int) -> None:
        self.device, self.actor, self.process = device, actor, process

    async def call(self, what: str, *arguments: Any) -> Any:
        """In the worker's process."""
        kind, answer = await reached(self.device, self.actor.call.remote(what, arguments))
        if kind == "error":
            raise answer
        return answer

    async def close(self) -> None:
        """Ends its process."""
        ray.kill(self.actor, no_restart=True)


async def reached(device: str, reference: Any) -> Any:
    """What a remote call returned."""
    try:
        return await reference
    except RayActorError as error:
        raise CellLost(device, "its process has died") from error
    except RayTaskError as error:
        raise TrainingError(f"{device}: {error.cause!r}") from error


class Processes:
    """Starts workers as actors."""

    def __init__(self, devices: Sequence[str], *, seconds: float, make: Make = Worker) -> None:
        self.make, self.seconds = make, seconds
        self.reaper = Reaper()
        self.devices = list(devices)
        self.group: PlacementGroup | None = None
        self.master: TCPStore | None = None
        self.address = "127.0.0.1"

    async def open(self) -> None:
        """Connects, claims the devices, and opens the store where workers meet."""
        # Ray's own logs and usage reports are nothing that a user of a recipe asked for.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        given = os.environ.get("RAY_ADDRESS")
        local = {} if given else {"num_cpus": len(self.devices), "include_dashboard": False}
        await asyncio.to_thread(ray.init, address=given or "local", log_to_driver=False, logging_level="ERROR", **local)
        self.address = ray.util.get_node_ip_address()
        self.master = TCPStore(self.address, 0, None, True, wait_for_workers=False)
        bundles = [{"GPU": 1.0, "CPU": 1.0} if "/gpu:" in device else {"CPU": 1.0} for device in self.devices]
        self.group = placement_group(bundles, strategy="PACK")
        try:
            async with asyncio.timeout(self.seconds):
                await self.group.ready()
        except TimeoutError as error:
            raise DeadlineError(f"start: {self._missing(bundles)}") from error

    def _missing(self, bundles: Sequence[dict[str, float]]) -> str:
        """Which resource the cluster does not have."""
        there = ray.cluster_resources()
        short = []
        for kind in ("GPU", "CPU"):
            needed = sum(bundle.get(kind, 0.0) for bundle in bundles)
            if needed > there.get(kind, 0.0):
                short.append(f"needs {needed:g} {kind}, sees {there.get(kind, 0.0):g}")
        told = "; ".join(short) or "all of its resources are taken by others"
        return (
            f"the Ray cluster gave no place to {len(bundles)} devices within {self.seconds:g} s: {told}\n"
            "    fix: add nodes, use fewer devices (placement.cluster), or raise deadlines.start"
        )

    async def start(self, assignment: Assignment) -> Remote:
        """An actor on its bundle."""
        index = self.devices.index(assignment.device)
        gpus = 1 if "/gpu:" in assignment.device else 0
        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": where, "max_restarts": 0}
        environment = {"env_vars": {"OMP_NUM_THREADS": str(assignment.threads or 1)}}
        actor = ray.remote(Actor).options(**options, runtime_env=environment).remote(self.make, assignment)
        process = await reached(assignment.device, actor.process.remote())
        return Remote(assignment.device, actor, process)

    def store(self) -> tuple[str, int]:
        """Its address; the port is whatever was free."""
        assert self.master is not None
        return self.address, self.master.port

    async def close(self) -> None:
        """Leaves no process behind, Ray's own included."""
        if self.group is not None:
            remove_placement_group(self.group)
        self.master = None
        await asyncio.to_thread(ray.shutdown)
        self.reaper.close()
