"""Attention in C is attention in tiles, which is tested against the formula, in values and in gradients."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from stretto.kernels.cpu.attention_kernels import Stretches, attention_kernels
from stretto.kernels.cpu.row_attention import RowAttention
from stretto.kernels.cpu.tiles import blocks_of
from stretto.training.packing import merge

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Largest share of all numbers by which rounding may move them."""


def row_of(answers, prompt=20):
    """A row of two groups, each with answers of these lengths."""
    prompts = np.arange(prompt), np.arange(100, 100 + 3 * prompt)
    return blocks_of(
        merge([np.array([*p, a, *[7] * length]) for p in prompts for a, length in enumerate(answers)]).segments
    )


def results(attend, states, dtype):
    """What comes out, and the gradients of queries, keys and values."""
    query, key, value, outgoing = (each.to(dtype).transpose(1, 2).requires_grad_() for each in states)
    out = attend(query, key, value)
    return [out, *torch.autograd.grad(out, (query, key, value), outgoing)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(("size", "queries", "keys"), [(64, 9, 3), (128, 4, 4), (24, 6, 1), (6, 2, 2)])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_it_is_attention_in_tiles(dtype, size, queries, keys, window, threads):
    blocks = row_of([1, 30, 4, 70])
    tokens = sum(len(block.own) for block in blocks)
    generator = torch.Generator().manual_seed(size)
    states = [
        torch.randn(1, tokens, heads, size, generator=generator).to(dtype) for heads in (queries, keys, keys, queries)
    ]
    kernels, row = attention_kernels(dtype), RowAttention(blocks=blocks)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, again = (
            results(lambda *given: row.attend(*given, scale=0.2, window=window), states, dtype) for _ in range(2)
        )
    finally:
        torch.set_num_threads(before)
    assert kernels is not None and "stretches" in vars(row), "it was computed in C"
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    expected = results(lambda *given: row.tiles.attend(*given, scale=0.2, window=window), states, torch.float64)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert (one.double() - other).norm() <= CLOSE[dtype] * other.norm()


def test_values_of_another_size_are_left_to_tiles():
    row = RowAttention(blocks=row_of([3, 5]))
    tokens = sum(len(block.own) for block in row.blocks)
    query, key, value = torch.randn(1, 4, tokens, 24), torch.randn(1, 2, tokens, 24), torch.randn(1, 2, tokens, 16)
    assert row.attend(query, key, value, scale=None, window=None).shape == (1, 4, tokens, 16)
    assert "stretches" not in vars(row)


def test_stretches_are_shared_out_by_what_they_cost():
    stretches = Stretches.of(row_of([1, 30, 4, 70, 2, 2, 40]))
    each = np.diff(stretches.work, prepend=0)
    for shares in (1, 2, 3, 50):
        cuts = stretches.cuts(shares).tolist()
        assert len(cuts) == shares + 1 and cuts == sorted(cuts) and (cuts[0], cuts[-1]) == (0, len(each))
        most = max(each[one:other].sum() for one, other in pairwise(cuts))
        assert most <= each.sum() / shares + each.max()


def test_what_is_no_number_stays_none():
    row = RowAttention(blocks=row_of([3]))
    tokens = sum(len(block.own) for block in row.blocks)
    query, key, value = (torch.randn(1, 2, tokens, 24) for _ in range(3))
    key[0, 0, 5] = float("nan")
    out = row.attend(query, key, value, scale=None, window=None)
    assert out[0, 0, 5:20].isnan().all() and out[0, 1].isfinite().all() and out[0, 0, :5].isfinite().all()


def test_a_row_of_one_token_and_a_gradient_that_is_one_number():
    row = RowAttention(blocks=blocks_of(merge([np.array([7])]).segments))
    query, key, value = (torch.randn(1, heads, 1, 24, requires_grad=True) for heads in (4, 2, 2))
    out = row.attend(query, key, value, scale=None, window=None)
    torch.testing.assert_close(out, value.repeat_interleave(2, 1))
    found = torch.autograd.grad(out.sum(), (query, key, value))  # every number of it is the same one in memory
    expected = torch.zeros_like(query), torch.zeros_like(key), torch.full_like(value, 2)
    torch.testing.assert_close(found, expected)
