"""Decode steps replayed from CUDA graphs answer as steps that come as they are."""

from functools import cache

import numpy as np
import pytest
import torch

from stretto.algorithms.base import build
from stretto.engines.base import Request
from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.engine import NativeEngine
from stretto.kernels.cuda.decode_graphs import Graph, RecordedSteps
from stretto.models.load import load
from stretto.recipe.schema import AlgorithmSection
from stretto.training.trainer import Trainer
from stretto.types import Weights
from tiny import SCRATCH_FILES, SETTINGS, Recorder, scratch_model

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 means fp32: no products in a shorter format."""
    torch.set_float32_matmul_precision("highest")


@cache
def policy_of(dtype):
    return load(scratch_model(width=64, heads=4, dtype=dtype), SCRATCH_FILES, seed=0, device=GPU)


def groups(seed, *, count=6, samples=4, longest=90, new=40):
    """Some contexts with answers of different lengths to each, and a request alone."""
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(5, 16, rng.integers(40, longest)) for _ in range(count)] + [rng.integers(5, 16, 9)]
    return [
        Request(
            key=1000 * seed + index,
            tokens=contexts[index // samples],
            max_new_tokens=int(rng.integers(3, new)),
            stop=frozenset({6}),
            temperature=1.0,
        )
        for index in range(count * samples + 1)
    ]


def answers(engine, asked):
    engine.submit(asked)
    done = {}
    while found := engine.step(60.0):
        done |= {completion.key: completion for completion in found}
    return done


def alike(mine, theirs):
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert mine[key].tokens.tolist() == theirs[key].tokens.tolist()
        np.testing.assert_allclose(mine[key].logprobs, theirs[key].logprobs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_replayed_steps_draw_the_same_tokens_round_after_round(dtype):
    policy = policy_of(dtype)
    recorded, usual = NativeEngine(policy, graphs=True), NativeEngine(policy, steps=Steps(policy))
    assert isinstance(recorded.steps, RecordedSteps)
    for seed in range(4):
        asked = groups(seed, longest=90 if seed < 3 else 300)  # the last round needs larger caches
        alike(answers(recorded, asked), answers(usual, asked))
    made = recorded.steps.recordings.made.values()
    assert sum(isinstance(tape, Graph) for tape in made) > 3


def test_graphs_follow_updates_in_place_and_weights_that_moved():
    policy = load(scratch_model(width=64, heads=4, dtype="float32"), SCRATCH_FILES, seed=0, device=GPU)
    recorded, asked = NativeEngine(policy, graphs=True), groups(1)
    for change in ("nothing", "nothing", "in place", "elsewhere", "nothing"):
        with torch.no_grad():
            for weight in policy.network.parameters():
                if change == "in place":
                    weight.mul_(1.2)
                elif change == "elsewhere":
                    weight.data = weight.data.clone() * 0.9
        recorded.receive(Weights(version=1, manifest={}, where="shared"))
        alike(answers(recorded, asked), answers(NativeEngine(policy, steps=Steps(policy)), asked))


def test_recomputed_activations_do_not_stand_in_the_way_of_recording():
    policy = load(scratch_model(width=64, heads=4, dtype="bfloat16"), SCRATCH_FILES, seed=0, device=GPU)
    Trainer(policy, build(AlgorithmSection()), Recorder(), **(SETTINGS | {"checkpointing": True}))
    engine = NativeEngine(policy, graphs=True)
    for _ in range(2):
        assert len(answers(engine, groups(2))) == 25  # a step that could not be recorded would warn, which is an error
    assert any(isinstance(tape, Graph) for tape in engine.steps.recordings.made.values())


def test_memory_that_was_given_back_is_taken_and_recorded_again():
    policy = policy_of("float32")
    engine, asked = NativeEngine(policy, graphs=True), groups(3)
    first = answers(engine, asked)
    held = torch.cuda.memory_allocated()
    engine.sleep(keep=True)
    assert torch.cuda.memory_allocated() < held
    alike(answers(engine, asked), first)
