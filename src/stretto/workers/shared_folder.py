"""A folder of the driver's host, which a worker reads and writes in place, or in pieces that the driver passes on.

The parts of a checkpoint are written by those who hold them. A worker whose host has the same folder (this host, or a
shared file system) uses it directly. Others keep a copy for a moment, which the driver fetches or sends piece by piece:
it writes each to the disk at once, and holds no more than one. Whether a host has the folder is not asked of anybody's
configuration: it has, if it finds the same files there, with the same sizes and times.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

PIECE = 16 * 2**20
"""Bytes that travel at once."""


class SavedFiles(NamedTuple):
    """What a worker has written."""

    fetched: list[str]
    """Names of the files that the driver is to fetch."""
    hashes: dict[str, str]
    """Name -> XXH3, of files that were hashed as they were written."""


Listing = dict[str, tuple[int, int]]
"""File of a folder -> its size, and when it was changed."""


def listing(folder: Path) -> Listing:
    """What is in a folder; nothing where this host has none."""
    try:
        found = {path.name: path.stat() for path in folder.iterdir() if path.is_file()}
    except OSError:
        return {}
    return {name: (about.st_size, about.st_mtime_ns) for name, about in found.items()}


def emptied(folder: Path) -> Path:
    """The folder, new, with one file of a name that no other folder has."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = folder / f".{secrets.token_hex(8)}"
    mark.touch()
    return mark


class HostFolder:
    """A worker's end: the driver's folder, or what stands for it on this host while files travel."""

    def __init__(self) -> None:
        self.own: TemporaryDirectory[str] | None = None

    def at(self, folder: Path, there: Listing) -> Path:
        """Where to write what belongs into the driver's folder, in which the driver has found `there` when it began;
        others may have written to it since."""
        return folder if there.items() <= listing(folder).items() else self.copy()

    def copy(self) -> Path:
        """This host's own."""
        if self.own is None:
            self.own = TemporaryDirectory(prefix="stretto-")
        return Path(self.own.name)

    def names(self) -> list[str]:
        """What is in it, for the driver to fetch; nothing where the driver's own folder was written to."""
        if self.own is None:
            return []
        folder = self.copy()
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def read(self, name: str, start: int) -> bytes:
        """A piece of a file; an empty one at its end."""
        with (self.copy() / name).open("rb") as file:
            file.seek(start)
            return file.read(PIECE)

    def append(self, name: str, piece: bytes) -> None:
        """Another piece of a file."""
        with (self.copy() / name).open("ab") as file:
            file.write(piece)

    def clear(self) -> None:
        """Removes the copy; a process that is killed would leave it behind."""
        if self.own is not None:
            self.own.cleanup()
            self.own = None


async def fetch(folder: Path, name: str, read: Callable[[str, int], Awaitable[bytes]]) -> None:
    """Writes a worker's file into the driver's folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while piece := await read(name, file.tell()):
            file.write(piece)


async def send(path: Path, append: Callable[[str, bytes], Awaitable[None]]) -> None:
    """Copies a file of the driver's to a worker."""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            await append(path.name, piece)
