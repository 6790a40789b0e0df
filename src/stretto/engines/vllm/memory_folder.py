"""A folder in memory, for the files that vLLM and a worker both map.

Its name has the number of the process that made it. Who is killed cannot remove its own, so whoever comes next does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from stretto.storage.lock import start_of

SHARED = Path("/dev/shm")
"""Where files lie in memory."""

PREFIX = "stretto-engine-"
"""How folders are called; the number of a process follows."""


def new_folder() -> Path:
    """A folder which this user alone may read; in memory, where the system has a place for that."""
    place = Path(SHARED if os.access(SHARED, os.W_OK) else tempfile.gettempdir())
    for left in place.glob(f"{PREFIX}*"):
        number = left.name.removeprefix(PREFIX).partition("-")[0]
        if number.isdigit() and start_of(int(number)) is None:
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
