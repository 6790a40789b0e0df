"""A cell of two processes that hold slices of a model, which start from here: a process of its own imports no test."""

import torch
import torch.distributed as dist

from stretto.algorithms.base import build
from stretto.recipe.schema import AlgorithmSection, Optimizer
from stretto.training.loss_counters import together
from stretto.training.parallel.fsdp import ShardedAdamW, ShardedTrainer, Shards, join, leave
from stretto.training.parallel.zero1 import merge_states
from tiny import CPU, SETTINGS, credited, random_groups, scratch_policy

SIZE = 2
CASES = {
    "full": {},
    "lora": {"adapter": {"kind": "lora", "rank": 3, "alpha": 4}},
    "half precision": {"dtype": "bfloat16"},
}
"""Three layers of width 12: of some tensors one process has more than the other."""
SECTION = AlgorithmSection(name="grpo", kl={"coef": 0.1, "estimator": "k2"})
CHOICES = SETTINGS | {"token_budget": 60, "clip": 0.5}


def policy_of(case):
    return scratch_policy(layers=3, width=12, **CASES[case])


def pieces():
    """Samples of two steps; in the second there is one conversation, so that a process has no row of its own."""
    algorithm = build(SECTION)
    many, few = (credited(algorithm, random_groups(seed, groups=count)) for seed, count in ((1, 3), (2, 1)))
    return [[many[:4], many[4:]], [few[:1]]]


def taken(trainer, sums):
    """What some steps report; `sums` makes the counters those of all processes."""
    reports = []
    for step in pieces():
        trainer.begin()
        for piece in step:
            trainer.accumulate(piece)
        trainer.reduce(lambda tensor: None, sums(dict(trainer.meter.sums)))
        reports.append(dict(trainer.apply().metrics))
    return reports


def everywhere(sums):
    """The counters of both processes."""
    found = [None] * SIZE
    dist.all_gather_object(found, sums)
    return together(found)


def put_together(state):
    """The state of one device, from those of both processes."""
    found = [None] * SIZE
    dist.all_gather_object(found, state)
    joined = merge_states(found)
    return {**joined, "masters": dict(joined["masters"]), "moments": dict(joined["moments"])}


def in_slices(rank, folder):
    """One process of the cell: its first writes what came of every case."""
    torch.set_num_threads(1)
    mesh = join(dist.FileStore(str(folder / "store"), SIZE), rank=rank, size=SIZE, device=CPU, seconds=60)
    for case in CASES:
        shards = Shards(policy_of(case), mesh, temperature=1.0)
        held = sum(weight.numel() for weight in shards.slices().values())
        optimizer = ShardedAdamW(shards, Optimizer(lr=0.01), updates=10)
        trainer = ShardedTrainer(shards, build(SECTION), optimizer, **CHOICES)
        before = put_together(optimizer.state())
        reports, weights, after = taken(trainer, everywhere), dict(shards.gathered()), put_together(optimizer.state())
        optimizer.restore(before)
        again = taken(trainer, everywhere)
        total = everywhere({"held": float(held)})["held"]
        if rank == 0:
            told = {"reports": reports, "again": again, "weights": weights, "state": after, "held": held / total}
            torch.save(told, folder / f"{case}.pt")
    leave()
