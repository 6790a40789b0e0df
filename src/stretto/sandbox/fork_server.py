"""Worker processes for functions that only this process knows, such as those of a notebook: they begin as copies of it.

The first copy is made by fork when a `ForkServer` is made: before a run loads its models and starts its threads. It
has one thread, waits, and forks again for each worker, so that a worker that is killed can be replaced, and none holds
the memory of a model. As with every fork, a worker sees what this process knew when the server was made, and what it
changes stays there. Threads of libraries are not copied: torch computes with one thread there, and refuses a GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self

from stretto.sandbox import worker

RUNS = b"runs"
"""What the server says of a worker that has not ended."""
SEPARATOR = "\0"
"""Stands between paths, in which it cannot occur."""
LONGEST = 2**16
"""Bytes of a request to the server."""


class ForkedChild:
    """A worker that the server has made, with what `subprocess.Popen` has of one of our own."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it has ended; its id stays its own until somebody has asked."""
        if self.returncode is None:
            self.returncode = self.server.ended(self.pid)
        return self.returncode


class ForkServer:
    """A copy of this process that makes workers. It ends when it is closed or this process ends."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """`functions` are known to the workers by these names."""
        self.functions = dict(functions)
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: see above
            self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _serve(theirs, self.functions)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, fd: int, paths: Sequence[str]) -> ForkedChild:
        """A new worker that serves calls on this descriptor. OSError if the server is gone."""
        answer = b""
        with self._asking, suppress(OSError):
            socket.send_fds(self._socket, [SEPARATOR.join(["start", *paths]).encode()], [fd])
            answer = self._socket.recv(LONGEST)
        if not answer:
            raise OSError("the process that keeps functions given from Python has died")
        return ForkedChild(self, int(answer))

    def ended(self, pid: int) -> int | None:
        """The exit code of a worker that has ended, none of one that has not."""
        with suppress(OSError), self._asking:
            self._socket.send(b"%d" % pid)
            if answer := self._socket.recv(LONGEST):
                return None if answer == RUNS else int(answer)
        return -signal.SIGKILL  # its workers die with the server

    def close(self) -> None:
        """Ends the server and, with it, every worker that is left."""
        with self._asking:
            self._socket.close()
        with suppress(OSError):  # somebody else of this process may have waited for it
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve(line: socket.socket, functions: Mapping[str, Callable[..., Any]]) -> NoReturn:
    """The server: never returns into what was copied."""
    try:
        os.setsid()  # Ctrl-C is for the run
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        while True:
            request, descriptors, _, _ = socket.recv_fds(line, LONGEST, 1)
            if not request:
                break
            if descriptors:
                line.send(b"%d" % _fork(line, descriptors[0], request.decode().split(SEPARATOR)[1:], functions))
                os.close(descriptors[0])
            else:
                ended, status = os.waitpid(int(request), os.WNOHANG)
                line.send(b"%d" % os.waitstatus_to_exitcode(status) if ended else RUNS)
    finally:
        os._exit(0)


def _fork(line: socket.socket, fd: int, paths: list[str], functions: Mapping[str, Callable[..., Any]]) -> int:
    """Starts a worker; returns its process id."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        with suppress(OSError):  # here and there, whoever comes first: it may be killed at once
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)  # a group of its own, so that it can be killed with what it starts
        line.close()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the threads that it had are not here, and it would wait for them
        worker.main(fd, server, worker.MAX_REPLY, paths, functions)
    finally:
        os._exit(1)
