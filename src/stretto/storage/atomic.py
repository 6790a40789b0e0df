"""Writing files so that neither a kill nor a full disk leaves a lie behind, and reading small ones with a bound.

It knows nothing of what is written. `Disk` is the short list of operations whose order makes a checkpoint crash-proof;
`replace` swaps a whole file at once; `storing` turns what the operating system says into an error a user can act on.
`read_small` reads a run's own files.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, UnreadableFileError


class Disk:
    """The file operations of a checkpoint; a test can interrupt them one by one behind this seam."""

    def write(self, path: Path, make: Callable[[Path], object]) -> None:
        """Lets `make` put something at `path`."""
        make(path)

    def sync(self, path: Path) -> None:
        """Returns when the file or the folder's list of names is on the medium, not just in memory."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a finished folder its name, in one step that a kill cannot split."""
        source.rename(target)

    def remove(self, folder: Path) -> None:
        """Deletes a folder and all in it."""
        shutil.rmtree(folder)


RUST = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust (safetensors, tokenizers) quote the operating system, in exceptions of their own."""


@contextmanager
def storing(path: Path, error: type[StrettoError] = StrettoError) -> Iterator[None]:
    """Raises `error`, naming the file and what to do, when the operating system refuses to write."""
    try:
        yield
    except StrettoError:
        raise
    except Exception as failure:
        place, why = refusal(failure)
        if why is None:
            raise
        raise error(
            f"{place or path}: cannot be written ({why})\n"
            "    fix: make room or mend the permissions, then start again or `stretto resume` the run"
        ) from failure


def refusal(failure: Exception) -> tuple[str | None, str | None]:
    """The file that the operating system would not write, if it is known, and its reason; none if it was not that."""
    if isinstance(failure, OSError):
        return failure.filename, failure.strerror or str(failure)
    told = RUST.search(str(failure))
    return None, os.strerror(int(told[1])) if told else None


SMALL = 1 << 31
"""Max bytes of a file that is read whole; the metrics of a million steps have fewer."""


def read_small(path: Path, most: int = SMALL) -> bytes:
    """Content of a file of a run, which must be a regular file of at most `most` bytes.

    Raises: UnreadableFileError for a pipe (opening one waits for ever), a device, a folder or a larger file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableFileError(path, "not a regular file")
        if found.st_size > most:
            raise UnreadableFileError(path, f"{found.st_size:,} bytes, at most {most:,} are read")
        with open(handle, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(handle)


def unused(path: Path) -> Path:
    """The path, or with the first number behind it under which nothing is there."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def share(folder: Path) -> None:
    """Gives every file below the mode that a new file has there: libraries that write by way of temporary files leave
    them to their owner alone."""
    probe = folder / ".mode"
    handle = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        usual = stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)
        probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with suppress(OSError):  # some file systems have no modes
                path.chmod(usual)


def replace(path: Path, lines: Iterable[str]) -> None:
    """Writes the lines beside `path` and swaps them in: readers see the old content or the new, never a part."""
    draft = path.with_name(f".{path.name}.partial")
    with storing(path):
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.writelines(lines)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def to_json(value: Any, **keywords: Any) -> str:
    """Strict JSON in ASCII: numbers that are not finite become null, numpy arrays and numbers become plain ones."""
    try:
        return json.dumps(value, allow_nan=False, default=_plain, **keywords)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **keywords)


def write_all(handle: int, data: bytes, position: int | None = None) -> None:
    """Writes every byte, at `position` or where the file stands, with no buffer that a kill or an error could keep."""
    while data:
        written = os.write(handle, data) if position is None else os.pwrite(handle, data, position)
        data = data[written:]
        position = None if position is None else position + written


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value if value is None or isinstance(value, (str, int)) else _finite(_plain(value))
