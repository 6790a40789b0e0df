"""Tensors in a file that two processes map."""

import resource

import pytest
import torch

from stretto.engines.vllm.tensor_file import read_bucket, write_bucket


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


def test_a_bucket_for_which_there_is_no_room_is_an_error_and_no_death(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_bucket(tmp_path / "bucket", {"x": torch.zeros(1 << 15)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("row", [["x", "float32", [3], 64], ["x", "float32", [99], 0], ["x", "float32", [1], -4]])
def test_a_table_that_does_not_fit_its_file_is_refused(row, tmp_path):
    write_bucket(tmp_path / "bucket", {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="does not fit its file, at x"):
        list(read_bucket(tmp_path / "bucket", [row]))
