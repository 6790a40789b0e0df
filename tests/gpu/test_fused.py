"""Kernels that do in one what plain operations do in many: the same numbers, in use where they should be."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from stretto.algorithms.base import build
from stretto.kernels.cuda import fused_adamw, fused_layers, fused_logprobs
from stretto.models.load import DTYPES
from stretto.models.logprob_head import Head, logprobs_of
from stretto.models.lora import add_adapter
from stretto.recipe.schema import Adapter, AlgorithmSection, Optimizer
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.optimizer import Place
from stretto.weights.tensors import checksums
from tiny import VOCABULARY, credited, distance, policy_around, random_groups, step

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


LAYERS_FUSED = 5
"""Of a layer: two norms, those of queries and of keys, the gated one."""


def qwen(dtype, adapter):
    """Two layers of random weights, with norms of queries and keys."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config).to(GPU, DTYPES[dtype])
    policy = policy_around(network)
    return policy if adapter is None else replace(policy, adapted=add_adapter(network, adapter, seed=0))


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 means fp32: no products in a shorter format."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_fused_layers_has_the_gradient_of_plain_ones(dtype, adapter, monkeypatch):
    algorithm = build(AlgorithmSection())
    samples, found = credited(algorithm, random_groups(3)), {}
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(fused_layers, "ALLOWED", {})
            monkeypatch.setattr(fused_logprobs, "ALLOWED", {})
            fused_logprobs.usable.cache_clear()
        policy = qwen(dtype, adapter)
        ours = [layer for layer in policy.network.modules() if isinstance(layer, fused_layers.Fused)]
        assert len(ours) == (2 * LAYERS_FUSED + 1 if fused else 0)
        assert fused_logprobs.usable(GPU, policy.dtype) == fused
        found[fused] = step(policy, algorithm, samples).gradients
    fused_logprobs.usable.cache_clear()
    assert distance(found[True], found[False]) <= (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_entropies_and_slopes_are_those_of_float64(dtype, temperature):
    generator = torch.Generator(GPU).manual_seed(0)
    hidden = torch.randn(70, 48, device=GPU, generator=generator).to(dtype)
    weight = torch.randn(10_007, 48, device=GPU, generator=generator).mul(0.3).to(dtype)
    targets = torch.randint(0, len(weight), (70,), device=GPU, generator=generator)
    outgoing = torch.randn(70, device=GPU, generator=generator)
    found = []
    for kind in (dtype, torch.float64):
        inputs = [each.to(kind).requires_grad_() for each in (hidden, weight)]
        head = Head(weight=inputs[1])
        logprobs, entropies = logprobs_of(inputs[0], head, targets, temperature=temperature)
        found.append([logprobs, entropies, *torch.autograd.grad(logprobs, inputs, outgoing.to(logprobs.dtype))])
    for mine, exact in zip(*found, strict=True):
        assert (mine.double() - exact).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * exact.norm()


@pytest.mark.parametrize("name", ["adamw16bit", "adamw8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_in_one_kernel_is_the_update_in_many_and_that_of_slices(name, dtype, monkeypatch):
    rng = np.random.default_rng(0)
    begun = {"matrix": torch.as_tensor(rng.normal(size=(64, 896)) * 0.02), "norm": torch.as_tensor(rng.random(896))}
    slopes = [{key: torch.as_tensor(rng.normal(size=each.shape)).float() for key, each in begun.items()} for _ in "123"]

    def moved(rows, *, fused):
        monkeypatch.setattr(fused_adamw, "usable", lambda device, dtype: fused)
        part = {
            key: nn.Parameter((each[rows] if each.dim() > 1 else each).to(GPU, dtype)) for key, each in begun.items()
        }
        places = {"matrix": Place(shape=begun["matrix"].shape, first=rows.start)}
        optimizer = make_optimizer(part, Optimizer(name=name, lr=1e-3, weight_decay=0.1), updates=9, places=places)
        for each in slopes:
            optimizer.step({key: (slope[rows] if slope.dim() > 1 else slope).to(GPU) for key, slope in each.items()})
        return {key: optimizer.masters[key].double() for key in part}

    one, many = (moved(slice(0, 64), fused=fused) for fused in (True, False))
    for key, master in many.items():
        assert (one[key] - master).norm() <= 1e-4 * master.norm()
    parts = [moved(slice(start, start + 32), fused=True)["matrix"] for start in (0, 32)]
    assert torch.equal(torch.cat(parts), one["matrix"])


def test_a_gpu_has_the_checksums_of_a_cpu():
    rng = np.random.default_rng(1)
    sizes = [(3,), (3,), (16, 2048), (16, 2048), (16, 2048), (1200, 1100), (5, 7)]
    held = {f"{index}": torch.as_tensor(rng.normal(size=size)).bfloat16() for index, size in enumerate(sizes)}
    rounded = {"3": torch.float32}
    there = {name: tensor.to(GPU) for name, tensor in held.items()}
    assert checksums(there.items(), rounded) == checksums(held.items(), rounded)
    there["2"][7, 9] += 1
    differs = checksums(there.items(), rounded)
    assert [name for name, told in checksums(held.items(), rounded).items() if differs[name] != told] == ["2"]
