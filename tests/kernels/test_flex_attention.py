"""What a GPU's kernel is told about a row is what the pieces of `attention.py` compute, and where it cannot be used."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from stretto.algorithms.base import build
from stretto.kernels.cuda import flex_attention as flex
from stretto.kernels.cuda.flex_attention import FlexTree
from stretto.models.attention import TreeLayout
from stretto.models.segments import Segment
from stretto.recipe.schema import AlgorithmSection
from stretto.training import packing
from stretto.training.packing import merge
from tiny import CPU, credited, distance, random_groups, scratch_policy, step
from trees import trees

ALGORITHM = build(AlgorithmSection(name="rloo"))


@pytest.fixture(autouse=True)
def fresh_trials():
    """What one test found out about the kernel is nothing to the next."""
    flex.usable.cache_clear()
    yield
    flex.usable.cache_clear()


def visible(tree, window):
    """(T, T) by the definition: the key's segment is on the query's path, and no later than the query."""
    owner = np.repeat(np.arange(len(tree.segments)), [segment.length for segment in tree.segments])
    path = np.array(
        [[key in (*s.ancestors, n) for key in range(len(tree.segments))] for n, s in enumerate(tree.segments)]
    )
    distance = tree.positions[:, None] - tree.positions[None, :]
    return path[owner[:, None], owner[None, :]] & (distance >= 0) & (distance < (window or np.inf))


@settings(max_examples=40)
@given(
    sequences=trees(),
    window=st.sampled_from([None, 1, 3, 10, 100]),
    worth=st.sampled_from([1, 16]),
    grain=st.sampled_from([1, 4, 8]),
)
def test_the_mask_of_a_row_is_its_tree(sequences, window, worth, grain):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", worth)
        patch.setattr(flex, "GRAIN", grain)
        patch.setattr(flex, "LEAST", 2 * grain)
        tree = merge(sequences)
        kernel = FlexTree.of(tree.segments, CPU)
        mask = kernel.mask(window)
        size, length = len(kernel.reach), len(tree.tokens)
        assert size % grain == 0 and size >= max(length, 2 * grain)
        seen = create_mask(mask.mask_mod, 1, 1, size, size, device="cpu")[0, 0].numpy()
        expected = np.eye(size, dtype=bool)  # a pad sees itself, and nobody sees a pad
        expected[:length, :length] = visible(tree, window)
        np.testing.assert_array_equal(seen, expected)
        first = np.zeros(size, np.int32) if window is None else kernel.positions - (window - 1)
        some, whole = flex.blocks(kernel.reach, kernel.positions, first)
    tiles = seen.reshape(size // grain, grain, size // grain, grain)
    assert not (tiles.any((1, 3)) & ~(some | whole)).any(), "a block with pairs in it was left out"
    assert not (whole & ~tiles.all((1, 3))).any() and not (some & whole).any()
    if window is None:
        np.testing.assert_array_equal(some | whole, tiles.any((1, 3)))
        np.testing.assert_array_equal(whole, tiles.all((1, 3)) & ~np.eye(len(tiles), dtype=bool))


def test_the_kernel_is_given_just_those_blocks():
    some = np.array([[True, False, False], [True, True, False], [False, True, True]])
    number, which = flex.listed(some, CPU)
    assert number.dtype == which.dtype == torch.int32
    assert number.tolist() == [[[1, 2, 2]]]
    assert [row[:count] for row, count in zip(which[0, 0].tolist(), number[0, 0], strict=True)] == [[0], [0, 1], [1, 2]]


def test_one_compilation_serves_every_length_scale_and_window(monkeypatch):
    """Without gradients, which it has not on a CPU, and without machine code; but with all of torch's guards."""
    made = []

    def count(module, inputs):
        made.append(module)
        return module

    torch._dynamo.reset()
    kernel = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=count)
    monkeypatch.setattr(flex, "compiled", lambda: kernel)
    monkeypatch.setattr(flex, "usable", lambda *asked: True)
    rng = np.random.default_rng(0)
    for groups, scale, window in [(3, None, None), (1, 4**-0.5, None), (5, None, 9), (2, None, 300)]:
        stems = [rng.integers(0, 9, 60) for _ in range(groups)]
        tree = merge([np.append(stem, rng.integers(0, 9, rng.integers(1, 90))) for stem in stems for _ in range(2)])
        states = [torch.randn(1, heads, len(tree.tokens), 4, dtype=torch.float64) for heads in (4, 2, 2)]
        fused = FlexTree.of(tree.segments, CPU).attend(*states, scale=scale, window=window)
        pieces = TreeLayout.of(tree.segments, CPU).attend(0, *states, scale=scale, window=window)
        torch.testing.assert_close(fused, pieces, rtol=1e-12, atol=1e-13)
    assert len(made) == 1
    torch._dynamo.reset()


@pytest.fixture
def dense(monkeypatch):
    """In the kernel's place, plain attention under the mask that the kernel is given; for fp64 too."""

    def plain(query, key, value, *, block_mask, scale, enable_gqa):
        place = torch.arange(query.shape[2])
        mask = block_mask.mask_mod(place, place, place[:, None], place[None, :])
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(flex, "compiled", lambda: plain)
    monkeypatch.setattr(flex, "ALLOWED", {**flex.ALLOWED, torch.float64: 1e-12})
    monkeypatch.setattr(flex, "SMALLEST_HEAD", 1)


def on_gpu(monkeypatch):
    """Rows as they are laid out on a GPU."""

    def of(segments, device):
        return TreeLayout(segments=tuple(segments), whole=FlexTree.of(segments, device))

    monkeypatch.setattr(TreeLayout, "of", of)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_through_the_kernel_has_the_gradient_of_a_step_in_pieces(monkeypatch, dense, checkpointing):
    policy, samples = scratch_policy(), credited(ALGORITHM, random_groups(5))
    expected = step(policy, ALGORITHM, samples)
    on_gpu(monkeypatch)
    found = step(policy, ALGORITHM, samples, token_budget=200, checkpointing=checkpointing)
    assert distance(expected.gradients, found.gradients) < 1e-10


def test_a_mask_is_made_once_for_all_layers(monkeypatch, dense):
    policy, made = scratch_policy(layers=3), []
    tree = merge([np.arange(9)])
    monkeypatch.setattr(flex, "sight", lambda *tables, make=flex.sight: made.append(tables) or make(*tables))
    monkeypatch.setattr(flex, "usable", lambda *asked: True)
    layout = TreeLayout(segments=tree.segments, whole=FlexTree.of(tree.segments, CPU))
    policy.hidden(torch.as_tensor(tree.tokens), torch.as_tensor(tree.positions), layout)
    assert len(made) == 1
    assert layout.blocks == []


@pytest.mark.parametrize(
    ("dtype", "size", "reason"),
    [
        (torch.float32, 8, "smaller than 16"),
        (torch.float32, 16, "backward on CPU"),
        (torch.float64, 16, None),
    ],
)
def test_where_the_kernel_cannot_be_used_pieces_give_the_same_and_that_is_said_once(dtype, size, reason):
    tree = merge([np.arange(30), np.append(np.arange(20), 7), np.append(np.arange(20), [8, 9])])
    states = [torch.randn(1, heads, len(tree.tokens), size, dtype=dtype) for heads in (4, 2, 2)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            layout = TreeLayout(segments=tree.segments, whole=FlexTree.of(tree.segments, CPU))
            found = layout.attend(0, *states, scale=None, window=5)
    blocks = TreeLayout(segments=tree.segments)
    assert torch.equal(found, blocks.attend(0, *states, scale=None, window=5))
    told = [str(warning.message) for warning in said if "FlexAttention for" in str(warning.message)]
    assert len(told) == (reason is not None)
    assert all(reason in text and "exact attention in blocks" in text for text in told)


def test_a_kernel_whose_result_is_off_is_not_used(monkeypatch):
    def off(query, key, value, **keywords):
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    monkeypatch.setattr(flex, "compiled", lambda: off)
    with pytest.warns(UserWarning, match="its result is off by"):
        assert not flex.usable(CPU, torch.float32, (4, 2, 16, 16), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_that_is_right_passes_its_trial_even_inside_a_recomputed_forward(dense, dtype):
    given, tried = torch.randn(3, requires_grad=True), []

    def forward(tensor):
        tried.append(flex.usable(CPU, dtype, (4, 2, 16, 16), None))
        return (tensor * tensor).sum()

    torch.utils.checkpoint.checkpoint(forward, given, use_reentrant=False).backward()
    assert tried == [True, True]
    torch.testing.assert_close(given.grad, 2 * given.detach())


def test_segments_that_do_not_stand_depth_first_are_refused():
    segments = [
        Segment(start=0, length=2, ancestors=()),
        Segment(start=2, length=2, ancestors=()),
        Segment(start=4, length=2, ancestors=(0,)),
    ]
    with pytest.raises(ValueError, match="depth first"):
        FlexTree.of(segments, CPU)
