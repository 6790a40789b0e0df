"""Checksums of tensors: any bit counts, and so does its place; the layout in memory and the device do not."""

import pytest
import torch

from stretto.weights import tensors
from stretto.weights.tensors import checksum, checksums

SIZE = 300 * tensors.ROW + 5
"""Words: more rows than one thread reads, and a part of one."""


def numbers(dtype=torch.bfloat16, size=4 * SIZE + 3):
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("place", [0, 1, 4 * tensors.ROW, -1])
def test_a_bit_that_flips_is_another_checksum(dtype, place):
    one = numbers(dtype)
    other = one.clone()
    other.view(torch.uint8)[place] ^= 1
    assert checksum(one) == checksum(one.clone()) != checksum(other)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 4), (4, 4 * tensors.ROW), (0, 4 * tensors.ROW), (8, -1)])
def test_numbers_that_change_places_are_another_checksum(first, second):
    one = numbers()
    other = one.clone()
    other[first], other[second] = one[second], one[first]
    assert checksum(one) != checksum(other)


def test_a_tensor_is_read_as_it_is_meant_wherever_it_lies():
    whole = numbers()
    assert checksum(whole[1:]) == checksum(whole[1:].clone())
    assert checksum(whole[:9].view(3, 3).T) == checksum(whole[:9].view(3, 3).T.contiguous())


def test_a_checksum_is_the_same_on_every_machine():
    assert checksum(torch.arange(SIZE)) == "ee6fec29ce392ab1"


@pytest.mark.parametrize("rows", [1, 2, 1 << 14])
def test_how_much_is_read_at_once_and_when_it_is_rounded_do_not_matter(rows, monkeypatch):
    wide = numbers(torch.float32)
    monkeypatch.setitem(tensors.ROWS, "cpu", rows)
    found = checksums([("w", wide)], rounded={"w": torch.bfloat16})["w"]
    monkeypatch.undo()
    assert found == checksum(wide.to(torch.bfloat16)) != checksum(wide)


def test_small_and_empty_tensors_have_one_and_all_keep_their_names():
    small = {"scalar": torch.tensor(2.0), "none": torch.zeros(0, 3), "zeros": torch.zeros(4), "more": torch.zeros(8)}
    assert list(checksums(small.items())) == list(small)
    assert len(set(checksums(small.items()).values())) == 4
