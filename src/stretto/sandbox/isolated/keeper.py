"""One program from fork to burial: locks it in, watches the clock and its memory, kills it and all that it started.

A keeper is a process of its own between the server and the program, so that the namespaces it enters end with it. It
knows how the program ended from the kernel, not from the program. What the program wrote is handed on as text, unread.
"""

from __future__ import annotations

import ctypes
import os
import resource
import secrets
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from stretto.sandbox.isolated import child, filters, kernel
from stretto.sandbox.isolated.processes import excess, family, threads_of, write
from stretto.sandbox.isolated.scratch import remove

MB = 2**20
TICK = 0.05
"""Seconds between two looks at how much memory a program has."""
RESULTS = 3
"""The program's descriptor for results, the only one besides the standard streams."""
NOT_LOCKED_IN = 99
"""Exit code of a process that could not be locked in, and so has not run the program."""
BURIAL_SECONDS = 2.0
CLOSED_FROM = RESULTS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What this machine allows."""

    namespaces: bool
    """True if programs get process, mount, network and IPC namespaces of their own and a root folder of Python only."""
    uid: int | None
    """The unprivileged user that programs run as, or none where they run as the one who started the run."""
    seccomp: ctypes.CDLL | None
    """libseccomp, if it is installed and the kernel filters system calls."""
    denied: bytes
    """The filter for programs in namespaces of their own; empty where there are none: see `filters.compiled`."""
    landlock: int
    """The version of Landlock that confines files where there are no namespaces; 0 for none."""
    visible: tuple[str, ...]
    """The folders that programs can read."""
    scratch: str
    """Where a program's own folder is, in namespaces."""
    proc: int
    """The host's /proc, as an open folder that programs do not have; -1 where there is none."""
    base_bytes: int
    """Address space that a server has before any program."""


class Unwanted(BaseException):
    """Nobody waits for the program any more."""


def keep(
    request: Mapping[str, Any], isolation: Isolation, scratch: str, answer: Callable[[dict[str, Any]], None]
) -> None:
    """Runs the program of a request in `scratch`, passes the report to `answer`, and removes that folder after it.

    Raises:
        OSError: The program could not be locked in; `answer` was not called.
    """
    limits = request["limits"]
    if isolation.namespaces:
        owner = kernel.INNER_UID if isolation.uid is None else isolation.uid
        kernel.isolate(scratch, limits["scratch_mb"], owner)
    else:
        if isolation.uid is not None:
            os.chown(scratch, isolation.uid, isolation.uid)
        with suppress(OSError):
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            _outlive_the_server()
    try:
        answer(_kept(request, isolation, scratch))
    finally:
        if not isolation.namespaces:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server may end meanwhile
            with suppress(Exception):  # there is an answer already
                remove(scratch)


def _kept(request: Mapping[str, Any], isolation: Isolation, scratch: str) -> dict[str, Any]:
    nonce = secrets.token_hex(16)
    streams = [_file(request.get("stdin", "")), _file(), _file()]
    reading, writing = os.pipe()
    me, started = os.getpid(), time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(request, isolation, scratch, [*streams, writing], nonce, me)
    os.close(writing)
    os.close(streams[0])
    with suppress(OSError):  # where memory runs out, the kernel is to take the program and nobody else
        write(isolation.proc, f"{pid}/oom_score_adj", "1000")
    try:
        lines, verdict, status, cpu = _watch(pid, reading, request["limits"], nonce, isolation, len(_calls(request)))
    except Unwanted:
        _bury(pid)
        raise
    finally:
        if not isolation.namespaces:
            _sweep(isolation.proc)
    locked = bool(lines) and lines[0] == "begun 0 null"
    if verdict is None and not locked:
        raise OSError(f"the program could not be locked in: {_text(streams[2], 2000)}")
    most = request["limits"]["output_kb"] * 1024
    verdict = verdict or _judged(status, cpu, request["limits"], [os.fstat(each).st_size for each in streams[1:]], most)
    return {
        "verdict": verdict,
        "status": status,
        "stdout": _text(streams[1], most),
        "stderr": _text(streams[2], most),
        "lines": lines[1:],
        "seconds": time.monotonic() - started,
    }


def _outlive_the_server() -> None:
    """Where no namespace ends with the program: whoever kills the server leaves this process the time to end what the
    program has started, and to remove its folder."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Unwanted

    server = os.getppid()
    os.setsid()
    signal.signal(signal.SIGTERM, end)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:  # it died before it could be heard of
        raise Unwanted


def _calls(request: Mapping[str, Any]) -> list[str]:
    return request["calls"]["arguments"] if request.get("calls") else []


def _file(text: str = "") -> int:
    """A file in memory: no pipe that somebody has to empty, and bounded by the limit on files."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("stream", os.MFD_CLOEXEC)
    else:
        descriptor, name = tempfile.mkstemp()
        os.unlink(name)
    rest = memoryview(text.encode("utf-8", "surrogatepass"))
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _text(descriptor: int, most: int) -> str:
    return os.pread(descriptor, most, 0).decode("utf-8", "replace")


def _become(
    request: Mapping[str, Any], isolation: Isolation, scratch: str, streams: list[int], nonce: str, keeper: int
) -> NoReturn:
    """The new process: gives up what it could do harm with, in an order in which each step is still allowed."""
    leave = os._exit  # nothing that the program breaks may lead back to where this was called
    try:
        others = 0 if isolation.namespaces or isolation.uid is not None else threads_of(os.getuid(), isolation.proc)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGPIPE else signal.SIG_IGN)
        os.setsid()
        kept = [os.dup(each) for each in streams]
        for place, descriptor in enumerate(kept):
            os.dup2(descriptor, place)
        os.closerange(CLOSED_FROM, 65536)
        os.chdir(scratch)
        os.umask(0o077)
        os.environ.clear()
        os.environ["TMPDIR"] = scratch
        tempfile.tempdir = None  # its keeper has asked for the folder of all
        _limit(request["limits"], isolation, others)
        kernel.drop(isolation.uid)
        with suppress(OSError):
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if not isolation.namespaces and os.getppid() != keeper:
            os._exit(NOT_LOCKED_IN)
        if isolation.landlock and not isolation.namespaces:
            filters.confine(isolation.visible, scratch, isolation.landlock)
        if isolation.seccomp is not None:
            own = isolation.denied or filters.compiled(isolation.seccomp, only=os.getpid(), landlock=isolation.landlock)
            filters.deny(own)
        child.Results(RESULTS, nonce).write("begun", 0, None)
    except BaseException as error:
        with suppress(BaseException):
            os.write(2, repr(error).encode("utf-8", "replace"))
        leave(NOT_LOCKED_IN)
    try:
        child.run(request, RESULTS, nonce)
    finally:
        leave(1)


def _limit(limits: Mapping[str, Any], isolation: Isolation, others: int) -> None:
    """Resource limits; `others` are processes that count against that of this user, and are none of the program's."""
    seconds = limits["total_seconds"] if limits["calls"] else limits["seconds"]
    kernel.limit(resource.RLIMIT_AS, isolation.base_bytes + limits["memory_mb"] * MB)
    kernel.limit(resource.RLIMIT_CPU, max(1, int(seconds + 0.999)))
    kernel.limit(resource.RLIMIT_FSIZE, limits["output_kb"] * 1024)
    kernel.limit(resource.RLIMIT_NOFILE, 64)
    kernel.limit(resource.RLIMIT_CORE, 0)
    kernel.limit(resource.RLIMIT_NPROC, others + limits["processes"])
    for name, value in (("RLIMIT_MEMLOCK", 0), ("RLIMIT_MSGQUEUE", 0), ("RLIMIT_SIGPENDING", 256)):
        if hasattr(resource, name):
            kernel.limit(getattr(resource, name), value)


def _watch(
    pid: int, reading: int, limits: Mapping[str, Any], nonce: str, isolation: Isolation, calls: int
) -> tuple[list[str], str | None, int, float]:
    """Waits for the end of the program or makes it: its lines, our verdict if we did, its status, its CPU time."""
    began = call = time.monotonic()
    most = limits["output_kb"] * 1024 + 4096
    buffer, size = b"", 0
    verdict: str | None = None
    lines: list[str] = []
    steps = _steps(calls)
    due = next(steps)
    ended = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    waiting = select.poll()
    waiting.register(reading, select.POLLIN)
    if ended >= 0:
        waiting.register(ended, select.POLLIN)
    looked = began
    while True:
        now = time.monotonic()
        left = min(call + limits["seconds"], began + limits["total_seconds"]) - now
        if left <= 0:
            verdict = "timeout"
            break
        if now - looked >= TICK:  # also while it writes without end
            looked = now
            verdict = excess(limits["memory_mb"] * MB, limits["processes"], isolation.proc)
            if verdict:
                break
        ready = dict(waiting.poll(1000 * min(left, TICK if ended >= 0 else TICK / 10)))
        if reading in ready:
            more = os.read(reading, 65536)
            if not more:
                waiting.unregister(reading)
            buffer, size = buffer + more, size + len(more)
            *whole, buffer = buffer.split(b"\n")
            for line in whole:
                if line.startswith(nonce.encode() + b" "):
                    lines.append(line[len(nonce) + 1 :].decode("ascii", "replace"))
                    if lines[-1].startswith(due):
                        call, due = time.monotonic(), next(steps, ())
            if size > most or len(lines) > calls + 4:
                verdict = "error"
                break
            continue
        if ended in ready or (ended < 0 and _has_ended(pid)):
            break
    status, cpu = _bury(pid)
    return lines, verdict, status, cpu


def _steps(calls: int) -> Iterator[tuple[str, ...]]:
    """How the lines begin after which the clock of a call starts anew, in their order: a program that writes others to
    its descriptor gains no time by them."""
    yield ("begun 0 ",)
    if calls:
        yield ("loaded 0 ",)
    for number in range(calls):
        yield (f"value {number} ", f"raised {number} ")


def _bury(pid: int) -> tuple[int, float]:
    """Kills the process and its group, which in namespaces of its own is everything, and waits for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def _has_ended(pid: int) -> bool:
    """True once it can be waited for, which this does not do."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _judged(status: int, cpu: float, limits: Mapping[str, Any], sizes: list[int], most: int) -> str:
    """How a program ended that ended by itself."""
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu >= int(limits["seconds"])):
        return "timeout"
    if status == -signal.SIGKILL:
        return "memory"
    return "ok" if status == 0 and max(sizes) < most else "error"


def _sweep(proc: int) -> None:
    """Where no namespace ends with the program: kills what it left, which the kernel has given to this process."""
    end = time.monotonic() + BURIAL_SECONDS
    while time.monotonic() < end:
        for each in list(family(os.getpid(), proc))[1:]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
