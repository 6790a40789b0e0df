"""Files that pass the system's cache hold what was written, wherever that is, and their hash is of it."""

import errno
import os

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from stretto.storage import large_file
from stretto.storage.tensors import KINDS, write_tensors


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(large_file, "PIECE", 1 << 14)


CONTENTS = [[], [b""], [b"abc"], [b"x" * (1 << 14)], [b"ab" * 5000, b"", memoryview(b"c" * 40_000), b"d"]]


@pytest.mark.parametrize("contents", CONTENTS, ids=["nothing", "empty", "small", "one piece", "several"])
@pytest.mark.parametrize("trouble", [None, "no such way", "refused when asked", "refused when written"])
def test_the_file_holds_what_was_written_and_the_hash_is_its(tmp_path, monkeypatch, contents, trouble):
    write, asked = os.write, []

    def refuses(handle, content):
        asked.append(handle)
        if large_file.fcntl.fcntl(handle, large_file.fcntl.F_GETFL) & large_file.DIRECT:
            raise OSError(errno.EINVAL, "no")
        return write(handle, content[:1000])  # and a part at a time

    if trouble == "no such way":
        monkeypatch.setattr(large_file, "DIRECT", 0)
    if trouble == "refused when asked":
        monkeypatch.setattr(large_file, "_switch", lambda handle, direct: False)
    if trouble == "refused when written":
        monkeypatch.setattr(os, "write", refuses)
    told = large_file.write(tmp_path / "file", contents)
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(map(bytes, contents))
    assert told == xxhash.xxh3_128(content).hexdigest()
    assert bool(asked) == (trouble == "refused when written" and bool(content))


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(handle, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        large_file.write(tmp_path / "file", [b"x" * 99_999])


def test_tensors_of_every_kind_come_back_as_from_the_library(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        f"{place}:{kind}".replace("torch.", ""): torch.from_numpy(rng.integers(0, 2, shape)).to(kind)
        for kind in KINDS
        for place, shape in enumerate([(), (3, 5), (0,), (2, 3, 7), (4099,)])
    }
    tensors["turned"] = torch.arange(6000.0).reshape(60, 100).T
    tensors["again"] = tensors["turned"]
    write_tensors(tmp_path / "ours", tensors)
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        assert torch.equal(ours[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
