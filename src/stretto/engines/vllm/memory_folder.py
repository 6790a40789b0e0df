"""A folder in memory, for the files that vLLM and a worker both map.

Who is killed cannot remove its own, so whoever comes next does. A lock on a file in it shows that its owner lives, in
another container too, whose processes have numbers of their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from stretto.errors import RecipeError

GB = 2**30

SHARED = Path("/dev/shm")
"""Where files lie in memory."""

PREFIX, LOCK = "stretto-engine-", "owner.lock"
"""How folders are called, and the file in each that its owner holds a lock of."""

_held: dict[Path, int] = {}
"""Folder -> descriptor of its lock, open as long as it is used or this process lives."""


def new_folder(size: int) -> Path:
    """A folder which this user alone may read, with room for so many bytes: in memory, or else on a disk.

    A RecipeError where neither has it.
    """
    places = [place for place in (SHARED, Path(tempfile.gettempdir())) if os.access(place, os.W_OK)]
    for left in (each for place in places for each in place.glob(f"{PREFIX}*")):
        with suppress(OSError):  # it is in use, or somebody else's
            os.close(_locked(left / LOCK, os.O_RDWR))
            shutil.rmtree(left, ignore_errors=True)
    free = {place: shutil.disk_usage(place).free for place in places}
    place = next((place for place in places if free[place] >= size), None)
    if place is None:
        told = " and ".join(f"{place} has {room / GB:.2f} GB" for place, room in free.items())
        reason = f"weights go to vLLM by way of files of {size / GB:.2f} GB, and {told or 'no folder is writable'}"
        raise RecipeError.of("engine.kind", reason, no_room(size))
    begun = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{os.getpid()}-", dir=place))  # nobody looks for it yet
    lock = _locked(begun / LOCK, os.O_RDWR | os.O_CREAT)
    folder = begun.rename(place / begun.name[1:])
    _held[folder] = lock
    return folder


def remove_folder(folder: Path) -> None:
    """Leaves nothing of it behind."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def no_room(size: int) -> str:
    """What to do where files of so many bytes have no room."""
    return f"docker run --shm-size={-(-size // GB) + 1}g, or clear {SHARED}; or engine.kind: native"


def _locked(path: Path, how: int) -> int:
    """A descriptor that holds the lock of a file; OSError if another does."""
    handle = os.open(path, how, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
