"""On a GPU what sleeps frees memory, and a run does not notice. Run by scripts/gpu_hour."""

import asyncio
import copy

import pytest
import torch
from torch import nn

from crewed import STAGES, alone, distance, with_sleep
from running import recipe_in
from stretto.engines.native.engine import NativeEngine
from stretto.models.load import load
from stretto.recipe.schema import Optimizer
from stretto.runtime.plans import make_plan
from stretto.training.optimizer import MasterAdamW
from stretto.workers.offload import PUBLISH, FrozenModels, HeldTensors, HostBuffer, sleepers_of
from tiny import SCRATCH_FILES, scratch_model

# The recipe's scratch model has heads of 8, which the kernel refuses.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:no FlexAttention for .* heads are smaller than 16")]

GPU = torch.device("cuda")


def held():
    """Bytes of the device that tensors take."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_memory_falls_while_a_model_and_an_optimizer_sleep_and_everything_comes_back():
    section = scratch_model(width=256, heads=4, dtype="bfloat16")
    sleeps = {
        "generate": ("reward",),
        "train": ("generate", "reward"),
        "reference": ("generate", "reward"),
        "reward": (),
    }
    policy, reference = (load(section, SCRATCH_FILES, seed=0, device=GPU) for _ in range(2))
    reference.network.requires_grad_(False)
    alone, frozen = held(), FrozenModels(sleeps, (), HostBuffer(GPU))
    frozen.add("reference", reference.network.parameters)
    assert held() < alone, "it leaves as soon as it is loaded"
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=2e-4), updates=1)
    optimizer.step({name: torch.ones_like(weight, dtype=torch.float32) for name, weight in policy.trained().items()})
    sleepers = sleepers_of(
        sleeps,
        policy=policy,
        readers={"generate", "train"},
        optimizer=lambda: optimizer,
        frozen=frozen.parts,
        engine=NativeEngine(policy),
        host_buffer=HostBuffer(GPU),
    )
    weights = sum(weight.nbytes for weight in policy.network.parameters())
    states = sum(tensor.nbytes for tensor in optimizer.tensors())
    before = copy.deepcopy(optimizer.state())  # which would keep the masters' memory
    sleepers.enter("reference")
    awake = held()
    sleepers.enter("generate")
    assert held() <= awake - weights - states
    assert all(tensor.is_pinned() for tensor in optimizer.tensors())
    sleepers.enter("reward")
    assert held() <= awake - 2 * weights - states
    sleepers.enter("reference")
    sleepers.enter("train")
    sleepers.enter(PUBLISH)  # while gradients are accumulated the optimizer sleeps on
    assert held() >= awake - weights
    assert all(tensor.is_cuda for tensor in (*optimizer.tensors(), *policy.network.parameters()))
    after = optimizer.state()
    for name, master in before["masters"].items():
        assert torch.equal(master, after["masters"][name])
        assert all(torch.equal(value, after["moments"][name][key]) for key, value in before["moments"][name].items())


def test_a_parameter_that_has_slept_still_hands_its_gradient_on():
    weight, seen = nn.Parameter(torch.ones(2, device=GPU)), []
    weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.tolist()))
    (2 * weight).sum().backward()
    weight.grad = None
    part = HeldTensors({"train"}, lambda: [weight], HostBuffer(GPU), frozen=False)
    part.sleep()
    assert not weight.is_cuda
    part.wake()
    (3 * weight).sum().backward()
    assert seen == [[2, 2], [3, 3]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_changes_no_result_on_a_gpu(dtype, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype=dtype, guards__max_k3=None, **STAGES)
    plan = make_plan(recipe)
    plain, reports = asyncio.run(alone(recipe, tmp_path, plan=plan))
    slept, others = asyncio.run(alone(recipe, tmp_path, plan=with_sleep(plan)))
    assert distance(plain, slept) <= (1e-5 if dtype == "float32" else 1e-2)
    assert [report["tokens/trained"] for report in reports] == [report["tokens/trained"] for report in others]
