"""The same code on a GPU: same samples, same gradients, a step that fits. Run by scripts/gpu_hour."""

import numpy as np
import pytest
import torch

import running
from stretto.algorithms.base import build
from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine
from stretto.models.load import load
from stretto.recipe.schema import Adapter, AlgorithmSection
from stretto.training.optimizer import MasterAdamW
from stretto.training.trainer import Trainer
from tiny import SCRATCH_FILES, credited, random_groups, scratch_model

# The recipe's scratch model has heads of 8, which the kernel refuses.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:no FlexAttention for .* heads are smaller than 16")]

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 means fp32: no products in a shorter format."""
    torch.set_float32_matmul_precision("highest")


def policy_on(device, **sizes):
    return load(scratch_model(width=64, heads=4, **sizes), SCRATCH_FILES, seed=0, device=device)


def requests(count, policy):
    rng = np.random.default_rng(0)
    return [
        Request(
            key=index + 1,
            tokens=rng.integers(5, 16, rng.integers(3, 30)),
            max_new_tokens=20,
            stop=policy.stop_tokens,
            temperature=1.0,
        )
        for index in range(count)
    ]


def answers(policy, asked):
    engine = NativeEngine(policy)
    engine.submit(asked)
    done = {}
    while found := engine.step(60.0):
        done |= {completion.key: completion for completion in found}
    return done


def test_groups_share_their_prompt_and_drafts_change_nothing_on_a_gpu():
    """One prefix per prompt, and a second round in which every answer is known in advance."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 16, 400) for _ in range(2)]
    asked = [
        Request(key=key + 1, tokens=prompts[key % 2], max_new_tokens=20, stop=frozenset({6}), temperature=1.0)
        for key in range(8)
    ]
    told = {}
    for device in (CPU, GPU):
        engine, shared = NativeEngine(policy_on(device)), 0
        for _ in range(2):
            engine.submit(asked)
            done = {}
            while found := engine.step(60.0):
                done |= {completion.key: completion for completion in found}
                shared = max(shared, engine.prefixes.slots)
            told.setdefault(device, []).append({key: done[key].tokens.tolist() for key in sorted(done)})
        assert shared == 2
    assert told[CPU][0] == told[CPU][1] == told[GPU][0] == told[GPU][1]


def gradients(policy, samples):
    from stretto.recipe.schema import Optimizer

    algorithm = build(AlgorithmSection())
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=2e-4), updates=1)
    trainer = Trainer(policy, algorithm, optimizer, token_budget=4096, temperature=1.0, clip=None, checkpointing="auto")
    trainer.accumulate(samples)
    return {name: gradient.cpu() for name, gradient in trainer._mean_gradients().items()}


def test_a_gpu_samples_the_same_whatever_shares_the_batch():
    policy = policy_on(GPU, dtype="float32")
    asked = requests(40, policy)
    together = answers(policy, asked)
    for one in asked[::7]:
        alone = answers(policy, [one])[one.key]
        assert alone.tokens.tolist() == together[one.key].tokens.tolist()


def test_a_gpu_draws_the_tokens_that_a_cpu_draws():
    on_cpu, on_gpu = policy_on(CPU, dtype="float64"), policy_on(GPU, dtype="float64")
    asked = requests(20, on_cpu)
    mine, theirs = answers(on_cpu, asked), answers(on_gpu, asked)
    assert all(mine[key].tokens.tolist() == theirs[key].tokens.tolist() for key in mine)


@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)])
def test_gradients_on_a_gpu_are_those_of_a_cpu(adapter):
    samples = credited(build(AlgorithmSection()), random_groups(3))
    cpu = gradients(policy_on(CPU, dtype="float64", adapter=adapter), samples)
    gpu = gradients(policy_on(GPU, dtype="float64", adapter=adapter), samples)
    for name, gradient in cpu.items():
        # Rotary angles are float32 in both, and a GPU's sines are not a CPU's to the last bit.
        assert (gpu[name] - gradient).norm() <= 1e-7 * (1e-12 + gradient.norm()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_a_gpu_learns_from_its_own_samples(tmp_path, dtype):
    finished = running.start(tmp_path, model__dtype=dtype, guards__max_k3=None)
    lines = running.metrics(finished.folder)
    assert all(line["kl/engine_trainer"] <= (1e-6 if dtype == "float32" else 1e-1) for line in lines if line["step"])
    assert lines[-1]["weights/version"] == 3
