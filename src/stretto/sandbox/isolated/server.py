"""The main program of a sandbox server: stays warm, and forks a keeper for every program it is given.

It is started as a file (`python -P -S server.py FD PARENT LONGEST MODE PACKAGES PATH...`) with hardly any environment,
imports what programs commonly import, and never runs a program itself. Requests and answers are JSON lines as in
`worker`. In mode `namespaces` it first moves into a root folder that holds Python, the packages and the system's
libraries, and fails where the kernel does not permit that; in mode `limits` it does not try. It dies with its parent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import resource
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.append(ROOT)

from stretto.sandbox import worker  # noqa: E402
from stretto.sandbox.isolated import filters, kernel  # noqa: E402
from stretto.sandbox.isolated.keeper import Isolation, keep  # noqa: E402

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
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")


def prepare(mode: str, packages: Sequence[str]) -> Isolation:
    """Loads what programs may want, and goes where they can do no harm. OSError where that is not permitted."""
    for name in COMMON:
        importlib.import_module(name)
    visible = [*LIBRARIES, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    visible += [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
    for name in packages:
        visible += package_paths(name)
        with suppress(ImportError):
            importlib.import_module(name)
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed(0)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if os.path.isdir("/proc/self") else -1
    seccomp, landlock = filters.library(), filters.landlock_version()
    denied = b"" if seccomp is None or mode != "namespaces" else filters.compiled(seccomp)
    uid = kernel.spare_uid()
    kept = tuple(dict.fromkeys(os.path.realpath(path) for path in visible if os.path.exists(path)))
    if mode == "namespaces":
        kernel.enter(dict.fromkeys([*visible, *kept]))
    return Isolation(
        namespaces=mode == "namespaces",
        uid=uid,
        seccomp=seccomp,
        denied=denied,
        landlock=landlock,
        visible=kept,
        proc=proc,
        base_bytes=worker.occupied() if mode != "namespaces" else _occupied(proc),
    )


def package_paths(name: str) -> list[str]:
    """The folders of a package: its own, and that of the libraries that its wheel carries."""
    with suppress(ImportError, ValueError):
        spec = find_spec(name)
        if spec is not None:
            found = [os.path.abspath(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
            return [*found, *(f"{place}.libs" for place in found)]
    return []


def readable(path: str) -> bool:
    """True if everybody may read a file, and enter every folder on the way to it."""
    with suppress(OSError):
        folders = [str(each) for each in pathlib.Path(path).resolve().parents]
        return all(os.stat(each).st_mode & 0o001 for each in folders) and bool(os.stat(path).st_mode & 0o004)
    return False


def _occupied(proc: int) -> int:
    """Bytes of address space that this process has."""
    descriptor = os.open("self/statm", os.O_RDONLY, dir_fd=proc)
    try:
        return int(os.read(descriptor, 100).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)


def answer(line: int, number: bytes, request: dict[str, Any], isolation: Isolation) -> None:
    """Forks a keeper, which answers itself, and waits for it; answers for one that died."""
    pid = os.fork()
    if pid == 0:
        try:
            with suppress(OSError):
                worker.die_with(os.getppid())
            try:
                found = {"result": keep(request, isolation)}
            except OSError as error:
                found = {"error": {"type": "OSError", "message": str(error)}}
            worker.send(line, number + b" " + worker.encode(found))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        worker.send(line, number + b" " + worker.encode({"error": {"type": "OSError", "message": "its keeper died"}}))


def main(line: int, parent: int, mode: str, packages: Sequence[str]) -> None:
    """Serves programs until the line ends."""
    worker.die_with(parent)
    os.set_inheritable(line, False)
    try:
        isolation = prepare(mode, packages)
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
    sys.path += sys.argv[6:]
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4], [name for name in sys.argv[5].split(",") if name])
