"""Which files of a model are read when it is loaded: weights, configuration, tokenizer and chat template.

A folder may hold much else (logs, other formats of the same weights). What is never read may change, so it is left out.
The order in which weights are looked for is that of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

from stretto.models.adapter_folder import WEIGHTS as ADAPTERS
from stretto.models.source import ModelFiles

SETTINGS = (
    "*config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Patterns of everything but weights."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights, or what says which they are; the first of them that exists is read."""

ADAPTER = "adapter/"
"""How the names of an adapter's files begin."""


def files_read(files: ModelFiles) -> dict[str, Path]:
    """Name -> path of every file that loading reads; nothing for `scratch` and for what is not on this machine yet."""
    own = {} if files.adapter is None else adapter_files(files.adapter.folder)
    if files.gguf is not None:
        return {files.gguf.name: files.gguf, **own}
    config = files.config
    return {**(files_in(config.parent) if config else {}), **own}


def adapter_files(folder: Path) -> dict[str, Path]:
    """What decides of an adapter's folder: its weights. The recipe says the rest, and the tokenizer is the base's."""
    weights = next((name for name in ADAPTERS if (folder / name).is_file()), ADAPTERS[0])
    return {f"{ADAPTER}{weights}": folder / weights}


def files_in(folder: Path) -> dict[str, Path]:
    """The same of a folder as transformers saves it."""
    found = {path for pattern in SETTINGS for path in folder.glob(pattern)}
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is not None:
        found |= {weights, *(folder / name for name in _listed(weights))}
    found |= {folder / name for name in ADAPTERS}
    return {path.relative_to(folder).as_posix(): path for path in sorted(found) if path.is_file()}


def weights_fault(folder: Path) -> str | None:
    """Return the fault that index and headers of a folder's weights show, without reading a tensor, or `None`."""
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        return None
    names = [weights.name]
    if weights.suffix == ".json":
        try:
            index = json.loads(weights.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return f"{weights.name} is not a JSON document"
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()) or not listed:
            return f"{weights.name} has no `weight_map` from tensors to files"
        if not isinstance(index.get("metadata"), dict):
            return f"{weights.name} has no section `metadata`"
        names = sorted(set(listed.values()))
    for name in names:
        if name != Path(name).name or not (folder / name).is_file():
            return f"{name[:100]!r} is listed in {weights.name} and is not in the folder"
        if name.endswith(".safetensors") and (fault := _header_fault(folder / name)) is not None:
            return f"{name} {fault}"
    return None


def _header_fault(path: Path) -> str | None:
    """Return the fault of a safetensors file that its header and its size show, or `None`."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                return "has no valid safetensors header"
            header = json.loads(file.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return "has no valid safetensors header"
    return f"is truncated: {size:,} of {end:,} bytes" if size < end else None


def _listed(index: Path) -> set[str]:
    """The names of files in the folder that an index gives; none for weights themselves."""
    if index.suffix != ".json":
        return set()
    try:
        named = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()  # loading says what is wrong with it
    return {name for name in named if isinstance(name, str) and name == Path(name).name}
