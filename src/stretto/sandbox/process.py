"""One worker process as its parent sees it: start, exchange a line, kill, bury.

Every request has a number, and an answer says which it answers: one that a stray writer leaves behind is not taken for
the next. It knows nothing of queues, deadlines of calls or retries; that is `pool`. A process is only ever signaled
between its start and its burial, while the kernel cannot have given its id to anybody else.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from stretto.sandbox import worker
from stretto.sandbox.fork_server import ForkedChild, ForkServer

BURIAL_SECONDS = 5.0
"""How long a killed process may take to disappear."""


class ClosedAtEnd(ABC):
    """What is closed where an `async with` ends."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Leaves nothing behind."""


class Process:
    """A running worker. Its standard input and output are /dev/null; its standard error is the parent's."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        server: ForkServer | None = None,
        program: str = worker.__file__,
        longest: int = worker.MAX_REPLY + 1024,
        python: Sequence[str] = (sys.executable, "-P"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process; `connect` then waits until it is ready. With `paths` it is for code of the user's, and
        with a `server` it knows the functions that were given to that.

        `program` is the file that it runs, with this `python` and this `environment` (by default that of this
        process), and `longest` the bytes of a line.
        """
        self.kind, self._longest = (tuple(paths), server), longest
        self.prepared: set[bytes] = set()
        """Requests that it has answered and that need not be made again: imports."""
        self.struck = False
        """True once this process has killed it."""
        self._number = 0
        self._socket, theirs = socket.socketpair()
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._child: ForkedChild | subprocess.Popen[bytes]
        arguments = [str(theirs.fileno()), str(os.getpid()), str(worker.MAX_REPLY), *paths]
        try:
            if server is not None:
                self._child = server.start(theirs.fileno(), paths)
            else:
                self._child = subprocess.Popen(
                    [*python, program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=environment,
                )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group and session."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """False once its end of the line is closed."""
        return self._stream is not None and not self._stream[0].at_eof()

    async def connect(self) -> None:
        """Waits until it is ready for calls. EOFError or OSError if it dies before."""
        self._stream = await asyncio.open_connection(sock=self._socket, limit=self._longest)
        await self._stream[0].readuntil(b"\n")

    @property
    def lines(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """What it writes and reads, for a program that does not take turns."""
        assert self._stream is not None, "lines before connect"
        return self._stream

    async def exchange(self, request: bytes) -> dict[str, Any]:
        """One request, one answer. EOFError or OSError if it died, ValueError if what it wrote is no answer to it."""
        reader, writer = self.lines
        self._number += 1
        writer.write(b"%d %s" % (self._number, request))
        await writer.drain()
        try:
            number, _, text = (await reader.readuntil(b"\n")).partition(b" ")
            answer = json.loads(text) if number == b"%d" % self._number else None
        except (asyncio.LimitOverrunError, RecursionError) as error:
            raise ValueError(str(error)) from error
        if not isinstance(answer, dict) or not answer.keys() & {"result", "error"}:
            raise ValueError("neither a result nor an error of this request")
        return answer

    def strike(self) -> None:
        """Kills it and everything in its process group; no more than that, so that any thread may do it."""
        self.struck = True
        if self._child.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills it and everything in its process group, at once and without asking, and ends the line to it."""
        self.strike()
        if self._stream is not None:
            self._stream[1].transport.abort()
        else:
            self._socket.close()

    async def left(self, seconds: float) -> None:
        """Waits until no process holds the other end of the line, forked ones included, and ends the line."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while self._stream is not None and await self._stream[0].read(65536):
                    pass
        self.kill()

    async def bury(self) -> bool:
        """Waits until a killed process is gone; False if the kernel still holds it after a while."""
        wait = 0.001
        clock = asyncio.get_running_loop().time
        end = clock() + BURIAL_SECONDS
        while self._child.poll() is None and clock() < end:
            await asyncio.sleep(wait)
            wait = min(2 * wait, 0.05)
        await asyncio.sleep(0)
        return self._child.returncode is not None

    @property
    def used_up(self) -> bool:
        """True if a buried process was ended because its CPU time was used up."""
        return self._child.returncode == -signal.SIGXCPU

    def epitaph(self) -> str:
        """How a buried process ended, in words."""
        code = self._child.returncode
        if code is None:
            return "does not die; the kernel still holds it"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hints = {"SIGKILL": " (as the system does when memory runs out)", "SIGXCPU": " (its CPU time was used up)"}
        return f"was killed by signal {name}{hints.get(name, '')}"
