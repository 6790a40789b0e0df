"""SHA-256 of files, remembered for large ones so that a model of many GB is read once and not at every start.

What is remembered stands in `.stretto/digests.json` of the working directory, by path, size, times and inode of a file.
The kernel sets the time of a change (ctime) and no program can put it back, so a file that was written is read again.
What changes without a write (a medium that rots) is not noticed in a large file until `digests.json` is removed.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stretto.errors import StrettoError
from stretto.storage.atomic import read_small, replace

CACHE = Path(".stretto", "digests.json")
"""Beside the tables of V*."""

LARGE = 1 << 26
"""Bytes from which on a digest is remembered; smaller files are read every time, in a tenth of a second."""

MOST = 1000
"""Files that are remembered; the oldest are forgotten."""

BLOCK = 1 << 22

Stamp = list[int]
"""Size, times in nanoseconds and inode."""

_writing = threading.Lock()


def digest(path: Path, going: Callable[[], object] = lambda: None, *, cache: Path = CACHE) -> str:
    """The SHA-256 of a file, in hexadecimal. `going` is called after every block, and may raise to end it.

    `cache` is the file in which digests are remembered.
    """
    if (known := remembered(path, cache=cache)) is not None:
        return known
    stamp, hashed = _stamp(path), hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hashed.update(block)
            going()
    if stamp[0] >= LARGE and _stamp(path) == stamp:
        _remember(path, stamp, hashed.hexdigest(), cache)
    return hashed.hexdigest()


def remembered(path: Path, *, cache: Path = CACHE) -> str | None:
    """The digest of a large file that was read before and is as it was; none if it has to be read."""
    stamp = _stamp(path)
    if stamp[0] < LARGE:
        return None
    match _cache(cache).get(str(path.resolve())):
        case [list(then), str(digest)] if then == stamp:
            return digest
    return None


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _cache(cache: Path) -> dict[str, object]:
    """What is remembered; nothing if that cannot be read."""
    try:
        found = json.loads(read_small(cache).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(path: Path, stamp: Stamp, digest: str, cache: Path) -> None:
    """Where nothing can be written, nothing is remembered."""
    with _writing, suppress(OSError, StrettoError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        found = _cache(cache)
        found.pop(str(path.resolve()), None)
        found[str(path.resolve())] = [stamp, digest]
        replace(cache, [json.dumps(dict(list(found.items())[-MOST:]))])
