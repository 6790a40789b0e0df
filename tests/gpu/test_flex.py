"""FlexAttention on a GPU: values and gradients of the pieces, few compilations, steps with and without recomputing."""

import numpy as np
import pytest
import torch

from stretto.algorithms.base import build
from stretto.kernels.cuda import flex_attention as flex
from stretto.models.attention import TreeLayout
from stretto.models.load import load
from stretto.recipe.schema import AlgorithmSection
from stretto.training.packing import merge
from tiny import SCRATCH_FILES, credited, distance, random_groups, scratch_model, step

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def a_fresh_compiler():
    """Each test compiles for itself, so that it can count; fp32 means fp32."""
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    flex.usable.cache_clear()
    flex.compiled.cache_clear()


def random_tree(seed, *, groups=3, samples=5, longest=300):
    """A system prompt, groups with prompts of their own, answers of any length."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 9, 70)
    asked = [np.concatenate([system, rng.integers(0, 9, rng.integers(20, longest))]) for _ in range(groups)]
    return merge(
        [np.concatenate([ask, rng.integers(0, 9, rng.integers(1, longest))]) for ask in asked for _ in range(samples)]
    )


def values_and_gradients(attend, states, outgoing):
    inputs = [tensor.detach().requires_grad_() for tensor in states]
    output = attend(*inputs)
    return [output, *torch.autograd.grad(output, inputs, outgoing)]


CASES = {
    "plain, scaled": (torch.bfloat16, (8, 8, 64, 64), 0.1),
    "qwen2.5-0.5b": (torch.bfloat16, (14, 2, 64, 64), None),
    "qwen2.5-0.5b in fp32": (torch.float32, (14, 2, 64, 64), None),
    "qwen2.5-3b": (torch.bfloat16, (16, 2, 128, 128), None),
    "odd size": (torch.bfloat16, (4, 4, 80, 80), None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_the_values_and_gradients_of_the_pieces(case):
    dtype, heads, scale = CASES[case]
    queries, keys, size, value_size = heads
    assert flex.usable(GPU, dtype, heads, scale)
    tree = random_tree(0)
    states = [
        torch.randn(1, count, len(tree.tokens), width, device=GPU, dtype=dtype)
        for count, width in ((queries, size), (keys, size), (keys, value_size))
    ]
    outgoing = torch.randn(1, queries, len(tree.tokens), value_size, device=GPU, dtype=dtype)
    layout = TreeLayout.of(tree.segments, GPU)
    pieces = TreeLayout(segments=layout.segments)
    for window in (None, 64):
        how = {"scale": scale, "window": window}
        expected = values_and_gradients(
            lambda *inputs, how=how: pieces.attend(0, *inputs, **how),
            [tensor.double() for tensor in states],
            outgoing.double(),
        )
        found = values_and_gradients(lambda *inputs, how=how: layout.attend(0, *inputs, **how), states, outgoing)
        assert layout.blocks == [], "the kernel was not used"
        for one, other in zip(expected, found, strict=True):
            assert (other.double() - one).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-4) * one.norm()


def test_rows_of_any_length_compile_nothing_new():
    """The trial compiles with and without gradients; after it no length, tree or window does."""
    assert flex.usable(GPU, torch.bfloat16, (14, 2, 64, 64), None)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed in range(12):
        tree = random_tree(seed, groups=1 + seed % 5, longest=40 + 60 * seed)
        layout = TreeLayout.of(tree.segments, GPU)
        for window in (None, 50 + seed):
            states = [
                torch.randn(1, count, len(tree.tokens), 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
                for count in (14, 2, 2)
            ]
            layout.attend(0, *states, scale=None, window=window).sum().backward()
            with torch.no_grad():
                layout.attend(0, *states, scale=64**-0.5, window=window)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("heads", [(4, 4, 8, 8)])
def test_what_the_kernel_refuses_is_computed_in_pieces_and_said_once(heads):
    tree = random_tree(1)
    layout = TreeLayout.of(tree.segments, GPU)
    states = [torch.randn(1, heads[0], len(tree.tokens), heads[2], device=GPU) for _ in range(3)]
    with pytest.warns(UserWarning, match="exact attention in blocks"):
        layout.attend(0, *states, scale=None, window=None)
    layout.attend(0, *states, scale=None, window=None)  # a second warning would be an error
    assert layout.blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputing_on_a_gpu_changes_no_gradient(dtype):
    algorithm = build(AlgorithmSection())
    policy = load(scratch_model(width=64, heads=4, dtype=dtype), SCRATCH_FILES, seed=0, device=GPU)
    samples = credited(algorithm, random_groups(3))
    kept = step(policy, algorithm, samples)
    recomputed = step(policy, algorithm, samples, checkpointing=True)
    assert flex.usable(GPU, policy.dtype, (4, 4, 16, 16), None)
    assert distance(kept.gradients, recomputed.gradients) <= (1e-6 if dtype == "float32" else 1e-2)
