"""Large files that are written once, from end to end, past the system's cache.

What a program writes usually stays in memory until somebody needs the room. For a checkpoint of many GB that nobody
reads again, finding and clearing these pages took longer than all else. So pieces go to the disk directly
(`O_DIRECT`), where the file system can do that, and are hashed on the way, so that no file is read again for its hash.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from mmap import mmap
from pathlib import Path

import xxhash

try:
    import fcntl
except ImportError:  # then all files take the usual way
    fcntl = None  # type: ignore[assignment]

PIECE = 1 << 23
"""Bytes of a piece; smaller files take the usual way."""

DIRECT = getattr(os, "O_DIRECT", 0)
"""How Linux calls it; others have no such way."""


def write(path: Path, contents: Iterable[bytes | memoryview]) -> str:
    """Writes all of it, and returns its XXH3. A disk that is full is an OSError."""
    hashed, piece, filled = xxhash.xxh3_128(), mmap(-1, PIECE), 0  # whose address is that of a page, as it has to be
    view = memoryview(piece)
    with path.open("wb", buffering=0) as file:
        for content in contents:
            left = memoryview(content).cast("B")
            while len(left):
                taken = min(len(left), PIECE - filled)
                view[filled : filled + taken] = left[:taken]
                left, filled = left[taken:], filled + taken
                if filled == PIECE:
                    hashed.update(view)
                    _put(file.fileno(), view, direct=True)
                    filled = 0
        hashed.update(view[:filled])
        _put(file.fileno(), view[:filled], direct=False)
    return hashed.hexdigest()


def _put(handle: int, content: memoryview, *, direct: bool) -> None:
    """Writes a piece; the usual way where its file system, or what is left of it, cannot go the direct one."""
    direct = _switch(handle, direct)
    while len(content):
        try:
            content = content[os.write(handle, content) :]
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = _switch(handle, False)


def _switch(handle: int, direct: bool) -> bool:
    """Lets what is written to a file pass the cache, or not; returns whether it does."""
    if fcntl is None or not DIRECT:
        return False
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | DIRECT if direct else flags & ~DIRECT)
    except OSError:
        return False
    return direct
