"""Tensors in a file that two processes map."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto.engines.vllm.tensor_file import new_folder, read_bucket, write_bucket


def test_tensors_come_back_to_the_bit_whatever_their_type_and_shape(tmp_path):
    sent = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.tensor([float("nan"), -0.0, float("inf")]),
        "none": torch.zeros(0, 4),
        "number": torch.tensor(7, dtype=torch.int64),
    }
    table = write_bucket(tmp_path / "bucket", sent)
    held = dict(read_bucket(tmp_path / "bucket", table))
    assert held.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (held[name].dtype, held[name].shape) == (tensor.dtype, tensor.shape)
        assert held[name].flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()
    assert all(row[3] % 64 == 0 for row in table)


@pytest.mark.parametrize("row", [["x", "float32", [3], 64], ["x", "float32", [99], 0], ["x", "float32", [1], -4]])
def test_a_table_that_does_not_fit_its_file_is_refused(row, tmp_path):
    write_bucket(tmp_path / "bucket", {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="does not fit its file, at x"):
        list(read_bucket(tmp_path / "bucket", [row]))


def test_folders_of_processes_that_were_killed_are_removed_and_no_others():
    script = "import os, signal; from stretto.engines.vllm.tensor_file import new_folder as f; print(f(), flush=True);"
    killed = subprocess.run(
        [sys.executable, "-c", f"{script} os.kill(os.getpid(), signal.SIGKILL)"], capture_output=True, text=True
    )
    mine = new_folder()
    other = new_folder()
    try:
        assert killed.returncode == -9 and killed.stdout.strip()
        assert not Path(killed.stdout.strip()).exists()
        assert mine.is_dir() and other.is_dir()
    finally:
        shutil.rmtree(mine)
        shutil.rmtree(other)
