"""The first lines of a GGUF file: which architecture it holds and how long a context it was made for.

The full reader of the `gguf` package takes seconds, because it walks the vocabulary; both facts stand before it. Data
is hostile: every length is checked against what is left of the file before it is read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's numbers for value types -> how `struct` reads them."""
TEXT, LIST = 8, 9
ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
"""Keys of the tokens that end a text and a turn."""
LONGEST_TEXT = 2**20
MOST_KEYS = 10_000
MOST_TENSORS = 1_000_000
MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What checks need of a GGUF file."""

    architecture: str
    """`llama`, `qwen2` and so on."""
    context: int | None
    """Longest sequence, if it stands there."""


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size

    def take(self, length: int) -> bytes:
        data = self.file.read(length) if 0 <= length <= LONGEST_TEXT else b""
        if len(data) != length:
            raise ValueError("it ends too early")
        return data

    def skip(self, length: int) -> None:
        if self.file.tell() + length > self.size:
            raise ValueError("it ends too early")
        self.file.seek(length, os.SEEK_CUR)

    def number(self, code: str) -> int | float:
        value: int | float = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def count(self) -> int:
        return int(self.number("Q"))

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8", "replace")

    def begin(self) -> tuple[int, int]:
        """How many tensors and keys the file holds."""
        if self.file.read(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, keys = int(self.number("I")), self.count(), self.count()
        if version not in (2, 3) or keys > MOST_KEYS:
            raise ValueError(f"it is of version {version} with {keys} keys; versions 2 and 3 are read")
        return tensors, keys

    def value(self, kind: int) -> str | int | float | None:
        """A scalar or a text; lists are passed over."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            raise ValueError(f"it holds a value of unknown type {kind}")
        inner, length = int(self.number("I")), self.count()
        if inner in SCALARS:
            self.skip(length * struct.calcsize("<" + SCALARS[inner]))
        elif inner == TEXT and length <= self.size // 8:
            for _ in range(length):
                self.skip(self.count())
        else:
            raise ValueError("it holds a list that cannot be")
        return None


def read_header(path: Path) -> Header:
    """Architecture and context length; raises ValueError or OSError where the file is not what it should be."""
    with open(path, "rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        _, keys = reader.begin()
        found: dict[str, str | int | float | None] = {}
        for _ in range(keys):
            name = reader.text()
            found[name] = reader.value(int(reader.number("I")))
            if f"{found.get('general.architecture')}.context_length" in found:
                break
    architecture = found.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError("it names no architecture")
    context = found.get(f"{architecture}.context_length")
    return Header(architecture=architecture, context=context if isinstance(context, int) else None)


def read_sizes(path: Path) -> dict[str, int]:
    """The whole numbers that describe the model, without the architecture in their names, and its vocabulary.

    Raises ValueError or OSError where the file is not what it should be.
    """
    sizes: dict[str, int] = {}
    with open(path, "rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        _, keys = reader.begin()
        for _ in range(keys):
            name, kind = reader.text(), int(reader.number("I"))
            if name == "tokenizer.ggml.tokens" and kind == LIST:
                reader.number("I")
                sizes.setdefault("vocab_size", reader.count())
                break
            value = reader.value(kind)
            if isinstance(value, int) and not name.startswith(("general.", "tokenizer.")):
                sizes[name.partition(".")[2]] = value
    return sizes


def read_ends(path: Path) -> frozenset[int]:
    """Tokens at which an answer ends: of a text, and of a turn, as far as the file names them. Walks the vocabulary."""
    with open(path, "rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        _, keys = reader.begin()
        found = {reader.text(): reader.value(int(reader.number("I"))) for _ in range(keys)}
    return frozenset(token for name in ENDS if isinstance(token := found.get(name), int))


def count_parameters(path: Path) -> int:
    """Numbers in all tensors, whatever they are stored as; walks the vocabulary, which takes a moment."""
    return sum(count for _, count in _tensors(path))


def has_head(path: Path) -> bool:
    """Whether the head is a tensor of its own; where it is the embedding, it is not in the file. Walks all names."""
    return any(name == "output.weight" for name, _ in _tensors(path))


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Names of all tensors, and how many numbers each has."""
    with open(path, "rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        tensors, keys = reader.begin()
        if tensors > MOST_TENSORS:
            raise ValueError(f"it claims {tensors} tensors")
        for _ in range(keys):
            reader.text()
            reader.value(int(reader.number("I")))
        for _ in range(tensors):
            name = reader.text()
            dimensions = int(reader.number("I"))
            if dimensions > MOST_DIMENSIONS:
                raise ValueError(f"it has a tensor of {dimensions} dimensions")
            count = math.prod(reader.count() for _ in range(dimensions))
            reader.skip(struct.calcsize("<IQ"))  # how it is stored, and where
            yield name, count
