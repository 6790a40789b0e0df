"""The pool of worker processes that all user code runs in: `await pool.call("module:name", *args, deadline=...)`.

A call gets a process of its own while it runs; when its deadline passes, the process is killed and the next call gets a
fresh one. Starting a process and importing a module have a deadline of their own and count in no call's. Arguments and
results are JSON values, nothing is pickled, and no signal is used to interrupt Python. What user code prints goes to
/dev/null (a model's answer printed there cannot disturb a terminal); its standard error is the run's. Workers start
when they are first needed and keep imported modules. Those of built-in functions never see the user's folders. None of
this isolates code that a model wrote: that runs in `pool.programs`. One event loop at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from stretto.errors import SandboxDeadlineError, SandboxDiedError, SandboxError, SandboxLimitError, SandboxStartError
from stretto.sandbox.fork_server import ForkServer
from stretto.sandbox.isolated.programs import Sandbox
from stretto.sandbox.process import ClosedAtEnd, Process

GB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call may use. The kernel enforces it on the whole worker process."""

    memory_gb: float | None = None
    """Address space beyond what the worker has already; beyond it Python raises MemoryError."""
    cpu_seconds: float | None = None
    """Processor time of this call, rounded up to whole seconds; beyond it the worker is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A function of stretto's own is called: in a worker that does not know the user's folders."""

    prepare: tuple[Any, ...] | None = None
    """`module:name` and arguments of a call that a worker makes once before, to load what the function needs."""


class Pool(ClosedAtEnd):
    """Runs functions by name in worker processes. Calls beyond `workers` wait in the order they came in."""

    def __init__(
        self,
        *,
        workers: int = 2,
        programs: int | None = None,
        paths: Sequence[str] = (),
        start_deadline: float = 30.0,
        server: ForkServer | None = None,
    ) -> None:
        """`programs` may run at a time, by default as many as calls. `paths` is where modules of the user's lie;
        `start_deadline` is for a worker to start, and for an import.

        `server`, which stays the caller's to close, makes the workers of functions that were given as objects.
        """
        self.paths = tuple(os.path.abspath(path) for path in paths)
        self.functions = dict(server.functions) if server else {}
        self.programs = Sandbox(workers=programs or workers)
        """Where code that a model wrote runs; nothing of it exists before the first program."""
        self._server = server
        self._start_deadline = start_deadline
        self._workers, self._turns = workers, asyncio.Semaphore(workers)
        self._loading = asyncio.Lock()
        self._idle: list[Process] = []
        self._unburied: set[Process] = set()
        self._starting: dict[object, float] = {}
        self._moved = time.monotonic()
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes that exist now."""
        return tuple(sorted(process.pid for process in self._unburied))

    @property
    def moved(self) -> float:
        """When (`time.monotonic`) a call or program last ended; what starts has until the end of its own deadline."""
        return max([self._moved, self.programs.moved, *list(self._starting.values())])

    async def call(
        self,
        target: str,
        *args: Any,
        deadline: float,
        limits: Limits | None = None,
        builtin: Builtin | None = None,
        reward: bool = False,
    ) -> Any:
        """What `module:name` returns for `args`; a function of the user's, unless it is `builtin`. A `reward` is called
        with what the names of its parameters ask for.

        `deadline` counts from when a worker that has the module takes the call. Raises SandboxDeadlineError when it
        passes, SandboxStartError when the import takes too long, SandboxLimitError at one of the `limits`,
        SandboxDiedError when the worker dies, SandboxError when the function raises. Cancelling the call kills its
        worker.
        """
        limits = limits or Limits()
        request = _encode(target, args, limits, reward=reward)
        async with self._turns:
            try:
                process = await self._worker(
                    () if builtin else self.paths, self._server if target in self.functions else None
                )
                answer = await self._load(process, target, builtin)
                if "error" not in answer:
                    late = f"{target} did not answer within {deadline:g} s; its process was killed"
                    answer = await self._exchange(process, target, request, deadline, SandboxDeadlineError(late))
            finally:
                self._moved = time.monotonic()
            self._idle.append(process)
        if "error" in answer:
            kind = SandboxError
            if answer["error"]["type"] == "MemoryError" and limits.memory_gb is not None:
                kind = SandboxLimitError
            raise kind(_describe(target, answer["error"]))
        return answer["result"]

    async def load(self, target: str, *, builtin: Builtin | None = None) -> None:
        """Imports a function's module in every worker that there may be, so that no later call has to wait for it.

        Raises what `call` would raise.
        """
        kind = () if builtin else self.paths, self._server if target in self.functions else None
        async with self._loading, AsyncExitStack() as turns:
            for _ in range(self._workers):
                await turns.enter_async_context(self._turns)
            processes = [await self._worker(*kind) for _ in range(self._workers)]
            loads = (self._load(process, target, builtin) for process in processes)
            answers = await asyncio.gather(*loads, return_exceptions=True)
            self._idle += [process for process in processes if process.alive]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            if "error" in answer:
                raise SandboxError(_describe(target, answer["error"]))

    async def _load(self, process: Process, target: str, builtin: Builtin | None) -> dict[str, Any]:
        """What a call has to wait for in a process that has not done it yet."""
        answer: dict[str, Any] = {}
        for before in _before(target, builtin):
            if "error" not in answer and before not in process.prepared:
                answer = await self._prepare(process, target, before)
        return answer

    async def _prepare(self, process: Process, target: str, request: bytes) -> dict[str, Any]:
        """Imports a module, or loads what a function needs, once in each process."""
        seconds = self._start_deadline
        module = target.partition(":")[0]
        late = f"importing {module} took longer than {seconds:g} s (for {target}); its process was killed"
        self._starting[process] = time.monotonic() + seconds
        try:
            answer = await self._exchange(process, target, request, seconds, SandboxStartError(late))
        finally:
            del self._starting[process]
        if "error" not in answer:
            process.prepared.add(request)
        return answer

    async def _exchange(
        self, process: Process, target: str, request: bytes, seconds: float, late: SandboxDeadlineError
    ) -> dict[str, Any]:
        """One request and its answer; whatever goes wrong costs the process."""
        try:
            async with asyncio.timeout(seconds):
                return await process.exchange(request)
        except TimeoutError:
            await self._discard(process)
            raise late from None
        except (EOFError, OSError):
            await self._discard(process)
            kind = SandboxLimitError if process.used_up else SandboxDiedError
            raise kind(f"the process that ran {target} {self._end_of(process)}") from None
        except ValueError as error:
            await self._discard(process)
            raise SandboxDiedError(f"the process that ran {target} wrote no valid answer: {error}") from error
        except BaseException:
            await self._discard(process)
            raise

    def kill(self) -> None:
        """Kills every worker without waiting; from any thread, for a process that is about to end."""
        self.programs.kill()
        for process in list(self._unburied):
            process.strike()

    async def close(self) -> None:
        """Kills every worker, those with a call included, and waits until none is left."""
        self._closed = True
        await self.programs.close()
        self._idle.clear()
        doomed = list(self._unburied)
        for process in doomed:
            process.kill()
        stuck = [process for process in doomed if not await process.bury()]
        self._unburied = set(stuck)
        if stuck:
            raise SandboxError("; ".join(f"worker process {process.pid} {process.epitaph()}" for process in stuck))

    async def _worker(self, paths: tuple[str, ...], server: ForkServer | None) -> Process:
        """A process of this kind that waits for a call: the one used last, or a new one."""
        while process := next((each for each in reversed(self._idle) if each.kind == (paths, server)), None):
            self._idle.remove(process)
            if process.alive:
                return process
            await self._discard(process)
        if self._closed:
            raise SandboxError("the pool of worker processes is closed")
        try:
            process = Process(paths, server=server)
        except OSError as error:
            raise SandboxError(f"no worker process could be started: {error}") from error
        self._unburied.add(process)
        self._starting[process] = time.monotonic() + self._start_deadline
        try:
            async with asyncio.timeout(self._start_deadline):
                await process.connect()
        except TimeoutError:
            await self._discard(process)
            raise SandboxStartError(f"a worker process did not start within {self._start_deadline:g} s") from None
        except (EOFError, OSError):
            await self._discard(process)
            raise SandboxDiedError(f"a worker process did not start: it {self._end_of(process)}") from None
        except BaseException:
            await self._discard(process)
            raise
        finally:
            del self._starting[process]
        return process

    async def _discard(self, process: Process) -> None:
        """Kills before it waits, so that a cancellation here leaves nothing running."""
        process.kill()
        if await process.bury():
            self._unburied.discard(process)

    def _end_of(self, process: Process) -> str:
        return "was killed because the pool was closed" if self._closed else process.epitaph()


def _before(target: str, builtin: Builtin | None) -> list[bytes]:
    """What a worker is asked once before it is given a call: the import, and what the function wants loaded."""
    first = [_encode(target, None, Limits())]
    if builtin and builtin.prepare:
        first.append(_encode(builtin.prepare[0], builtin.prepare[1:], Limits()))
    return first


def _encode(target: str, args: tuple[Any, ...] | None, limits: Limits, *, reward: bool = False) -> bytes:
    """What a worker reads; without arguments it only imports the module."""
    memory = None if limits.memory_gb is None else int(limits.memory_gb * GB)
    request = {"target": target, "args": args, "memory_bytes": memory, "cpu_seconds": limits.cpu_seconds}
    request |= {"reward": True} if reward else {}
    try:
        return json.dumps(request).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise SandboxError(f"the arguments for {target} are not JSON values: {error}") from error


def _describe(target: str, error: dict[str, str]) -> str:
    """The user's exception in two or more lines, without characters that would move a terminal's cursor."""
    text = f"{error['type']}: {error['message']} (in {target})\n{error['trace']}".rstrip()
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
