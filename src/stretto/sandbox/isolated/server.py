"""The main program of a sandbox server: stays warm, and forks a keeper for every program it is given.

It is started as a file (`python -P -S server.py FD PARENT LONGEST MODE LANDLOCK PACKAGES PATH...`) with hardly any
environment, imports what programs commonly import, and never runs a program itself. Requests and answers are JSON lines
as in `worker`. In mode `namespaces` it first moves into a root folder that holds Python, the packages and the system's
libraries, and fails where the kernel does not permit that; in mode `limits` it does not try, and in mode `bubblewrap`
it has been put into a container before. It dies with its parent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.append(ROOT)

from stretto.sandbox import worker  # noqa: E402
from stretto.sandbox.isolated import filters, kernel  # noqa: E402
from stretto.sandbox.isolated.keeper import Isolation, keep  # noqa: E402
from stretto.sandbox.isolated.scratch import remove  # noqa: E402
from stretto.sandbox.isolated.visible import visible_paths  # noqa: E402

COMMON = (
    "array",
    "base64",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "ctypes",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "io",
    "itertools",
    "json",
    "locale",
    "math",
    "numbers",
    "operator",
    "pathlib",
    "pprint",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "threading",
    "time",
    "types",
    "typing",
    "unicodedata",
)
"""What programs often import, loaded before they are forked."""


def prepare(mode: str, landlock: int, packages: Sequence[str]) -> Isolation:
    """Loads what programs may want, and goes where they can do no harm. OSError where that is not permitted.

    `landlock` is the newest version to use of what the kernel has.
    """
    for name in COMMON:
        importlib.import_module(name)
    visible = visible_paths(packages)
    for name in packages:
        with suppress(ImportError):
            importlib.import_module(name)
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed(0)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if os.path.isdir("/proc/self") else -1
    seccomp, landlock = filters.library(), min(landlock, filters.landlock_version())
    denied = b"" if seccomp is None or mode != "namespaces" else filters.compiled(seccomp)
    uid = kernel.spare_uid()
    if uid is not None and not entered(pathlib.Path(tempfile.gettempdir()).resolve()):
        tempfile.tempdir = "/tmp"  # the other is closed to the user that programs run as
    kept = tuple(dict.fromkeys(os.path.realpath(path) for path in visible if os.path.exists(path)))
    places = list(dict.fromkeys([*visible, *kept]))
    if mode == "namespaces":
        kernel.enter(places)
    return Isolation(
        namespaces=mode == "namespaces",
        uid=uid,
        seccomp=seccomp,
        denied=denied,
        landlock=landlock,
        visible=kept,
        scratch=kernel.scratch_among(places),
        proc=proc,
        base_bytes=worker.occupied() if mode != "namespaces" else _occupied(proc),
    )


def entered(folder: pathlib.Path) -> bool:
    """True if everybody may enter a folder, and every one on the way to it."""
    with suppress(OSError):
        return all(os.stat(each).st_mode & 0o001 for each in (folder, *folder.parents))
    return False


def readable(path: str) -> bool:
    """True if everybody may read a file, and enter every folder on the way to it."""
    with suppress(OSError):
        return entered(pathlib.Path(path).resolve().parent) and bool(os.stat(path).st_mode & 0o004)
    return False


def _occupied(proc: int) -> int:
    """Bytes of address space that this process has."""
    descriptor = os.open("self/statm", os.O_RDONLY, dir_fd=proc)
    try:
        return int(os.read(descriptor, 100).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)


def answer(line: int, number: bytes, request: dict[str, Any], isolation: Isolation) -> None:
    """Forks a keeper and waits until it has answered, but not until it has removed what the program left; answers for
    one that died."""
    scratch = isolation.scratch
    if not isolation.namespaces:
        try:
            scratch = tempfile.mkdtemp(prefix="stretto-program-")
        except OSError as error:
            worker.send(line, number + b" " + worker.encode({"error": {"type": "OSError", "message": str(error)}}))
            return
    waiting, answered = os.pipe()
    if os.fork() == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with suppress(OSError):
                worker.die_with(os.getppid())

            def reply(found: dict[str, Any]) -> None:
                worker.send(line, number + b" " + worker.encode(found))
                os.write(answered, b".")

            try:
                keep(request, isolation, scratch, lambda found: reply({"result": found}))
            except Exception as error:
                reply({"error": {"type": type(error).__name__, "message": str(error)}})
        finally:
            os._exit(0)
    os.close(answered)
    if not os.read(waiting, 1) and os.fork() == 0:  # in place of the keeper, and not in the server's turn
        try:
            os.setsid()
            died = {"type": "OSError", "message": "its keeper died", "broken": True}
            worker.send(line, number + b" " + worker.encode({"error": died}))
            if not isolation.namespaces:
                remove(scratch)
        finally:
            os._exit(0)
    os.close(waiting)


def main(line: int, parent: int, mode: str, landlock: int, packages: Sequence[str]) -> None:
    """Serves programs until the line ends."""
    worker.die_with(os.getppid() if mode == "bubblewrap" else parent)  # there it cannot see that process
    os.set_inheritable(line, False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries keepers
    try:
        isolation = prepare(mode, landlock, packages)
        state: dict[str, dict[str, Any]] = {"result": {"namespaces": isolation.namespaces, "uid": isolation.uid}}
        state["result"] |= {"seccomp": isolation.seccomp is not None, "landlock": isolation.landlock}
        state["result"] |= {"imports": isolation.namespaces or isolation.uid is None or readable(json.__file__)}
    except OSError as error:
        state = {"error": {"type": "OSError", "message": str(error)}}
    for name in [name for name in sys.modules if name.partition(".")[0] == "stretto"]:
        del sys.modules[name]
    sys.path.remove(ROOT)
    sys.argv = [""]
    gc.collect()
    gc.freeze()
    worker.send(line, worker.encode({"ready": os.getpid()}))
    with os.fdopen(line, "rb", closefd=False) as requests:
        for text in requests:
            number, _, call = text.partition(b" ")
            request = json.loads(call)
            if "code" in request and "error" not in state:
                answer(line, number, request, isolation)
            else:
                worker.send(line, number + b" " + worker.encode(state))
    os._exit(0)


if __name__ == "__main__":
    sys.path += sys.argv[7:]
    fd, parent, _, mode, landlock, packages = sys.argv[1:7]
    main(int(fd), int(parent), mode, int(landlock), [name for name in packages.split(",") if name])
