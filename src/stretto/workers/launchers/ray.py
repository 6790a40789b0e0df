"""Workers as Ray actors, on this host or many; the only file that imports Ray.

A run starts a Ray of its own (`address="local"`, never a cluster that happens to be there), unless RAY_ADDRESS names
one, which several hosts need. Its own listens on loopback only and asks everybody for a token. Devices are claimed by a
placement group with a bundle for each host, and the wait for it has a deadline that ends with what is missing. Calls
and answers are records; nothing a model wrote is sent but as token ids and text. Only this host has the run folder:
what others need of it is sent to them. What may block in Ray is called beside the event loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import state as ray_state
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # its stubs lack them
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs forget it

from stretto.checks.machine.network import JOIN, LOOPBACK, NO_CLUSTER, cluster_named, place_of, silence
from stretto.errors import DeadlineError, RecipeError, StrettoError, TrainingError, WorkerLost
from stretto.models.memory import ONE_HEAP, freeze_loaded
from stretto.placement.devices import DeviceKind, host_of, kind_of
from stretto.threads import Daemons, beside
from stretto.workers.connectivity import on_loopback
from stretto.workers.deadlines import CLOSING, at_most
from stretto.workers.launchers.ray_resources import ADDRESS, TOUCH, Amounts, bundle_of, of_kinds, seeing, shortage
from stretto.workers.orphans import Reaper, answer_sigterm
from stretto.workers.process_group import store_at
from stretto.workers.stacks import ProcessStacks, asked, outside, own
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import WorkerSpec

Make = Callable[[WorkerSpec], Worker]

BESIDE = {"beside": 1}
"""Threads of a worker's process in which it answers while a call is under way."""

STARTS = 60.0
"""Seconds that a Ray of the run's own gets at least, however little is left; whoever waits for it may have less."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

NICENESS = "RAY_worker_niceness"
"""How far workers step back for everything else on a host: by Ray's own default so far that beside two busy processes a
start on two CPU devices took more than five minutes."""

ONLY_HERE = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
"""With it Ray takes loopback for this host's address, and then every port of its processes is bound to that."""


class WorkerActor:
    """What runs in a worker's process: one call after the other."""

    def make(self, make: Make, assignment: WorkerSpec, base: Mapping[str, bytes] | None, gpu: str | None = None) -> Any:
        """The worker. Not in `__init__`, whose errors Ray tells as a death. `base`: its base model, on other hosts.

        `gpu` is the one that it sees, in the words of CUDA_VISIBLE_DEVICES; without, the one that Ray has picked.
        """
        if gpu is not None:  # nothing in this process has looked for GPUs yet
            os.environ[VISIBLE] = gpu
        try:
            if base is None:
                self.worker = make(assignment)
            else:
                with TemporaryDirectory(prefix="stretto-") as folder:  # it is read once
                    self.worker = make(replace(assignment, base=written(base, Path(folder))))
        except StrettoError as error:
            return ("error", error)
        freeze_loaded()
        return ("answer", None)

    def where(self) -> Any:
        """The process's id, and its host's address."""
        return ("answer", (os.getpid(), ray.util.get_node_ip_address()))

    def stacks(self) -> str:
        """Where its threads stand; served beside whatever hangs."""
        return own()

    def call(self, what: str, arguments: Sequence[Any]) -> Any:
        """A method of the worker. An error of ours comes back as itself, so that its boundary is still known."""
        try:
            return ("answer", getattr(self.worker, what)(*arguments))
        except StrettoError as error:
            return ("error", error)


class RayWorker:
    """A worker in an actor."""

    def __init__(self, device: str, actor: Any) -> None:
        self.device, self.actor = device, actor
        self.process, self.host = 0, ""
        self.latest: Any = None

    async def call(self, what: str, *arguments: Any) -> Any:
        """In the worker's process."""
        self.latest = self.actor.call.remote(what, arguments)
        return await reached(self.device, self.latest)

    async def stacks(self, *, here: str) -> ProcessStacks:
        """Where its process stands; `here` is this host's address."""
        near = self.host == here and self.process
        otherwise = outside(self.process) if near else f"look for process {self.process} on {self.host or 'its host'}"
        return await asked(self.device, self.actor.stacks.options(concurrency_group="beside").remote(), otherwise)

    async def close(self) -> None:
        """Ends its process, and before it what it keeps elsewhere, such as an engine. A busy one is just ended."""
        if self.latest is not None and await beside(answered, self.latest):
            with suppress(StrettoError):
                await at_most(CLOSING, self.call("close"))
        await at_most(CLOSING, beside(ray.kill, self.actor, no_restart=True))


def answered(reference: Any) -> bool:
    """Whether a remote call has ended, well or not; calls of one actor end in turn."""
    ended, _ = ray.wait([reference], timeout=0)
    return bool(ended)


async def reached(device: str, reference: Any) -> Any:
    """What a remote call returned, or what it raised."""
    try:
        kind, answer = await reference
    except RayActorError as error:
        raise WorkerLost(device, "its process has died") from error
    except RayTaskError as error:
        raise TrainingError(f"{device}: {error.cause!r}") from error
    if kind == "error":
        raise answer
    return answer


def written(files: Mapping[str, bytes], folder: Path) -> Path:
    """A folder with these files."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def alive() -> list[dict[str, Any]]:
    """The nodes of the cluster, as Ray tells of them."""
    return [node for node in ray.nodes() if node["Alive"]]


class PrivateRay:
    """What keeps others away from a Ray of this run's own, while there is one: loopback, and a token that it draws.

    By way of the environment, which Ray's processes inherit; other users of this host cannot read that.
    """

    def __init__(self) -> None:
        self.before: dict[str, str | None] = {}
        self.beyond = ray_constants.ENABLE_RAY_CLUSTER

    def enter(self) -> None:
        """For the next Ray that this process starts."""
        drawn = {
            NICENESS: os.environ.get(NICENESS, "0"),
            **ONLY_HERE,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self.before = {name: os.environ.get(name) for name in drawn}
        os.environ.update(drawn)
        self._told(False)

    def leave(self) -> None:
        """Puts the environment back as it was before."""
        before, self.before = self.before, {}
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if before:
            self._told(self.beyond)

    def _told(self, beyond: bool) -> None:
        """Ray has read these when it was imported."""
        ray_constants.ENABLE_RAY_CLUSTER = beyond
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


class RayLauncher:
    """Starts workers as actors."""

    def __init__(
        self, devices: Sequence[str], *, seconds: float, make: Make = Worker, kinds: Mapping[str, str] | None = None
    ) -> None:
        """`kinds` is what the plan calls each device, where hosts may be of several kinds."""
        self.make, self.seconds, self.kinds = make, seconds, kinds or {}
        # True for a Ray of this run alone, which leaves the choice of GPUs to the plan.
        self.own = True
        given = cluster_named(os.environ)
        self.awaited = f"the Ray cluster at {given} and its devices" if given else "Ray to start on this host"
        self.reaper, self.closed = Reaper(), PrivateRay()
        # Ray cannot be interrupted. Its thread stays, as the kernel ends Ray's processes with whoever started them.
        self.thread, self.joining = Daemons(1, "ray"), Future[list[dict[str, float]]]()
        self.devices = list(devices)
        self.group: PlacementGroup | None = None
        self.master: TCPStore | None = None
        self.address = LOOPBACK
        self.members: dict[str, RayWorker] = {}
        self.hosts: dict[str, list[str]] = {}
        for device in devices:
            self.hosts.setdefault(host_of(device), []).append(device)
        self.base: Any = None

    async def open(self) -> None:
        """Connects, claims the devices, and opens the store where workers meet."""
        end = time.monotonic() + self.seconds
        given = cluster_named(os.environ)
        if len(self.hosts) > 1 and not given:
            raise RecipeError.of("placement.cluster", *NO_CLUSTER)
        self.own = not given
        if given and (place := place_of(given)) and (why := await beside(silence, place)):
            raise DeadlineError(
                f"start: the Ray cluster at RAY_ADDRESS={given} cannot be reached: {why}\n    fix: {JOIN}"
            )
        self.joining = self.thread.submit(self._join, given)
        try:
            async with asyncio.timeout(max(1.0 if given else STARTS, end - time.monotonic())):
                bundles = await asyncio.wrap_future(self.joining)
                answer_sigterm()
        except TimeoutError as error:
            who = f"what listens at RAY_ADDRESS={given} has" if given else "Ray, which this run starts, has"
            fix = f"{JOIN}; or raise deadlines.start" if given else "see the logs in /tmp/ray, or raise deadlines.start"
            raise DeadlineError(f"start: {who} not answered for {self.seconds:.0f} s\n    fix: {fix}") from error
        assert self.group is not None
        try:
            async with asyncio.timeout(max(1.0, end - time.monotonic())):
                await self.group.ready()
        except TimeoutError as error:
            told = await beside(self._missing, bundles)
            raise DeadlineError(f"start: {told}") from error

    def _join(self, given: str) -> list[dict[str, float]]:
        """Everything of that in which Ray may block: returns what is asked of each host."""
        # Ray's own logs and usage reports are nothing that a user of a recipe asked for.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        if self.own:
            self.closed.enter()
        # A signal for the whole job or terminal is for this process to answer: with Ray dead nothing could be saved.
        # Ray's processes inherit what this thread does not hear, and are ended by force.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        local = {} if given else {"num_cpus": len(self.devices), "include_dashboard": False}
        try:
            ray.init(address=given or "local", log_to_driver=False, logging_level="ERROR", **local)
        except Exception as error:
            why = str(error).partition("\n")[0] or repr(error)
            if given:
                raise RecipeError.of("RAY_ADDRESS", f"{given} cannot be joined: {why}", JOIN) from error
            raise StrettoError(f"start: Ray could not be started: {why}") from error
        self.address = ray.util.get_node_ip_address()
        self.master = store_at(self.address)
        bundles = [bundle_of(devices) for devices in self.hosts.values()]
        if list(self.hosts) == ["localhost"]:
            bundles[0][f"{ADDRESS}{self.address}"] = TOUCH  # "localhost" is this host, also in a cluster of many
        kinds = [self.kinds.get(devices[0], "") for devices in self.hosts.values()]
        nodes = [node["Resources"] for node in alive()]
        for bundle, mark in zip(bundles, of_kinds(kinds, nodes, among=self.kinds.values()), strict=True):
            bundle.update(mark)
        self.group = placement_group(bundles, strategy="STRICT_SPREAD")
        return bundles

    def _missing(self, bundles: Sequence[Amounts]) -> str:
        """Which resource the cluster does not have, or not free."""
        # It is no promised part of Ray.
        left: Mapping[str, Amounts] = getattr(ray_state, "available_resources_per_node", dict)()
        nodes = alive()
        free = [left.get(node["NodeID"], node["Resources"]) for node in nodes]
        told = shortage(bundles, [node["Resources"] for node in nodes], free)
        return (
            f"the Ray cluster gave no place to {len(self.devices)} devices within {self.seconds:g} s: {told}\n"
            "    fix: add nodes, use fewer devices (placement.cluster), or raise deadlines.start"
        )

    async def start(self, assignment: WorkerSpec) -> RayWorker:
        """An actor on its bundle."""
        member = self.members[assignment.device] = RayWorker(assignment.device, await beside(self._actor, assignment))
        member.process, member.host = await reached(assignment.device, member.actor.where.remote())
        folder = None if member.host == self.address else assignment.base
        base = None if folder is None else await beside(self._base, folder)
        assert self.group is not None
        told = replace(assignment, run=self.group.id.hex())
        told, gpu = seeing(told, os.environ.get(VISIBLE)) if self.own else (told, None)
        await reached(assignment.device, member.actor.make.remote(self.make, told, base, gpu))
        return member

    def _actor(self, assignment: WorkerSpec) -> Any:
        index = list(self.hosts).index(host_of(assignment.device))
        gpus = int(kind_of(assignment.device) is DeviceKind.GPU)
        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": where, "max_restarts": 0}
        variables = {"OMP_NUM_THREADS": str(assignment.threads or 1), **(on_loopback() if self.own else {}), **ONE_HEAP}
        actor = ray.remote(concurrency_groups=BESIDE)(WorkerActor)
        return actor.options(**options, runtime_env={"env_vars": variables}).remote()

    def _base(self, folder: Path) -> Any:
        """The run's own copy of the base model, for hosts that do not have the run folder; put into Ray once."""
        if self.base is None:
            files = [path for path in folder.rglob("*") if path.is_file()]
            self.base = ray.put({str(path.relative_to(folder)): path.read_bytes() for path in files})
        return self.base

    def store(self) -> tuple[str, int]:
        """The store's address; the port is whatever was free."""
        assert self.master is not None
        return self.address, self.master.port

    async def stacks(self) -> Sequence[ProcessStacks]:
        """Asks every process that was started; of those on this host, the kernel knows something at least."""
        return await asyncio.gather(*(member.stacks(here=self.address) for member in self.members.values()))

    async def close(self) -> None:
        """Leaves no process behind, Ray's own included; where Ray still blocks, it is left to the watcher."""
        try:
            if self.joining.done():
                await at_most(CLOSING, beside(self._leave))
        finally:
            self.thread.shutdown()
            self.reaper.close()
            self.closed.leave()

    def _leave(self) -> None:
        self.master = None
        try:
            if self.group is not None:
                remove_placement_group(self.group)
        finally:
            ray.shutdown()
