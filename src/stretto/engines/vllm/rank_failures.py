"""Why one of several ranks of vLLM has failed. vLLM says so in its log alone, and its host hears only that one has.

The rank, which is told to write it into a file, and the host, which reads that, have no other way to each other then.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch

REFUSALS = (ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError)
"""How vLLM says that it cannot do what it was asked for."""

FOLDER = "STRETTO_ENGINE_FOLDER"
"""The variable by which the host tells the ranks where files between them lie."""

EXECUTOR = "vllm.v1.executor.multiproc_executor"
"""The logger that a rank tells its failures."""

FAILED = "failed"
"""The file."""


class FailureFile(logging.Handler):
    """Writes down the last refusal that was logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        """One record of the log."""
        error = record.exc_info[1] if record.exc_info else None
        kind = next((number for number, each in enumerate(REFUSALS) if isinstance(error, each)), None)
        if kind is not None:
            part = self.folder / f"{FAILED}-{os.getpid()}"
            try:
                part.write_text(json.dumps([kind, str(error)]), "utf-8")
                part.rename(self.folder / FAILED)  # whole, whoever else writes it
            except OSError:  # such as a full folder: then the host hears only that one has failed
                self.handleError(record)


def write_failures() -> None:
    """Lets this rank write down why it fails, if a host has asked for that."""
    if folder := os.environ.get(FOLDER):
        logging.getLogger(EXECUTOR).addHandler(FailureFile(Path(folder)))


def read_failure(folder: Path) -> Exception | None:
    """What a rank has refused, once."""
    try:
        kind, words = json.loads((folder / FAILED).read_text("utf-8"))
    except FileNotFoundError:
        return None
    (folder / FAILED).unlink()
    return REFUSALS[kind](words)
