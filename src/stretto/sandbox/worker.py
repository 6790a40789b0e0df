"""The main program of a worker process: reads a call, runs it, writes the answer, one JSON line each.

It is started as a file (`python -P worker.py FD PARENT MAX_REPLY PATH...`) and not as a module of the package, so that
it imports nothing but a few modules of the standard library. The lines travel over a descriptor of their own: the
user's prints cannot corrupt them. Each begins with the number of its request, and a forked child loses the descriptor,
so that no answer is taken for that of another call. The paths come last on sys.path, so that a file there replaces no
library; only the module that a call names is looked for there first, and loaded from its file. The process leaves when
the descriptor ends, and the kernel kills it when its parent dies, even in the middle of a call. What it does not stop:
processes that user code starts and detaches from its group.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

MAX_REPLY = 16 * 1024 * 1024
"""Bytes that a result may have as JSON."""
MAX_MESSAGE = 2000
"""Characters kept of what an exception says."""
TRACE_LINES = 3
"""Frames of the user's file that are reported."""
PR_SET_PDEATHSIG = 1
LOADED: set[str] = set()
"""The user's top-level modules that are imported."""
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OWN = os.path.join(PACKAGE_ROOT, "stretto", "")
"""Where files of stretto begin."""
STANDARD = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
"""Where files of Python's own library begin."""


def die_with(parent: int) -> None:
    """Asks Linux to kill this process when its parent dies; elsewhere the end of the descriptor has to do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def find(target: str, paths: Sequence[str]) -> Any:
    """Imports the module of `module:name` and returns what `name` is there; with `paths`, a function of the user's."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target!r} is not of the form module:name")
    if paths:
        load(module.partition(".")[0], paths)
    found = getattr(importlib.import_module(module), name)
    if paths:
        refuse_foreign(found, target)
    return found


def load(top: str, paths: Sequence[str]) -> None:
    """Imports a module or package that lies on `paths` from there, whatever else has its name."""
    if top in sys.stdlib_module_names:
        raise ImportError(f"{top!r} is the name of a module of Python's own; give the file another name")
    if top in LOADED:
        return
    spec = PathFinder.find_spec(top, list(paths))
    if spec is not None and spec.origin is not None:  # a mere folder does not hide an installed package
        known = sys.modules.get(top)
        if known is not None and spec.origin != getattr(known, "__file__", None):
            raise ImportError(f"{top!r} is also the name of a library that is in use; give {spec.origin} another name")
        if known is None:
            sys.modules[top] = module = module_from_spec(spec)
            if spec.loader is not None:
                try:
                    spec.loader.exec_module(module)
                except BaseException:
                    sys.modules.pop(top, None)
                    raise
    LOADED.add(top)


def refuse_foreign(found: Any, target: str) -> None:
    """A user's file may import exec or os.system, but they are no reward: that is a function written in Python, and
    not one of the standard library."""
    while isinstance(found, partial) or hasattr(found, "__wrapped__"):
        found = found.func if isinstance(found, partial) else found.__wrapped__
    if not callable(found):
        raise TypeError(f"{target} is no function but a {type(found).__name__}")
    home = str(getattr(found, "__module__", "")).partition(".")[0]
    written = hasattr(found, "__code__") or isinstance(found, type) or hasattr(type(found).__call__, "__code__")
    if home in sys.stdlib_module_names or not written:
        raise TypeError(f"{target} is no function of a Python file of yours, but one of {home or 'a compiled module'}")


def limit(memory_bytes: int | None, cpu_seconds: float | None) -> list[tuple[int, tuple[int, int]]]:
    """Lowers the soft limits for one call and returns what they were. Both count from what is used now."""
    wanted: dict[int, int] = {}
    if memory_bytes is not None:
        wanted[resource.RLIMIT_AS] = occupied() + memory_bytes
    if cpu_seconds is not None:
        wanted[resource.RLIMIT_CPU] = math.ceil(sum(os.times()[:2]) + cpu_seconds)
    before = [(kind, resource.getrlimit(kind)) for kind in wanted]
    for kind, (_, hard) in before:
        soft = wanted[kind] if hard == resource.RLIM_INFINITY else min(wanted[kind], hard)
        resource.setrlimit(kind, (soft, hard))
    return before


def occupied() -> int:
    """Bytes of address space that this process has, where the system says so."""
    try:
        with open("/proc/self/statm", encoding="ascii") as numbers:
            return int(numbers.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def plain(value: Any) -> Any:
    """Convert numbers of numpy, torch, `decimal` and `fractions`; anything else is no JSON value."""
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    if hasattr(value, "as_integer_ratio"):
        return float(value)
    raise TypeError(f"the result holds a {type(value).__name__}, which is not a JSON value")


def said(error: BaseException) -> str:
    """The message of an exception, cut to `MAX_MESSAGE`, even if making it fails."""
    try:
        text = str(error)
    except BaseException:
        return "(its message could not be made)"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} (the other {len(text) - MAX_MESSAGE:,} are cut)"


def is_users(filename: str) -> bool:
    """Return true for a file that is neither stretto's, nor Python's, nor that of an installed package."""
    known = filename.startswith(("<frozen", OWN, STANDARD))
    return not known and not any(f"{os.sep}{name}{os.sep}" in filename for name in ("site-packages", "dist-packages"))


def failure(error: BaseException, target: str = "", *, users_only: bool = False) -> dict[str, str]:
    """Return an exception as text, with the last frames of the user's files rather than ours.

    Where there are none: of the module of `target`, or of libraries, unless `users_only`. Of a group of exceptions, the
    first is told.
    """
    kind, message, inner = type(error).__name__, said(error), error
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_users(frame.filename)]
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
        message = f"{message}: {type(inner).__name__}: {said(inner)}"
        users = [each for each in traceback.extract_tb(inner.__traceback__) if is_users(each.filename)] or users
    module = sys.modules.get(target.partition(":")[0])
    targets = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    others = [
        frame
        for frame in frames
        if os.path.dirname(frame.filename) not in (os.path.dirname(__file__), os.path.dirname(json.__file__))
        and frame.filename != importlib.__file__
        and not frame.filename.startswith("<frozen")
    ]
    shown = (users if users or users_only else targets or others)[-TRACE_LINES:]
    return {"type": kind, "message": message, "trace": "".join(traceback.format_list(shown))}


def run(
    request: dict[str, Any], max_reply: int, paths: Sequence[str], functions: Mapping[str, Callable[..., Any]]
) -> bytes:
    """One call: the encoded result, or the encoded failure. SystemExit and KeyboardInterrupt are failures too.

    Without arguments (not even an empty list of them) the function is only looked up.
    """
    target, arguments = request["target"], request["args"]
    before: list[tuple[int, tuple[int, int]]] = []
    try:
        function = functions[target] if target in functions else find(target, paths)
        before = limit(request["memory_bytes"], request["cpu_seconds"])
        reply = encode({"result": None if arguments is None else called(function, arguments, request.get("reward"))})
        if len(reply) > max_reply:
            raise ValueError(f"the result has {len(reply)} bytes, more than the {max_reply} allowed")
    except BaseException as error:
        for kind, limits in before:
            resource.setrlimit(kind, limits)
        return encode({"error": failure(error, target)})
    for kind, limits in before:
        resource.setrlimit(kind, limits)
    return reply


def called(function: Callable[..., Any], arguments: Sequence[Any], reward: bool | None) -> Any:
    """What a function returns. A `reward` is called as the names of its parameters ask for."""
    if not reward:
        return function(*arguments)
    from stretto.sandbox import reward_forms  # only here: most calls need no more than this file

    return reward_forms.call(function, *arguments)


def encode(value: dict[str, Any]) -> bytes:
    """One line of pure ASCII, whatever characters the value holds."""
    return json.dumps(value, default=plain).encode("ascii") + b"\n"


def send(fd: int, line: bytes) -> None:
    """Writes all of it."""
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]


def close(fd: int) -> None:
    """Ends it, unless user code did so before."""
    with suppress(OSError):
        os.close(fd)


def main(
    fd: int, parent: int, max_reply: int, paths: list[str], functions: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Serves calls until the descriptor ends. `functions` are there from the start, by these names."""
    die_with(parent)
    os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=partial(close, fd))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for path in (PACKAGE_ROOT, *paths):
        if path not in sys.path:
            sys.path.append(path)
    me = os.getpid()
    send(fd, encode({"ready": me}))
    with os.fdopen(fd, "rb", closefd=False) as requests:
        for line in requests:
            number, _, call = line.partition(b" ")
            reply = run(json.loads(call), max_reply, paths, functions or {})
            if os.getpid() != me:  # a child that the call forked came back from it, too
                os._exit(0)
            send(fd, number + b" " + reply)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
