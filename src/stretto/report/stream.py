"""Standard streams that may go away: a terminal that is closed, a pipe that nobody reads, a full disk behind `>`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast


class Tolerant:
    """A stream for what nobody has to read: what cannot be written is lost, and whoever writes goes on.

    All else is the stream's own.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.whole = stream
        """The stream with its own errors."""

    def write(self, text: str) -> int:
        """Writes what can be written, with a question mark for letters that the stream cannot take."""
        with suppress(OSError, ValueError):  # a ValueError is what a closed one raises
            try:
                self.whole.write(text)
            except UnicodeEncodeError:
                encoding = getattr(self.whole, "encoding", None) or "ascii"
                self.whole.write(text.encode(encoding, errors="replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Hands on what was written, if it can be."""
        with suppress(OSError, ValueError):
            self.whole.flush()

    def isatty(self) -> bool:
        """False, too, where the stream is gone."""
        try:
            return self.whole.isatty()
        except (OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


class OutputLost(OSError):
    """Standard output does not take what a command was run for."""


class RequiredStream:
    """A stream for what a command was run for: that it cannot be written ends the command, and is told as what it is.

    All else is the stream's own.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.whole = stream
        """The stream with its own errors."""
        self.why: str | None = None
        """Why something could not be written."""

    def write(self, text: str) -> int:
        """Writes, or raises OutputLost; a reader that has seen enough is no failure of the stream."""
        with self._told():
            return self.whole.write(text)

    def flush(self) -> None:
        """Hands on what was written, or raises as above."""
        with self._told():
            self.whole.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            self.why = reason(error)
            raise OutputLost(getattr(error, "errno", None), self.why) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def reason(error: Exception) -> str:
    """What the system said."""
    return getattr(error, "strerror", None) or str(error)


def tolerant(stream: IO[str]) -> TextIO:
    """The stream, on which writing never fails."""
    return cast(TextIO, stream if isinstance(stream, Tolerant) else Tolerant(stream))


@contextmanager
def standard_streams(*, output_matters: bool) -> Iterator[None]:
    """Within it there are standard streams, whatever was closed, and errors can be told without failing for that.

    Where the output is what a command is for, writing to one that cannot take it raises OutputLost.
    """
    before = sys.stdout, sys.stderr
    _open_closed_ones()
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            with suppress(OSError, ValueError):
                reconfigure(errors="replace")
    sys.stdout = cast(TextIO, RequiredStream(sys.stdout)) if output_matters else tolerant(sys.stdout)
    sys.stderr = tolerant(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def delivered(stream: IO[str]) -> str | None:
    """Hands on what was written to a standard stream; if that fails, why.

    What was lost then goes nowhere, or Python would fail at it once more when it ends.
    """
    known = stream.why if isinstance(stream, RequiredStream) else None
    stream = stream.whole if isinstance(stream, Tolerant | RequiredStream) else stream
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            stream.flush()
        return known or reason(error)
    return known


def _open_closed_ones() -> None:
    """Puts something where a standard stream was closed, or the next file that is opened would be taken for it.

    What is there for writing refuses it, like a closed one, so that nobody believes to have said something.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
