"""Weights that loading has made, in files of this host that its processes map.

Several processes of a host that cut one model would each make all of it first. Here every large tensor goes into a file
as soon as it is made, and is read from there: pages that the host has once, however many processes read them, and that
it may drop. The first process that has made a tensor writes it; a file is named by what it holds, so nobody has to
agree on anything, and what is mapped is compared with what was made. Maps are private: whoever writes to such a tensor
gets pages of its own.

Once the processes have met, all of them have loaded, and the files are removed; what is mapped stays until nobody reads
it any more. What a process that was killed has left, the next one on this host removes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import IO

import torch
import xxhash
from torch import Tensor

from stretto.models.converted import keeping

PREFIX = "stretto-weights-"
"""How names of such folders begin."""

USERS, WRITER = "users", "writer"
"""Files of a folder that are locked: by whoever may read it, and by whoever writes to it."""

SMALLEST = 1 << 20
"""Bytes of a tensor that is worth a file."""


class MappedWeights:
    """One process's way to the files of its run on this host."""

    def __init__(self, run: str, *, below: Path | None = None, smallest: int = SMALLEST) -> None:
        """`run` names what no other run is called; the folder is `below` another, that for temporary files if none is
        told."""
        self.below = below or Path(gettempdir())
        self.folder, self.smallest = self.below / f"{PREFIX}{run}", smallest
        self.users: IO[bytes] | None = entered(self.folder)
        for other in self.below.glob(f"{PREFIX}*"):
            remove_unused(other)

    def keep(self, tensor: Tensor) -> Tensor:
        """The same bits, mapped from a file; the tensor itself if it is small, or nothing that this process has made:
        on another device, or mapped already."""
        made = tensor.detach()
        if self.users is None or made.device.type != "cpu" or made.nbytes < self.smallest:
            return made
        if not made.untyped_storage().resizable():  # of somebody else's file
            return made
        flat = made.contiguous().flatten().view(torch.uint8)
        try:
            mapped = torch.from_file(str(self._file_of(flat)), shared=False, size=flat.numel(), dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            warnings.warn(f"{self.folder}: {error}; weights stay in the memory of each process", stacklevel=2)
            self.close()
            return made
        return mapped.view(made.dtype).view(made.shape) if torch.equal(mapped, flat) else made

    def close(self) -> None:
        """Looks for no file any more; the last one removes them."""
        if self.users is not None:
            self.users.close()
            self.users = None
            remove_unused(self.folder)

    def _file_of(self, flat: Tensor) -> Path:
        """The file with these bytes, written if there is none."""
        held = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())  # numpy would fix its size for good
        path = self.folder / f"{xxhash.xxh3_128_hexdigest(held)}-{flat.numel()}"
        with (self.folder / WRITER).open("ab") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not path.exists():
                begun = path.with_suffix(".part")
                try:
                    begun.write_bytes(held)
                    begun.rename(path)
                finally:
                    begun.unlink(missing_ok=True)
        return path


class LoadsBesideOthers:
    """The part of a worker that has loaded while others on its host did."""

    mapped: MappedWeights | None = None
    """The files that its weights are in, for as long as others may look for them."""

    def all_have_loaded(self) -> None:
        """Nobody looks for these files any more."""
        if self.mapped is not None:
            self.mapped.close()
            self.mapped = None


@contextmanager
def loading(run: str | None) -> Iterator[MappedWeights | None]:
    """Whatever is loaded in here lies in files of a run on this host; in memory if there is no such run, or where the
    host can have no such files."""
    found = None
    if run is not None:
        try:
            found = MappedWeights(run)
        except OSError as error:
            warnings.warn(f"{error}; weights stay in the memory of each process", stacklevel=3)
    try:
        with nullcontext() if found is None else keeping(found.keep):
            yield found
    except BaseException:
        if found is not None:
            found.close()
        raise


def entered(folder: Path) -> IO[bytes]:
    """Makes a folder that nobody removes as long as the file is open that is returned."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # it was removed, because nobody had entered it yet
            file = (folder / USERS).open("ab")
            fcntl.flock(file, fcntl.LOCK_SH)
            if is_there(file):
                return file
            file.close()


def remove_unused(folder: Path) -> None:
    """Removes a folder that no living process has entered."""
    with suppress(OSError), (folder / USERS).open("rb") as file:  # locked, another user's, or gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_there(file):
            shutil.rmtree(folder, ignore_errors=True)


def is_there(file: IO[bytes]) -> bool:
    """Whether an open file still is the one of its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False
