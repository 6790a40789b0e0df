"""Metrics in TensorBoard's format, in RUN/tensorboard, beside metrics.jsonl and with the same names.

It is a sink of the journal. TensorBoard and the part of torch that writes its files are loaded only when one is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.report.loggers import COLUMNS, table_rows
from stretto.report.samples_text import harmless

SHOWN, LONGEST = 8, 500
"""Answers of a step that are shown, and characters of a text."""


class TensorBoard:
    """Writes one scalar per metric and step; what an earlier process wrote after step `after` is disowned."""

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        purge = None if after is None else after + 1
        with self._told():
            self._writer = SummaryWriter(str(folder), purge_step=purge)

    def recipe(self, keys: Mapping[str, Any]) -> None:
        """The recipe as a table of text."""
        with self._told():
            self._writer.add_text("recipe", _markdown(("key", "value"), list(keys.items())))

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes the numbers of a step; those that are none have no point."""
        with self._told():
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The first answers as a table of text."""
        with self._told():
            self._writer.add_text("samples", _markdown(COLUMNS, table_rows(rows[:SHOWN])), step)

    def close(self) -> None:
        """Flushes and closes."""
        with self._told():
            self._writer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StrettoError(
                f"{self._folder}: cannot be written ({error.strerror or error})\n"
                "    fix: make room or mend the permissions, then `stretto resume` the run"
            ) from error


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table, in which what a model wrote is text and no markup."""
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(f"`{_cell(value)}`" for value in row) for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = harmless(str(value)).replace("`", "'").replace("|", "\u2502").replace("\n", " ")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
