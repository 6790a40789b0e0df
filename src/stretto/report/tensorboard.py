"""Metrics in TensorBoard's format, in RUN/tensorboard, beside metrics.jsonl and with the same names.

It is a sink of the journal. TensorBoard and the part of torch that writes its files are loaded only when one is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stretto.errors import StrettoError


class TensorBoard:
    """Writes one scalar per metric and step; what an earlier process wrote after step `after` is disowned."""

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        purge = None if after is None else after + 1
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge)
        except OSError as error:
            raise self._error(error) from error

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes the numbers of a step; those that are none have no point."""
        try:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Flushes and closes."""
        try:
            self._writer.close()
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> StrettoError:
        return StrettoError(
            f"{self._folder}: cannot be written ({error.strerror or error})\n"
            "    fix: make room or mend the permissions, then `stretto resume` the run"
        )
