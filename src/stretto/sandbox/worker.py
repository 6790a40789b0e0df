"""The main program of a worker process: reads a call, runs it, writes the answer, one JSON line each.

It is started as a file (`python -P worker.py FD PARENT MAX_REPLY PATH...`) and not as a module of the package, so that
it imports nothing but a few modules of the standard library. The lines travel over a descriptor of their own: the
user's prints cannot corrupt them. It leaves when that descriptor ends, and the kernel kills it when its parent dies,
even in the middle of a call. What it does not stop: processes that user code starts and detaches from its group.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import sys
import traceback
from typing import Any

MAX_MESSAGE = 2000
"""Characters kept of what an exception says."""
TRACE_LINES = 3
"""Frames of the user's file that are reported."""
PR_SET_PDEATHSIG = 1
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def die_with(parent: int) -> None:
    """Asks Linux to kill this process when its parent dies; elsewhere the end of the descriptor has to do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def find(target: str) -> Any:
    """Imports the module of `module:name` and returns what `name` is there."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target!r} is not of the form module:name")
    return getattr(importlib.import_module(module), name)


def limit(memory_bytes: int | None, cpu_seconds: float | None) -> list[tuple[int, tuple[int, int]]]:
    """Lowers the soft limits for one call and returns what they were. CPU time counts from now on."""
    wanted: dict[int, int] = {}
    if memory_bytes is not None:
        wanted[resource.RLIMIT_AS] = memory_bytes
    if cpu_seconds is not None:
        wanted[resource.RLIMIT_CPU] = math.ceil(sum(os.times()[:2]) + cpu_seconds)
    before = [(kind, resource.getrlimit(kind)) for kind in wanted]
    for kind, (_, hard) in before:
        soft = wanted[kind] if hard == resource.RLIM_INFINITY else min(wanted[kind], hard)
        resource.setrlimit(kind, (soft, hard))
    return before


def plain(value: Any) -> Any:
    """Numbers of numpy, torch and the like become plain ones; anything else is no JSON value."""
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"the result holds a {type(value).__name__}, which is not a JSON value")


def said(error: BaseException) -> str:
    """What an exception says, even if saying it fails."""
    try:
        return str(error)[:MAX_MESSAGE]
    except Exception:
        return "(its message could not be made)"


def failure(error: BaseException, target: str) -> dict[str, str]:
    """The exception as text, with the last frames of the user's file rather than ours."""
    module = sys.modules.get(target.partition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    others = [
        frame
        for frame in frames
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen")
    ]
    shown = (users or others)[-TRACE_LINES:]
    return {"type": type(error).__name__, "message": said(error), "trace": "".join(traceback.format_list(shown))}


def run(request: dict[str, Any], max_reply: int) -> bytes:
    """One call: the encoded result, or the encoded failure. SystemExit and KeyboardInterrupt are failures too."""
    target = request["target"]
    before: list[tuple[int, tuple[int, int]]] = []
    try:
        before = limit(request["memory_bytes"], request["cpu_seconds"])
        reply = encode({"result": find(target)(*request["args"])})
        if len(reply) > max_reply:
            raise ValueError(f"the result has {len(reply)} bytes, more than the {max_reply} allowed")
    except BaseException as error:
        for kind, limits in before:
            resource.setrlimit(kind, limits)
        return encode({"error": failure(error, target)})
    for kind, limits in before:
        resource.setrlimit(kind, limits)
    return reply


def encode(value: dict[str, Any]) -> bytes:
    """One line of pure ASCII, whatever characters the value holds."""
    return json.dumps(value, default=plain).encode("ascii") + b"\n"


def send(fd: int, line: bytes) -> None:
    """Writes all of it."""
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]


def main(fd: int, parent: int, max_reply: int, paths: list[str]) -> None:
    """Serves calls until the descriptor ends."""
    die_with(parent)
    os.set_inheritable(fd, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:0] = paths
    if PACKAGE_ROOT not in sys.path:
        sys.path.append(PACKAGE_ROOT)
    send(fd, encode({"ready": os.getpid()}))
    with os.fdopen(fd, "rb", closefd=False) as requests:
        for line in requests:
            send(fd, run(json.loads(line), max_reply))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
