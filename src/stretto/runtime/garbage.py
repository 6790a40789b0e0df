"""Python's cyclic garbage collector, kept away from what stays for the whole run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loaded_objects_frozen() -> Iterator[None]:
    """What is loaded by now is not looked through again; what is made from here on is collected as ever.

    A full collection walks every object that is alive: half a million modules, functions and records once PyTorch and
    transformers are loaded, a quarter of a second, every few steps, in the middle of whatever runs.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
