"""One process at a time trains in a run folder: RUN/.lock names it, and shows whether it still lives.

Three signs, because none is right everywhere. The file is locked (flock) while its process lives, which the kernel
knows best, but a network file system may tell nobody else. It names the process, with the time of its start and the
boot of its kernel, so that on one machine a dead process, a number that was given to another, and a restart are seen at
once. And it is touched every few seconds: a process of another machine counts as dead when it was silent for two
minutes, by the clock of whoever keeps the file.

A process that was frozen while another took its run over finds another file at the path, or another's name in it, or
no file, and stops before it writes (`still_held`). What only reads a run (`eval`) asks for no lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from stretto.errors import RecipeError, StrettoError
from stretto.storage.atomic import read_small, storing, to_json, write_all

NAME = ".lock"
"""The file's name in the run folder."""

BEAT = 10.0
"""Seconds between two touches."""

SILENCE = 120.0
"""Seconds without one after which a process of another machine counts as dead."""

REBOOT = 30.0
"""The same for this machine before it was started again; it guards against two machines of one name."""

BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What flock says where another holds the lock; all else means that there are no locks here."""

_held: dict[int, Path] = {}
"""Descriptor -> path of each lock of this process; a forked child closes them, or the lock would outlive its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, named so that no other on any machine at any time has the same name."""

    host: str
    """What its machine is called."""
    machine: str
    """The machine's own id, where it has one."""
    boot: str
    """Of its kernel, since the machine was started; empty where that is not known."""
    space: str
    """In which its number counts: a container has its own."""
    pid: int
    """The process's number."""
    started: str
    """When it was started, in ticks since the boot; empty where that is not known."""


def here() -> Owner:
    """This process."""
    return Owner(
        host=platform.node(),
        machine=_read("/etc/machine-id"),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        space=_space(),
        pid=os.getpid(),
        started=start_of(os.getpid()) or "",
    )


def lives(owner: Owner | None, me: Owner, *, locked: bool | None, silent: float) -> bool:
    """True unless it is certain enough that the process which a lock names is dead.

    `locked` says whether somebody holds the file's lock, none where nobody can tell; `silent` is since when it was not
    touched.
    """
    if locked:
        return True
    if owner is None:  # a process that was killed before it wrote its name, or is about to
        return locked is None and silent < SILENCE
    if owner.boot == me.boot and (owner.boot or owner.host == me.host):
        if owner.space == me.space:
            started = start_of(owner.pid)
            return started is not None and (started == owner.started if started and owner.started else locked is None)
        return locked is None and silent < SILENCE
    rebooted = (owner.host, owner.machine) == (me.host, me.machine)
    return silent < (REBOOT if rebooted else SILENCE)


def start_of(pid: int) -> str | None:
    """When a process of this machine was started; empty if it lives and nobody says when, none if it does not."""
    try:
        state, *numbers = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except ValueError:
        try:
            os.kill(pid, 0)
        except PermissionError:
            return ""
        except (OSError, OverflowError):
            return None
        return ""
    return None if state in "ZX" else numbers[18]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Within it, this process is the one that trains in the folder; a RecipeError names another that does."""
    me = here()
    path = (folder / NAME).absolute()  # whatever the working directory becomes
    with storing(path):
        handle = _take(folder, me)
    _held[handle] = path
    done = threading.Event()
    beat = threading.Thread(target=_touch, args=(handle, done), name="lock", daemon=True)
    try:
        beat.start()
        yield
    finally:
        if os.getpid() == me.pid:
            done.set()
            beat.join()
            _held.pop(handle, None)
            with suppress(OSError):
                if _same(handle, path) and _owner(path) == me:
                    path.unlink()
            with suppress(OSError):
                os.close(handle)


def still_held(folder: Path) -> None:
    """Ends a process whose lock on the run is gone, before it writes there.

    Another process takes a lock over after two minutes of silence, or when the user removed the file.
    """
    path = (folder / NAME).absolute()
    handle = next((handle for handle, held in _held.items() if held == path), None)
    try:
        same = handle is None or _same(handle, path)
    except OSError:  # a network that is away for a moment; a write will find out
        return
    owner, me = _owner(path), here()
    if same and owner in (None, me):
        return
    other = "another process may have trained"
    if owner is not None and owner != me:
        other = f"process {owner.pid} on {owner.host} trains"
    raise StrettoError(
        f"{folder}: {other} there by now, as this one's lock ({path.name}) was removed or gave no sign of life for "
        f"{SILENCE:g} s; this process stops\n"
        f"    fix: look at the run, and continue it with `stretto resume {folder}` where it is not finished"
    )


def is_held(folder: Path) -> bool:
    """True if a process trains in the folder, as far as can be told without asking for its lock."""
    path = folder / NAME
    try:
        silent = time.time() - path.stat().st_mtime
    except OSError:
        return False
    return lives(_owner(path), here(), locked=None, silent=silent)


def _take(folder: Path, me: Owner) -> int:
    """The lock's descriptor, with our name in the file."""
    path = folder / NAME
    while True:
        handle, new = _opened(path)
        try:
            locked, owner, silent = _locked(handle), _owner(path), _silence(handle, folder)
            if not _same(handle, path):  # its owner has just gone, and the file with it
                os.close(handle)
                continue
            if (locked or not new) and lives(owner, me, locked=locked, silent=silent):
                raise _refusal(folder, owner, me, silent)
            _sign(handle, path, me)
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        return handle


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, and whether it was made for that."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False


def _sign(handle: int, path: Path, me: Owner) -> None:
    """Writes our name; where the disk is full, no file is left that would name nobody."""
    try:
        os.ftruncate(handle, 0)
        write_all(handle, to_json(asdict(me)).encode("ascii"), 0)
        os.fsync(handle)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _refusal(folder: Path, owner: Owner | None, me: Owner, silent: float) -> RecipeError:
    who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
    fix = "wait for it, or stop it with Ctrl-C or `kill -INT`"
    if owner is None or (owner.boot, owner.space) != (me.boot, me.space):
        fix += (
            f"; if it is dead, try again when it has been silent for {SILENCE:g} s (now {max(0.0, silent):.0f} s), or "
            f"remove {folder / NAME}"
        )
    return RecipeError.of(str(folder), f"{who} is training there", fix)


def _locked(handle: int) -> bool | None:
    """True if another holds the lock, False if we do now, none where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in BUSY else None
    return False


def _same(handle: int, path: Path) -> bool:
    """Whether the path still leads to the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _silence(handle: int, folder: Path) -> float:
    """Seconds since the file was touched, both times as whoever keeps the files tells them."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime - os.fstat(handle).st_mtime


def _owner(path: Path) -> Owner | None:
    """Whom the file names, opened anew so that a network file system looks; none if it names nobody."""
    try:
        told = json.loads(read_small(path).decode("ascii"))
        kinds = {"pid": int}
        known = {field.name: told[field.name] for field in fields(Owner)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Owner(**known) if all(type(value) is kinds.get(name, str) for name, value in known.items()) else None


def _touch(handle: int, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with suppress(OSError):
            os.utime(handle)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _forget() -> None:
    """In a forked child: the lock is its parent's."""
    while _held:
        with suppress(OSError):
            os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_forget)
