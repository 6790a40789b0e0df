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

SHARED = Path("/dev/shm")
"""Where files lie in memory."""

PREFIX, LOCK = "stretto-engine-", "owner.lock"
"""How folders are called, and the file in each that its owner holds a lock of."""

_held: dict[Path, int] = {}
"""Folder -> descriptor of its lock, open as long as this process lives."""


def new_folder() -> Path:
    """A folder which this user alone may read; in memory, where the system has a place for that."""
    place = Path(SHARED if os.access(SHARED, os.W_OK) else tempfile.gettempdir())
    for left in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is in use, was just made, or is somebody else's
            os.close(_locked(left / LOCK, os.O_RDWR))
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    _held[folder] = _locked(folder / LOCK, os.O_RDWR | os.O_CREAT)
    return folder


def _locked(path: Path, how: int) -> int:
    """A descriptor that holds the lock of a file; OSError if another does."""
    handle = os.open(path, how, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
