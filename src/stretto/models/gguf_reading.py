"""Reads a GGUF file once for all parts of it.

transformers opens the file anew for configuration, tokenizer and weights, each time walking the whole vocabulary, and
makes the same table of names for every module of a network. For SmolLM2 that is nine seconds more on a slow core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import gguf

READER, NAMES = gguf.GGUFReader, gguf.get_tensor_name_map
"""What transformers would call."""


@contextmanager
def read_once() -> Iterator[None]:
    """Whoever asks the package for a reader or a table of names gets those that there are already."""
    gguf.GGUFReader, gguf.get_tensor_name_map = _reader_of, cache(NAMES)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = READER, NAMES


def forget() -> None:
    """Lets the file go, once all of it was read."""
    _opened.cache_clear()


def _reader_of(path: str | Path) -> gguf.GGUFReader:
    stat = os.stat(path)
    return _opened(os.path.abspath(path), (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=1)
def _opened(path: str, stamp: tuple[int, int]) -> gguf.GGUFReader:
    """The reader of a file as it was at a moment."""
    return READER(path)
