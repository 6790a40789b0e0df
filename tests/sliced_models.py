"""Three processes of two cells that share one of them: critics and frozen models in slices, started from here."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from slices import taken
from stretto.algorithms.base import build
from stretto.models.scalar_head import base_network, load_scorer
from stretto.models.value_model import load_value_model
from stretto.recipe.schema import Adapter, AlgorithmSection, Gae, Optimizer
from stretto.training.critic_trainer import CriticTrainer
from stretto.training.loss_counters import together
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.parallel.fsdp import Shards
from stretto.training.parallel.mesh import join, leave, mesh_over
from stretto.training.parallel.sharded_critic import ShardedCriticTrainer
from stretto.training.parallel.sliced_scorer import SlicedScorer
from stretto.training.parallel.zero1 import merge_states
from stretto.training.teacher import Teacher
from tiny import (
    CPU,
    SCRATCH_FILES,
    SETTINGS,
    VOCABULARY,
    credited,
    random_groups,
    scratch_model,
    scratch_policy,
    speaking,
)

WORLD = 3
CELLS = [(0, 1), (1, 2)]
"""Ranks of the cells; the second process is in both."""

PPO = build(AlgorithmSection(name="ppo"))
LORA = Adapter(rank=3, alpha=4)
CRITICS = {
    "full": {},
    "adapter": {"adapter": LORA},
    "adapter on a base in few bits": {"adapter": LORA, "quantize": "int8"},
    "half precision": {"dtype": torch.bfloat16},
    "recomputed": {"checkpointing": True},
    "a head with a bias": {"bias": True},
}
FROZEN = ("reward", "value", "teacher", "likeliest tokens")
SMALL = {"layers": 3, "width": 12}
"""Of some tensors one process has more than the other, and of a head one has nothing."""


def critic_of(*, adapter=None, dtype=torch.float64, bias=False, quantize="none", **settings):
    """A critic on a tiny model's base, whose head says something."""
    section = scratch_model(**SMALL, dtype=str(dtype).removeprefix("torch."), quantize=quantize)
    base = base_network(section, SCRATCH_FILES, seed=3, device=CPU, base=None, as_stored=True)
    model = load_value_model(SCRATCH_FILES, base=base, adapter=adapter, shared=None, dtype=dtype, device=CPU, seed=3)
    if bias:
        wide = model.scalar.weight.dtype
        model = replace(model, scalar=torch.nn.Linear(model.scalar.in_features, 1, dtype=wide))
    return speaking(model)


def settings_of(case):
    """The trainer's settings in a case."""
    more = {name: value for name, value in CRITICS[case].items() if name == "checkpointing"}
    return SETTINGS | {"token_budget": 60, "clip": 0.5, "gae": Gae()} | more


def optimizer_of(weights, **more):
    """A critic's optimizer."""
    return make_optimizer(weights, Optimizer(lr=0.01), updates=10, **more)


def pieces():
    """Samples of two steps; in the second there is one conversation, so that a process has no row of its own."""
    many, few = (credited(PPO, random_groups(seed, groups=count)) for seed, count in ((1, 3), (2, 1)))
    return [[many[:4], many[4:]], [few[:1]]]


def talks():
    """What is asked about."""
    groups = random_groups(4)
    return [talk for group in groups for each in group.trajectories for talk in each.conversations]


def learned(trainer, sums):
    """What some steps report, and the values after them; `sums` makes the counters those of all processes."""
    return taken(trainer, sums, pieces()), trainer.score(talks())


def frozen(case):
    """A model that is only asked."""
    if case in ("reward", "value"):
        base = base_network(scratch_model(**SMALL), SCRATCH_FILES, seed=3, device=CPU, base=None)
        return load_scorer(case, SCRATCH_FILES, base=base, dtype=torch.float64, device=CPU, seed=3, token_budget=60)
    named = 3 if case == "likeliest tokens" else None
    policy = scratch_policy(**SMALL, seed=5)
    policy.network.requires_grad_(False)
    return Teacher(policy, temperature=0.7, token_budget=60, candidates=named, vocabulary=VOCABULARY)


def everywhere(found, group):
    """What each process of a cell has."""
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, found, group=group)
    return told


def alone(case):
    """The critic on one device: reports, values, weights, the optimizer's state."""
    model = critic_of(**CRITICS[case])
    optimizer = optimizer_of(model.trained())
    reports, values = learned(CriticTrainer(model, PPO, optimizer, **settings_of(case)), dict)
    return reports, values, {name: weight.detach() for name, weight in model.trained().items()}, optimizer.state()


def in_a_cell(case, mesh):
    """The same in slices, and once more from the state of the beginning."""
    group = mesh.shards.get_group()
    shards = Shards(critic_of(**CRITICS[case]), mesh, temperature=1.0)
    optimizer = optimizer_of(shards.slices(), places=shards.places())
    trainer = ShardedCriticTrainer(shards, PPO, optimizer, **settings_of(case))
    joined = lambda: whole(everywhere(optimizer.state(), group))  # noqa: E731
    sums = lambda mine: together(everywhere(mine, group))  # noqa: E731
    before = joined()
    reports, values = learned(trainer, sums)
    told = {"reports": reports, "values": values, "weights": dict(shards.gathered()), "state": joined()}
    optimizer.restore(shards.cut_state(before))
    trainer.version = 0
    held = [sum(weight.numel() for weight in shards.slices().values())]
    return told | {"again": learned(trainer, sums)[0], "held": everywhere(held[0], group)}


def whole(states):
    """The state of one device, from those of a cell."""
    joined = merge_states(states)
    return {**joined, "masters": dict(joined["masters"]), "moments": dict(joined["moments"])}


def in_slices(rank, folder):
    """One process: the first of each cell writes what came of every case."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    join(store, rank=rank, size=WORLD, device=CPU, seconds=60)
    first, second = (mesh_over(ranks, device=CPU, seconds=60) for ranks in CELLS)
    for case in CRITICS if first else ():
        keep(folder, case, partial(in_a_cell, case), first)
    for case in FROZEN if second else ():
        keep(folder, case, lambda mesh, case=case: asked(case, mesh), second)
    leave()


def asked(case, mesh):
    """What a frozen model in slices says, and the share of it that a process holds."""
    scorer = SlicedScorer(frozen(case), mesh)
    held = sum(tensor.numel() for tensor in scorer.tensors())
    return {"numbers": scorer.score(talks()), "held": everywhere(held, mesh.shards.get_group())}


def keep(folder, case, made, mesh):
    """Writes what a cell has made."""
    told = made(mesh)
    if mesh.shards.get_local_rank() == 0:
        torch.save(told, folder / f"{case}.pt")
