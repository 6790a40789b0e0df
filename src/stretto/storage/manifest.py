"""What a checkpoint says of itself, and whether that is true.

The manifest is the last file written into a checkpoint. It names the step, every part, and every file with size and
XXH3, which takes no longer than reading the file (older ones have a SHA-256, of the model's files none). It carries a
seal over its own content, so that a flipped byte in it is noticed as well. Not covered is the path of an adapter's
base, which is written anew after a move.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from stretto.errors import CheckpointError, UnreadableFileError
from stretto.storage.atomic import read_small, to_json

FORMAT = 3
"""Version of the layout; a checkpoint of a later one is refused. In the first, nothing was written in parts, and before
the third files had a SHA-256."""

GONE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP))
"""What the system says where a file is not there as it was written. All else (an I/O error, a network that is away, no
permission) may pass, so it is no damage."""

STATE = "state"
"""The folder in a checkpoint that holds the state of the parts and the manifest."""

ADAPTER, BASE = "adapter_config.json", "base_model_name_or_path"
"""PEFT's description of an adapter, and the key in it that names the base model."""

NUMBERED = re.compile(r"step-(\d{6,})")
"""The name of a checkpoint, which says its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    xxh3: str | None = None
    """Hash of the content; none in older checkpoints."""
    sha256: str | None = None
    """The same, of older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a checkpoint holds."""

    step: int
    """The step after which it was written."""
    metrics: Mapping[str, float | None]
    """The metrics of that step, so that the best checkpoint is known after a resume."""
    parts: tuple[str, ...]
    """Names of the parts whose state it holds."""
    files: Mapping[str, Entry]
    """Every file but the manifest, by its path inside the checkpoint."""


def describe(
    folder: Path,
    *,
    step: int,
    metrics: Mapping[str, float],
    parts: tuple[str, ...],
    hashes: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of a folder as it stands. `hashes` are those of files that were hashed as they were written."""
    files, known = {}, hashes or {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = Entry(size=path.stat().st_size, xxh3=known.get(name) or _hash(path, xxhash.xxh3_128))
    return Manifest(step=step, metrics=dict(metrics), parts=parts, files=files)


def write(path: Path, manifest: Manifest) -> None:
    """Writes the manifest with its seal."""
    body = json.loads(to_json({"format": FORMAT, **asdict(manifest)}))
    path.write_text(json.dumps({**body, "seal": _seal(body)}, indent=1), encoding="ascii")


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; CheckpointError says why there is none to trust."""
    path = folder / STATE / "manifest.json"
    try:
        body = json.loads(read_small(path).decode("ascii"))
        if (layout := body["format"]) not in range(1, FORMAT + 1):
            newer = isinstance(layout, int) and layout > FORMAT
            by = " by a newer version of stretto" if newer else ""
            told = f"written{by} in format {layout}, this version of stretto reads 1 to {FORMAT}"
            raise CheckpointError(f"{path}: {told}", damaged=not newer)
        seal = body.pop("seal")
        if seal != _seal(body):
            raise CheckpointError(f"{path}: its content does not match its seal")
        files = {name: Entry(**entry) for name, entry in body["files"].items()}
        return Manifest(step=body["step"], metrics=body["metrics"], parts=tuple(body["parts"]), files=files)
    except OSError as error:
        raise _unread(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: torn or not a manifest") from error


def verify(folder: Path) -> Manifest:
    """The manifest, after every file it lists was found as listed; CheckpointError names the first that was not."""
    manifest = read(folder)
    named = NUMBERED.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{folder}: is the checkpoint of step {manifest.step} under the name of another step")
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            state = path.stat()
            size = state.st_size
            if not stat.S_ISREG(state.st_mode):
                raise CheckpointError(f"{path}: is not a regular file")
            if size != entry.size and name != ADAPTER:
                raise CheckpointError(f"{path}: {size} bytes where the manifest says {entry.size}")
            for listed, kind in ((entry.xxh3, xxhash.xxh3_128), (entry.sha256, hashlib.sha256)):
                if listed is not None and _hash(path, kind) != listed:
                    raise CheckpointError(f"{path}: its content changed after it was written")
        except OSError as error:
            raise _unread(path, error) from error
    return manifest


def _unread(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read ({error.strerror})",
        damaged=error.errno in GONE or isinstance(error, UnreadableFileError),
    )


def _hash(path: Path, kind: Callable[[], Any]) -> str:
    if path.name != ADAPTER:
        with path.open("rb") as file:
            return hashlib.file_digest(file, kind).hexdigest()
    hashed = kind()
    hashed.update(_apart_from_base(path))
    told: str = hashed.hexdigest()
    return told


def _apart_from_base(path: Path) -> bytes:
    """Everything of an adapter's description but where its base is; the bytes, where it is no mapping."""
    content = read_small(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        content = json.dumps({**found, BASE: None}, sort_keys=True).encode("ascii")
    return content


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()
