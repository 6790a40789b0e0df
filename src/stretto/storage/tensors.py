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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.errors import CheckpointError


def write_values(path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Writes the plain values as JSON and returns the tensors that they refer to, ready for `write_tensors`."""
    tensors: dict[str, Tensor] = {}
    path.write_text(json.dumps(_encode(state, path.stem, tensors), allow_nan=False), encoding="ascii")
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors; those that share memory are written apart."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        apart[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    try:
        save_file(apart, path)
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from error


def read_state(values: Path, tensors: Path) -> dict[str, Any]:
    """The mapping that the two files were written from; the second is missing where there were no tensors."""
    try:
        found = load_file(tensors) if tensors.exists() else {}
        state = _decode(json.loads(values.read_text(encoding="ascii")), found)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{values}: the state of {values.stem} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{values}: the state of {values.stem} is not a mapping")
    return state


def write_state(folder: Path, name: str, state: Mapping[str, Any], *, part: int = 0, of: int = 1) -> None:
    """Writes a state into a folder, or the part of it that one of several holds."""
    stem = name if of == 1 else f"{name}-{part + 1}-of-{of}"
    if tensors := write_values(folder / f"{stem}.json", state):
        write_tensors(folder / f"{stem}.safetensors", tensors)


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
