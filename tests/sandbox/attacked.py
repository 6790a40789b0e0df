"""Runs hostile programs next to things that they could harm, as the user that it is told, and prints the harm done.

    python attacked.py < REQUEST > RESULT

Root becomes an ordinary user for good, so this is a process of its own. The request is JSON: `uid` (or null), `mode`,
`landlock`, `programs` by name. The result has for each its verdict, its output and the harm.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stretto.sandbox.isolated import ProgramLimits, Sandbox

NEWNS, PRIVATE, BIND = 0x20000, 0x44000, 4096
GETFLAGS = 0x80086601
LIMITS = ProgramLimits(seconds=2.0, memory_mb=256)


def reveal() -> None:
    """Lets every user of this process and its children read this Python, wherever it lies."""
    python = {sys.base_prefix, sys.prefix, str(Path(__file__).resolve().parents[2])}
    hidden = {each: closed for each in map(os.path.realpath, python) if (closed := _closed(each))}
    if hidden:
        _call("unshare", NEWNS)
        _call("mount", None, b"/", None, PRIVATE, None)
        opened = {path: os.open(path, os.O_PATH) for path in hidden}
        for each in set(hidden.values()):
            _call("mount", b"tmpfs", each.encode(), b"tmpfs", 0, b"mode=755")
        for path, descriptor in opened.items():
            os.makedirs(path, mode=0o755, exist_ok=True)
            _call("mount", f"/proc/self/fd/{descriptor}".encode(), path.encode(), None, BIND, None)
            os.close(descriptor)


def become(uid: int, folder: str) -> None:
    """Becomes an ordinary user that owns the folder."""
    os.chown(folder, uid, uid)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _closed(path: str) -> str | None:
    """The first folder on the way to a path that others may not enter."""
    folders = [str(each) for each in (*reversed(Path(path).parents), Path(path))]
    return next((each for each in folders if not os.stat(each).st_mode & 0o001), None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


class Host:
    """A file, a package that programs can read, sockets and a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package = folder, folder / "mine"
        self.package.mkdir()
        self.files = [folder / "kept", self.package / "__init__.py"]
        for each in self.files:
            each.write_text("kept = True\n")
            each.chmod(0o644)
            with suppress(OSError):
                os.setxattr(each, "user.kept", b"1")
            os.utime(each, (1, 1))
        self.sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        self.name = f"\0stretto-attacked-{os.getpid()}"
        for each, address in zip(self.sockets, (str(folder / "socket"), self.name), strict=True):
            each.bind(address)
            each.setblocking(False)
        self.victim = os.fork()
        if self.victim == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        self.before: dict[str, Any] = {}
        self.before = self.state()

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.before.get("the process", True):
            found["the process"] = os.waitpid(self.victim, os.WNOHANG)[0] == 0
        for each in self.files:
            found[each.name] = self.file(each)
            with suppress(OSError):
                found[f"attributes of {each.name}"] = sorted(os.listxattr(each))
            with suppress(OSError), each.open() as file:
                found[f"flags of {each.name}"] = fcntl.ioctl(file, GETFLAGS, b"\0" * 8).hex()
        found["their folder"] = os.stat(self.folder).st_mode
        for number, each in enumerate(self.sockets):
            with suppress(BlockingIOError):
                found[f"socket {number}"] = repr(each.recvfrom(100))
        return found

    def file(self, path: Path) -> Any:
        try:
            stat = path.stat()
            return path.read_text(), stat.st_mode, stat.st_uid, stat.st_mtime, stat.st_nlink
        except OSError as error:
            return str(error)

    def harm(self) -> list[str]:
        """What is not as it was when this was last asked."""
        before, self.before = self.before, self.state()
        return [name for name in {**before, **self.before} if before.get(name) != self.before.get(name)]


async def attack(request: dict[str, Any], host: Host) -> dict[str, Any]:
    """Every program, one after another; those of a list at once."""
    sys.path.append(str(host.folder))
    found: dict[str, Any] = {}
    settings = {"isolation": request["mode"], "landlock": request["landlock"], "workers": 4}
    async with Sandbox(packages=("numpy", "mine"), **settings) as sandbox:
        found["protection"] = (await sandbox.protection()).missing
        for name, programs in request["programs"].items():
            texts = [programs] if isinstance(programs, str) else programs
            named = {"FOLDER": str(host.folder), "VICTIM": str(host.victim), "ABSTRACT": host.name[1:]}
            for word, value in named.items():
                texts = [text.replace(word, value) for text in texts]
            results = await asyncio.gather(*(sandbox.run_program(text, limits=LIMITS) for text in texts))
            said = [(each.verdict, each.stdout + each.stderr + each.detail) for each in results]
            found[name] = {"said": said, "harm": host.harm()}
    left = {"kept", "mine", "socket"}
    found["left"] = sorted(set(os.listdir(host.folder)) - left)
    return found


def main() -> None:
    request = json.load(sys.stdin)
    folder = tempfile.mkdtemp(prefix="stretto-attacked-", dir="/tmp")
    os.chmod(folder, 0o755)
    keeper = os.fork()  # root removes what the user leaves
    if keeper:
        os.waitpid(keeper, 0)
        shutil.rmtree(folder)
        return
    if os.getuid() == 0:
        reveal()
        if request["uid"] is not None:
            become(request["uid"], folder)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    os.chdir(folder)
    host = Host(Path(folder))
    try:
        print(json.dumps(asyncio.run(attack(request, host))), flush=True)
    finally:
        with suppress(ProcessLookupError):
            os.kill(host.victim, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main()
