"""How the state of one part becomes files and comes back exactly: plain values as JSON, tensors as safetensors.

The mapping may nest and hold tensors anywhere. What JSON cannot say is tagged: a tensor is {"$tensor": its name in the
safetensors file}, a tuple {"$tuple": [...]}, a float that is not finite {"$float": "nan"}, a mapping with keys other
than plain strings {"$pairs": [[key, value], ...]}. Nothing is pickled, so a checkpoint cannot run code. Tensors come
back on the CPU; the part that restores them puts them where it wants them. They are views of the file, read when they
are used. A state that several processes hold is written by each of them, as NAME-1-of-2 and so on.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stretto.errors import CheckpointError
from stretto.storage import large_file
from stretto.storage.atomic import read_small

KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the types of tensors."""


def write_values(path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Writes the plain values as JSON and returns the tensors that they refer to, ready for `write_tensors`."""
    tensors: dict[str, Tensor] = {}
    path.write_text(json.dumps(_encode(state, path.stem, tensors), allow_nan=False), encoding="ascii")
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes the tensors as safetensors does, one after the other, and returns the file's XXH3; those that share memory
    are written apart."""
    header, end = dict[str, Any](), 0
    # Wide ones first, so that each begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    told = json.dumps(header, separators=(",", ":")).encode("ascii")
    told += b" " * (-len(told) % 8)
    return large_file.write(
        path, chain((struct.pack("<Q", len(told)), told), (_content(tensor) for _, tensor in ordered))
    )


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    plain = tensor.detach().cpu().contiguous().flatten()
    return memoryview(plain.view(torch.uint8).numpy() if len(plain) else b"")  # type: ignore[arg-type]  # it is a buffer


def read_state(values: Path, tensors: Path) -> dict[str, Any]:
    """The mapping that the two files were written from; the second is missing where there were no tensors."""
    try:
        found = load_file(tensors) if tensors.exists() else {}
        state = _decode(json.loads(read_small(values).decode("ascii")), found)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{values}: the state of {values.stem} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{values}: the state of {values.stem} is not a mapping")
    return state


def write_state(folder: Path, name: str, state: Mapping[str, Any], *, part: int = 0, of: int = 1) -> dict[str, str]:
    """Writes a state into a folder, or the part of it that one of several holds; returns the XXH3 of large files."""
    stem = name if of == 1 else f"{name}-{part + 1}-of-{of}"
    tensors = write_values(folder / f"{stem}.json", state)
    file = f"{stem}.safetensors"
    return {file: write_tensors(folder / file, tensors)} if tensors else {}


def read_parts(folder: Path, name: str) -> list[dict[str, Any]]:
    """What `write_state` has written, in the order of its parts."""
    count = sum(1 for _ in folder.glob(f"{name}-*-of-*.json"))
    stems = [f"{name}-{part + 1}-of-{count}" for part in range(count)] or [name]
    return [read_state(folder / f"{stem}.json", folder / f"{stem}.safetensors") for stem in stems]


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # The number alone tells them apart: what UTF-8 cannot say of a key, a file of tensors cannot hold.
        name = f"{len(tensors)}:{where}".encode(errors="replace").decode()
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{where}/{key}", tensors) for key, item in value.items()}
        pairs = [[_encode(k, where, tensors), _encode(v, f"{where}/{k}", tensors)] for k, v in value.items()]
        return {"$pairs": pairs}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{where}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"{where}: a {type(value).__name__} cannot be kept; give plain values and torch tensors")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case {"$float": text}:
            return float(text)
        case {"$pairs": pairs}:
            return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
    return {key: _decode(item, tensors) for key, item in value.items()}
