"""The pool of worker processes that all user code runs in: `await pool.call("module:name", *args, deadline=...)`.

A call gets a process of its own while it runs; when its deadline passes, the process is killed and the next call gets a
fresh one. Arguments and results are JSON values, nothing is pickled, and no signal is used to interrupt Python. What
user code prints goes to /dev/null (a model's answer printed there cannot disturb a terminal); its standard error is
the run's. Workers start when they are first needed and keep imported modules. One event loop at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from stretto.errors import SandboxDeadlineError, SandboxDiedError, SandboxError
from stretto.sandbox.process import Process

GB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call may use. The kernel enforces it on the whole worker process."""

    memory_gb: float | None = None
    """Address space, the interpreter's own included; beyond it Python raises MemoryError."""
    cpu_seconds: float | None = None
    """Processor time of this call, rounded up to whole seconds; beyond it the worker is killed."""


class Pool:
    """Runs functions by name in worker processes. Calls beyond `workers` wait in the order they came in."""

    def __init__(self, *, workers: int = 2, paths: Sequence[str] = (), start_deadline: float = 30.0) -> None:
        """`paths` come first on the workers' sys.path; `start_deadline` is for a worker to start, not for a call."""
        self.paths = tuple(os.path.abspath(path) for path in paths)
        self._start_deadline = start_deadline
        self._turns = asyncio.Semaphore(workers)
        self._idle: list[Process] = []
        self._unburied: set[Process] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes that exist now."""
        return tuple(sorted(process.pid for process in self._unburied))

    async def call(self, target: str, *args: Any, deadline: float, limits: Limits | None = None) -> Any:
        """What `module:name` returns for `args`.

        `deadline` counts from when a worker takes the call and includes the import of the module. Raises
        SandboxDeadlineError when it passes, SandboxDiedError when the worker dies, SandboxError when the function
        raises. Cancelling the call kills its worker.
        """
        request = _encode(target, args, limits or Limits())
        async with self._turns:
            process = await self._worker()
            try:
                async with asyncio.timeout(deadline):
                    answer = await process.exchange(request)
            except TimeoutError:
                await self._discard(process)
                text = f"{target} did not answer within {deadline:g} s; its process was killed"
                raise SandboxDeadlineError(text) from None
            except (EOFError, OSError):
                await self._discard(process)
                raise SandboxDiedError(f"the process that ran {target} {self._end_of(process)}") from None
            except ValueError as error:
                await self._discard(process)
                raise SandboxDiedError(f"the process that ran {target} wrote no valid answer: {error}") from error
            except BaseException:
                await self._discard(process)
                raise
            self._idle.append(process)
        if "error" in answer:
            raise SandboxError(_describe(target, answer["error"]))
        return answer["result"]

    def kill(self) -> None:
        """Kills every worker without waiting; from any thread, for a process that is about to end."""
        for process in list(self._unburied):
            process.strike()

    async def close(self) -> None:
        """Kills every worker, those with a call included, and waits until none is left."""
        self._closed = True
        self._idle.clear()
        doomed = list(self._unburied)
        for process in doomed:
            process.kill()
        stuck = [process for process in doomed if not await process.bury()]
        self._unburied = set(stuck)
        if stuck:
            raise SandboxError("; ".join(f"worker process {process.pid} {process.epitaph()}" for process in stuck))

    async def _worker(self) -> Process:
        """A process that waits for a call: the one used last, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await self._discard(process)
        if self._closed:
            raise SandboxError("the pool of worker processes is closed")
        try:
            process = Process(self.paths)
        except OSError as error:
            raise SandboxError(f"no worker process could be started: {error}") from error
        self._unburied.add(process)
        try:
            async with asyncio.timeout(self._start_deadline):
                await process.connect()
        except TimeoutError:
            await self._discard(process)
            raise SandboxDeadlineError(f"a worker process did not start within {self._start_deadline:g} s") from None
        except (EOFError, OSError):
            await self._discard(process)
            raise SandboxDiedError(f"a worker process did not start: it {self._end_of(process)}") from None
        except BaseException:
            await self._discard(process)
            raise
        return process

    async def _discard(self, process: Process) -> None:
        """Kills before it waits, so that a cancellation here leaves nothing running."""
        process.kill()
        if await process.bury():
            self._unburied.discard(process)

    def _end_of(self, process: Process) -> str:
        return "was killed because the pool was closed" if self._closed else process.epitaph()


def _encode(target: str, args: tuple[Any, ...], limits: Limits) -> bytes:
    """The line that a worker reads."""
    memory = None if limits.memory_gb is None else int(limits.memory_gb * GB)
    request = {"target": target, "args": args, "memory_bytes": memory, "cpu_seconds": limits.cpu_seconds}
    try:
        return json.dumps(request).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise SandboxError(f"the arguments for {target} are not JSON values: {error}") from error


def _describe(target: str, error: dict[str, str]) -> str:
    """The user's exception in two or more lines, without characters that would move a terminal's cursor."""
    text = f"{error['type']}: {error['message']} (in {target})\n{error['trace']}".rstrip()
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
