"""A cell of two processes that hold slices of a model: it trains as one device does, and its state is one device's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from stretto.algorithms.base import build
from stretto.config.schema import AlgorithmSection, Optimizer
from stretto.train.meter import together
from stretto.train.optim import MasterAdamW
from stretto.train.parallel import ShardedAdamW, ShardedTrainer, Shards, join, leave
from stretto.train.trainer import Trainer
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


def in_slices(rank, folder):
    """One process of the cell: its first writes what came of every case."""
    torch.set_num_threads(1)
    mesh = join(dist.FileStore(str(folder / "store"), SIZE), rank=rank, size=SIZE, device=CPU, seconds=60)
    for case in CASES:
        shards = Shards(policy_of(case), mesh, temperature=1.0)
        held = sum(weight.numel() for weight in shards.slices().values())
        optimizer = ShardedAdamW(shards, Optimizer(lr=0.01), updates=10)
        trainer = ShardedTrainer(shards, build(SECTION), optimizer, **CHOICES)
        before = optimizer.state()
        reports, weights, after = taken(trainer, everywhere), shards.gathered(), optimizer.state()
        optimizer.restore(before)
        again = taken(trainer, everywhere)
        total = everywhere({"held": float(held)})["held"]
        if rank == 0:
            told = {"reports": reports, "again": again, "weights": weights, "state": after, "held": held / total}
            torch.save(told, folder / f"{case}.pt")
    leave()


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """The folder in which a cell of two processes has left what it came to."""
    folder = tmp_path_factory.mktemp("cell")
    multiprocessing.start_processes(in_slices, (folder,), nprocs=SIZE, start_method="spawn")
    return folder


def alone(case):
    """The same on one device: reports, weights and the optimizer's state."""
    policy = policy_of(case)
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=0.01), updates=10)
    trainer = Trainer(policy, build(SECTION), optimizer, **CHOICES)
    reports = taken(trainer, copy.copy)
    weights = {name: weight.detach() for name, weight in policy.trained().items()}
    return reports, weights, optimizer.state()


PRECISION = {"full": 1e-10, "lora": 1e-10, "half precision": 2e-2}
"""Largest difference of a weight; an update of Adam's is as large as its rate, however small the gradient."""


@pytest.mark.parametrize("case", CASES)
def test_a_cell_of_two_trains_as_one_device_does(case, cell):
    told = torch.load(cell / f"{case}.pt")
    reports, weights, state = alone(case)
    exact = PRECISION[case] == 1e-10
    for mine, theirs in zip(told["reports"], reports, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-9 if exact else 0.1, abs=1e-9 if exact else 0.1)
    assert told["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        assert told["weights"][name].dtype == weight.dtype
        assert float((told["weights"][name] - weight).abs().max()) < PRECISION[case]
        assert float((told["state"]["masters"][name] - state["masters"][name]).abs().max()) < PRECISION[case]
        for key, moment in state["moments"][name].items():
            assert told["state"]["moments"][name][key].shape == moment.shape
            assert torch.allclose(told["state"]["moments"][name][key], moment, atol=PRECISION[case])


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_half_and_a_restored_state_is_gone_on_from(case, cell):
    told = torch.load(cell / f"{case}.pt")
    assert 0.4 < told["held"] < 0.6
    assert told["again"] == told["reports"]
