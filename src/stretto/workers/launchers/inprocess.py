"""A worker, wherever it runs, as whoever calls it sees it: one call after the other, each awaited.

`ThreadWorker` is a worker in a thread of this process: for tests, and for one process that serves several CPU devices.
Workers in processes of their own, on this host or others, are in `stretto.workers.launchers.ray`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # its stubs forget them

from stretto.checks.machine.programs import RAY, TOO_OLD, too_old
from stretto.errors import RecipeError
from stretto.extras import install
from stretto.models.memory import keep_memory
from stretto.openmp import release_threads
from stretto.threads import Daemons
from stretto.workers.api import WorkerTransport
from stretto.workers.mapped_weights import loading
from stretto.workers.models import EngineFactory
from stretto.workers.stacks import ProcessStacks
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import WorkerSpec


class Launcher(Protocol):
    """Starts workers, one for each device."""

    awaited: str
    """What `open` waits for, in words."""

    async def open(self) -> None:
        """Gets the devices."""
        ...

    async def start(self, assignment: WorkerSpec) -> WorkerTransport:
        """One worker, ready."""
        ...

    def store(self) -> Store | tuple[str, int]:
        """Where they meet: a store that all of them reach."""
        ...

    async def stacks(self) -> Sequence[ProcessStacks]:
        """Where every process that it has started stands."""
        ...

    async def close(self) -> None:
        """Leaves no process behind."""
        ...


LOADING = threading.Lock()
"""transformers loads one model at a time: it keeps what it is loading in globals."""


class ThreadWorker:
    """A worker in a thread of this process.

    The thread is a daemon: a call that never returns must not keep the process from ending.
    """

    def __init__(self, assignment: WorkerSpec, make: Callable[[WorkerSpec], Worker]) -> None:
        self.device = assignment.device
        if assignment.torch_device.type == "cpu":
            keep_memory()  # before the thread starts, and gets a heap of its own
            release_threads()
        self.thread = Daemons(1, assignment.device)
        self.made = self.thread.submit(self._make, make, assignment)

    def _make(self, make: Callable[[WorkerSpec], Worker], assignment: WorkerSpec) -> Worker:
        with LOADING:
            return make(assignment)

    async def call(self, what: str, *arguments: Any) -> Any:
        """In the worker's own thread."""
        return await asyncio.wrap_future(self.thread.submit(self._call, what, *arguments))

    def _call(self, what: str, *arguments: Any) -> Any:
        return getattr(self.made.result(), what)(*arguments)

    async def close(self) -> None:
        """Waits for the call under way; who stops waiting leaves it behind."""
        try:
            await self.call("close")
        finally:
            self.thread.shutdown()

    def abandon(self) -> None:
        """Closes it when it is made, if that ever happens: nobody waits for it any more."""
        self.thread.submit(self._call, "close")
        self.thread.shutdown()


class ThreadLauncher:
    """Workers in threads of this process."""

    awaited = "threads of this process"

    def __init__(self, make: Callable[[WorkerSpec], Worker] = Worker) -> None:
        self.make, self.meeting = make, HashStore()

    async def open(self) -> None:
        """The devices are this process's threads."""

    async def start(self, assignment: WorkerSpec) -> ThreadWorker:
        """A worker in a new thread; loading begins at once."""
        member = ThreadWorker(assignment, self.make)
        try:
            await asyncio.wrap_future(member.made)
        except BaseException:
            member.abandon()
            raise
        return member

    def store(self) -> Store:
        """In this process."""
        return self.meeting

    async def stacks(self) -> Sequence[ProcessStacks]:
        """None but this process."""
        return ()

    async def close(self) -> None:
        """Nothing but threads was started, and each ends with its member."""


def worker_of(assignment: WorkerSpec, make_engine: EngineFactory | None = None) -> Worker:
    """The worker that an assignment asks for."""
    with loading(assignment.run if assignment.cut else None) as mapped:
        if not assignment.slices:
            worker = Worker(assignment, make_engine)
        else:
            from stretto.workers.sharded_worker import ShardedWorker  # what it needs of torch takes seconds to load

            worker = ShardedWorker(assignment)
    worker.mapped = mapped
    return worker


def processes(
    devices: Sequence[str],
    *,
    seconds: float,
    make: Callable[[WorkerSpec], Worker] = Worker,
    kinds: Mapping[str, str] | None = None,
) -> Launcher:
    """Workers in processes of their own, on this host or many, which may have several `kinds` of devices."""
    if importlib.util.find_spec("ray") is None:
        raise RecipeError.of(
            "placement", f"a plan of {len(devices)} devices needs Ray", f"{install('ray')}, or use one device"
        )
    with suppress(PackageNotFoundError):  # built from source, perhaps
        if too_old(there := version("ray")):
            raise RecipeError.of("placement", TOO_OLD.format(there), f"pip install 'ray>={RAY}'")
    since = time.monotonic()
    from stretto.workers.launchers.ray import RayLauncher  # which takes seconds, of those that are left

    return RayLauncher(devices, seconds=seconds - (time.monotonic() - since), make=make, kinds=kinds)


def launcher_for(
    devices: Sequence[str],
    *,
    seconds: float,
    make: Callable[[WorkerSpec], Worker] = Worker,
    kinds: Mapping[str, str] | None = None,
) -> Launcher:
    """One device in a thread of this process, several in processes of their own."""
    return ThreadLauncher(make) if len(devices) == 1 else processes(devices, seconds=seconds, make=make, kinds=kinds)
