"""Memory that runs out in a cell whose processes work in lockstep: what failed leaves nothing behind, and what one of
them asks alone changes nothing of what they compute together. Here the cell is of one process."""

import copy

import pytest
import torch
from torch.distributed import HashStore

from slices import policy_of, section_of, settings_of, taken
from stretto.algorithms.base import build
from stretto.errors import TrainingError
from stretto.recipe.schema import AlgorithmSection
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.parallel.fsdp import ShardedTrainer, Shards, on_the_same_tensors
from stretto.training.parallel.mesh import join, leave, mesh_of
from stretto.training.rehearsal import row_fits
from tiers import slow_but
from tiny import CPU, credited, learned, random_groups

# What is returned is a part of a longer tensor; nothing is done to it in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

GRPO = build(AlgorithmSection(name="grpo"))
SAMPLES = credited(GRPO, random_groups(1))
TALKS = [sample.conversation for sample in SAMPLES]
LONGEST = max(len(talk.tokens) for talk in TALKS)


@pytest.fixture
def mesh():
    """That of a cell of one process, which is this one."""
    join(HashStore(), rank=0, size=1, device=CPU, seconds=60)
    yield mesh_of(CPU, 1, {})
    leave()


def trainer_of(case, mesh, **changes):
    """The trainer of a process, and the policy that it serves in full."""
    policy = policy_of(case)
    shards = Shards(on_the_same_tensors(policy), mesh, temperature=1.0, serving=policy)
    optimizer = make_optimizer(shards.slices(), section_of(case), updates=10, places=shards.places())
    return ShardedTrainer(shards, GRPO, optimizer, **settings_of(case) | changes), policy


def steps(trainer):
    """What some steps report."""
    return list(map(learned, taken(trainer, copy.copy, [[SAMPLES[:4], SAMPLES[4:]], [SAMPLES[:2]]])))


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


FAILING = {
    "forward": lambda layer: layer.register_forward_pre_hook(no_memory),
    "backward": lambda layer: layer.register_full_backward_hook(no_memory),
    "within a layer's backward": lambda layer: layer.mlp.register_full_backward_hook(no_memory),
}


@pytest.mark.parametrize("case", slow_but("lora", of=["full", "lora"]))
@pytest.mark.parametrize("where", FAILING)
def test_a_row_that_finds_no_memory_leaves_the_next_step_as_it_would_have_been(where, case, mesh):
    trainer, _ = trainer_of(case, mesh)
    hook = FAILING[where](trainer.policy.network.get_decoder().layers[1])
    assert not row_fits(trainer, SAMPLES[:4], 60)
    hook.remove()
    found, expected = steps(trainer), steps(trainer_of(case, mesh)[0])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_nor_does_one_that_finds_none_before_anything_was_computed(mesh):
    trainer, _ = trainer_of("full", mesh)
    trainer._pack = no_memory
    assert not row_fits(trainer, SAMPLES[:4], 60)
    del trainer._pack
    assert steps(trainer)[0] == pytest.approx(steps(trainer_of("full", mesh)[0])[0], rel=1e-9)


def room_for(tokens):
    """A device that has the memory for rows of so many tokens."""

    def enter(layer, inputs):
        if inputs[0].shape[1] > tokens:
            no_memory()

    return enter


def test_what_a_process_asks_alone_is_cut_for_it_alone(mesh):
    trainer, policy = trainer_of("lora", mesh, token_budget=4096)
    asked = {"reference": policy, "without_adapter": True}
    expected = trainer.score(TALKS, **asked)
    policy.network.get_decoder().layers[0].register_forward_pre_hook(room_for(LONGEST))
    for one, other in zip(trainer.score(TALKS, **asked), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    assert trainer.token_budget == 4096, "the others have their rows cut by it, too"


def test_a_process_does_not_begin_to_recompute_where_the_others_do_not(mesh):
    trainer, policy = trainer_of("lora", mesh, checkpointing="auto")
    policy.network.get_decoder().layers[0].register_forward_pre_hook(room_for(LONGEST - 1))
    with pytest.raises(TrainingError, match="too little memory"):
        trainer.score(TALKS, reference=policy, without_adapter=True)
    assert not trainer.recomputes
