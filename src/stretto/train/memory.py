"""Running out of memory, in whatever words torch says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OutOfMemory(Exception):
    """The device has no memory left for what was tried."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns every way in which torch reports that memory is out into `OutOfMemory`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            raise OutOfMemory from error
        raise
