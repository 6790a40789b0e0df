"""The sandbox as its callers have it: `await run_program(code)`, or a `Sandbox` of one's own.

A sandbox has warm servers, one per program at a time; a program beyond these waits for its turn, in order. A server
that breaks is replaced and the program runs again. The verdict is "infra" after three tries, unless two servers broke
while they had the program: then it is the program that breaks them. Nothing that a program wrote is unpickled or
evaluated: it is text, or JSON of limited size that is read here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

from stretto.errors import SandboxDeadlineError, SandboxDiedError, SandboxError
from stretto.sandbox.isolated.bubblewrap import python_inside
from stretto.sandbox.isolated.protection import Protection
from stretto.sandbox.isolated.records import CallResult, Calls, ProgramLimits, ProgramResult, ProgramVerdict
from stretto.sandbox.isolated.report import read_report
from stretto.sandbox.process import ClosedAtEnd, Process

Mode = Literal["namespaces", "bubblewrap", "limits"]
"""From the strongest to what is always there: see `protection`."""

FLAGS = ("-P", "-S", "-B")
SERVER = str(Path(__file__).with_name("server.py"))
PACKAGES = ("numpy",)
"""Besides the standard library, what programs may import where it is installed."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"} | {
    f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")
}
"""The whole environment of a server: sets are ordered alike in every run, and nobody starts threads unasked."""
START_SECONDS = 60.0
"""For a server to start, on a machine that is busy."""
GRACE_SECONDS = 10.0
"""After a program's time is over and its keeper should have said so."""
REMOVAL_SECONDS = 60.0
"""For folders that programs left, when a sandbox is closed."""
NEWEST = 2**16
"""A version that Landlock will not have."""
TRIES = 3
BROKEN = 2
"""Servers that may break while they have a program; then it failed."""
LONGEST = 256 * 2**20
"""Bytes of a line from a server, which bounds what it collects from programs far below that."""


class Sandbox(ClosedAtEnd):
    """Runs programs, at most `workers` at once. One event loop at a time."""

    def __init__(
        self,
        *,
        workers: int | None = None,
        packages: Sequence[str] = PACKAGES,
        isolation: Literal["auto"] | Mode = "auto",
        landlock: int = NEWEST,
    ) -> None:
        """As many `workers` as there are processors, unless told. `isolation` is what to try; "auto" takes the best.
        `landlock` is the newest version of Landlock to use, 0 for none."""
        self._packages, self._landlock = tuple(packages), landlock
        self._modes: tuple[Mode, ...] = get_args(Mode) if isolation == "auto" else (isolation,)
        self._turns = asyncio.Semaphore(workers or os.cpu_count() or 1)
        self._idle: list[Process] = []
        self._living: set[Process] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._protection: Protection | None = None
        self._closed = False
        self.moved = time.monotonic()
        """When (`time.monotonic`) a program last ended."""
        self.retried = 0
        """Programs that ran again because a server broke."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The servers that exist now."""
        return tuple(sorted(process.pid for process in self._living))

    async def protection(self) -> Protection:
        """What this machine allows; starts a server where none has been yet. SandboxError if none can be."""
        async with self._turns:
            self._idle.append(await self._server())
        assert self._protection is not None
        return self._protection

    async def run_program(
        self, code: str, *, stdin: str = "", calls: Calls | None = None, limits: ProgramLimits | None = None
    ) -> ProgramResult:
        """Runs a script that reads `stdin`, or calls a function of the program; never raises for what a program does.

        A call that takes too long or ends the process costs that call; the calls after it run in a new process.
        """
        limits = limits or ProgramLimits()
        if calls is None:
            return await self._run({"code": code, "stdin": stdin}, limits, 0)
        try:
            texts = [json.dumps(list(each) if not isinstance(each, Mapping) else each) for each in calls.arguments]
        except (TypeError, ValueError, RecursionError) as error:
            raise SandboxError(f"the arguments for {calls.function} are not JSON values: {error}") from error
        done: list[CallResult] = []
        spent, result = 0.0, ProgramResult(verdict="ok")
        while len(done) < len(texts):
            left = limits.total_seconds - spent
            if left <= 0:
                done += [CallResult(verdict="timeout", detail="no time was left")] * (len(texts) - len(done))
                break
            asked = {"function": calls.function, "arguments": texts[len(done) :]}
            request = {"code": code, "calls": asked}
            result = await self._run(request, replace(limits, total_seconds=left), len(texts) - len(done))
            done += result.calls
            spent += result.seconds
        verdict: ProgramVerdict = next((each.verdict for each in done if each.verdict != "ok"), "ok")
        detail = next((each.detail for each in done if each.verdict != "ok"), "")
        return replace(result, verdict=verdict, detail=detail, calls=tuple(done), seconds=spent)

    async def close(self) -> None:
        """Ends every server, and with it every program; waits until nothing of them is left."""
        self._closed = True
        self._idle.clear()
        for process in list(self._living):
            await self._discard(process)
        await asyncio.gather(*self._leaving)

    def kill(self) -> None:
        """Kills every server without waiting; from any thread, for a process that is about to end."""
        for process in list(self._living):
            process.strike()

    async def _run(self, request: dict[str, Any], limits: ProgramLimits, calls: int) -> ProgramResult:
        """One process for one program, as often as it takes until a server is not at fault."""
        request = {**request, "limits": {**asdict(limits), "calls": calls}}
        line = json.dumps(request).encode("ascii") + b"\n"
        longest = (limits.total_seconds if calls else limits.seconds) + GRACE_SECONDS
        said, broken = "", 0
        async with self._turns:
            for attempt in range(TRIES):
                self.retried += attempt > 0
                try:
                    process = await self._server()
                    answer = await self._exchange(process, line, longest)
                except (SandboxDeadlineError, SandboxDiedError) as error:  # while it had the program
                    said, broken = str(error), broken + 1
                    if broken == BROKEN:
                        late = isinstance(error, SandboxDeadlineError)
                        return _lost("timeout" if late else "error", f"{said}, like the server before it", calls)
                except SandboxError as error:
                    said = str(error)
                else:
                    self._idle.append(process)
                    self.moved = time.monotonic()
                    if "result" in answer:
                        return read_report(answer["result"], calls)
                    said = str(answer["error"]["message"])
        return _lost("infra", said, calls)

    async def _exchange(self, process: Process, line: bytes, seconds: float) -> dict[str, Any]:
        """A request and its answer.

        Raises:
            SandboxDeadlineError: The server did not answer in time. It is killed, as in the next case.
            SandboxDiedError: The server died, or its answer could not be read.
            SandboxError: This sandbox was closed or killed meanwhile.
        """
        try:
            async with asyncio.timeout(seconds):
                answer = await process.exchange(line)
            if "broken" in answer.get("error", ()):
                await self._discard(process)
                raise SandboxDiedError(answer["error"]["message"])
            return answer
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            kind: type[SandboxError] = SandboxDeadlineError if isinstance(error, TimeoutError) else SandboxDiedError
            kind = SandboxError if process.struck else kind
            await self._discard(process)
            raise kind(f"a sandbox server {process.epitaph()} ({type(error).__name__})") from error
        except BaseException:
            await self._discard(process)
            raise

    async def _server(self) -> Process:
        """A server that waits, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await self._discard(process)
        if self._protection is None:
            async with self._starting:  # the first one finds out what is allowed
                if self._protection is None:
                    return await self._first()
        return await self._start(self._modes[0])

    async def _first(self) -> Process:
        """A server in the strongest mode that this machine allows; those after it do not try others."""
        refused: list[str] = []
        for mode in self._modes:
            try:
                process = await self._start(mode, "; ".join(refused))
            except NotPermittedError as error:
                refused.append(f"{mode}: {error}")
            else:
                self._modes = (mode,)
                return process
        raise SandboxError(f"this machine does not allow what was asked: {'; '.join(refused)}")

    async def _start(self, mode: Mode, refused: str = "") -> Process:
        """A server in this mode. NotPermittedError if the kernel has something against it."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        python = python_inside(self._packages, FLAGS) if mode == "bubblewrap" else (sys.executable, *FLAGS)
        if python is None:
            raise NotPermittedError("it is not installed")
        folders = dict.fromkeys(str(path) for name in self._packages for path in _folder(name))
        try:
            own = {"TMPDIR": tempfile.gettempdir()} if mode == "limits" else {}
            process = Process(
                (mode, str(self._landlock), ",".join(self._packages), *folders),
                program=SERVER,
                longest=LONGEST,
                python=python,
                environment=ENVIRONMENT | own,
            )
        except OSError as error:
            raise SandboxError(f"no sandbox server could be started: {error}") from error
        self._living.add(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                await process.connect()
                state = await process.exchange(b"{}\n")
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            await self._discard(process)
            kind = NotPermittedError if mode == "bubblewrap" and self._protection is None else SandboxError
            raise kind(f"a sandbox server did not start: it {process.epitaph()}") from error
        except BaseException:
            await self._discard(process)
            raise
        if "error" in state:
            await self._discard(process)
            raise NotPermittedError(str(state["error"]["message"]))
        found = state["result"]
        self._protection = self._protection or Protection(
            namespaces=found["namespaces"],
            bubblewrap=mode == "bubblewrap",
            unprivileged=found["uid"] is not None or (found["namespaces"] and os.getuid() != 0),
            seccomp=found["seccomp"],
            landlock=found["landlock"],
            imports=found["imports"],
            refused=refused,
        )
        return process

    async def _discard(self, process: Process) -> None:
        process.strike()
        leaving = asyncio.create_task(process.left(REMOVAL_SECONDS))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        if await process.bury():
            self._living.discard(process)


def _lost(verdict: ProgramVerdict, detail: str, calls: int) -> ProgramResult:
    """The result of a program that no server reported on."""
    return ProgramResult(verdict=verdict, detail=detail, calls=(CallResult(verdict=verdict, detail=detail),) * calls)


def look() -> Protection:
    """What this machine allows, for a caller that waits. SandboxError if no server can be started at all."""

    async def protection() -> Protection:
        async with Sandbox(workers=1, packages=()) as sandbox:
            return await sandbox.protection()

    with ThreadPoolExecutor(1) as thread:  # because the caller may be on an event loop
        return thread.submit(asyncio.run, protection()).result()


class NotPermittedError(SandboxError):
    """The kernel does not let a sandbox server make namespaces; the message is what it said."""


def _folder(name: str) -> list[Path]:
    """Where a package is installed; nowhere if it is not."""
    spec = find_spec(name)
    return [] if spec is None or spec.origin is None else [Path(spec.origin).parent.parent]


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


async def run_program(
    code: str, *, stdin: str = "", calls: Calls | None = None, limits: ProgramLimits | None = None
) -> ProgramResult:
    """As `Sandbox.run_program`, in a sandbox that everybody on this event loop shares; it ends with this process."""
    loop = asyncio.get_running_loop()
    if loop not in _SHARED:
        _SHARED[loop] = Sandbox()
    return await _SHARED[loop].run_program(code, stdin=stdin, calls=calls, limits=limits)
