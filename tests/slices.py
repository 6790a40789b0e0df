"""Cells of two and four processes that hold slices of a model, which start from here: a process of its own imports no
test."""

import torch
import torch.distributed as dist

from families import twins
from stretto.algorithms.base import build
from stretto.recipe.schema import AlgorithmSection, Optimizer
from stretto.training.loss_counters import together
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.parallel.fsdp import ShardedTrainer, Shards
from stretto.training.parallel.mesh import join, leave, mesh_of
from stretto.training.parallel.zero1 import merge_states
from stretto.workers.offload import HeldStorages
from tiny import CPU, SETTINGS, credited, random_groups, scratch_policy

LORA = {"kind": "lora", "rank": 3, "alpha": 4}
SMALL = {"layers": 3, "width": 12}
"""Of some tensors one process has more than the other."""
WIDE = {"layers": 1, "width": 64, "dtype": "float32"}
"""Large enough for narrow moments."""
WIDER = {"layers": 1, "width": 512, "dtype": "float32"}
"""Half of its rows too."""
CASES = {
    "full": SMALL,
    "lora": SMALL | {"adapter": LORA},
    "half precision": SMALL | {"dtype": "bfloat16"},
    "recomputed": SMALL,
    "asleep": SMALL | {"adapter": LORA},
    "nf4": SMALL | {"adapter": LORA, "quantize": "nf4"},
    "int8": SMALL | {"adapter": LORA, "quantize": "int8"},
    "adamw8bit": WIDE,
    "adamw16bit": WIDE,
    "llama": None,
    "qwen3 with wide heads": None,
    "qwen3 with experts": None,
    "deepseek v3 with narrow values": None,
    "mistral with a window, lora": None,
    "qwen3 with experts, lora": None,
    "deepseek v3 with narrow values, lora": None,
}
"""What scratch models are made of; a family where there is nothing."""
LLAMAS = ("full", "lora", "half precision", "recomputed", "qwen3 with wide heads")
NARROW = {"adamw8bit": WIDER, "adamw16bit": WIDER}
MIXTURES = tuple(
    f"{each}{lora}" for each in ("qwen3 with experts", "deepseek v3 with narrow values") for lora in ("", ", lora")
)
GRIDS = {
    "shards": (2, {}, tuple(CASES)),
    "matrices": (2, {"tp": 2}, (*LLAMAS, "nf4", "int8", *NARROW, *MIXTURES)),
    "experts of the same rows": (2, {"tp": 2, "ep": 2}, MIXTURES),
    "experts of other rows": (2, {"ep": 2}, MIXTURES),
    "shards and matrices": (
        4,
        {"tp": 2},
        ("full", "lora", "nf4", "mistral with a window, lora", "qwen3 with experts, lora"),
    ),
    "shared heads": (4, {"tp": 4}, ("qwen3 with wide heads",)),
    "shards and experts": (4, {"ep": 2}, MIXTURES),
    "matrices and experts": (4, {"tp": 2, "ep": 4}, MIXTURES),
}
"""Processes, the degrees of their mesh, and what they train."""
RUNS = [(grid, case) for grid, (_, _, cases) in GRIDS.items() for case in cases]
SECTION = AlgorithmSection(name="grpo", kl={"coef": 0.1, "estimator": "k2"})
CHOICES = SETTINGS | {"token_budget": 60, "clip": 0.5}


def policy_of(case, grid="shards"):
    """A model of its own for whoever asks."""
    family, _, adapter = case.partition(", ")
    sizes = CASES[case] if grid == "shards" else NARROW.get(case, CASES[case])
    return scratch_policy(**sizes) if sizes else twins.__wrapped__(family, adapter=bool(adapter))[0]


def section_of(case):
    """The optimizer of a case."""
    return Optimizer(lr=0.01, name=case if case.startswith("adamw") else "adamw")


def settings_of(case):
    """The trainer's settings in a case."""
    return CHOICES | {"checkpointing": case == "recomputed"}


def pieces():
    """Samples of two steps; in the second there is one conversation, so that a process has no row of its own."""
    algorithm = build(SECTION)
    many, few = (credited(algorithm, random_groups(seed, groups=count)) for seed, count in ((1, 3), (2, 1)))
    return [[many[:4], many[4:]], [few[:1]]]


def taken(trainer, sums, steps=None):
    """What some steps report, those of `pieces` if none are given; `sums` makes the counters those of all processes."""
    reports = []
    for step in steps or pieces():
        trainer.begin()
        for piece in step:
            trainer.accumulate(piece)
        trainer.reduce(lambda tensor: None, sums(dict(trainer.meter.sums)))
        reports.append(dict(trainer.apply().metrics))
    return reports


def everywhere(sums):
    """The counters of all processes."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, sums)
    return together(found)


def put_together(state):
    """The state of one device, from those of all processes."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, state)
    joined = merge_states(found)
    return {**joined, "masters": dict(joined["masters"]), "moments": dict(joined["moments"])}


class CopyingShelf:
    """Host memory of a device that has its own."""

    def put(self, tensors):
        """Copies."""
        return [tensor.clone() for tensor in tensors]


def nap(shards):
    """All slices leave the device and come back."""
    sleeper = HeldStorages({"train"}, shards.tensors, CopyingShelf())
    sleeper.sleep()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in shards.tensors())
    sleeper.wake()


def in_slices(rank, folder, size):
    """One process of cells of so many: its first writes what came of every case."""
    torch.set_num_threads(1)
    join(dist.FileStore(str(folder / f"store-{size}"), size), rank=rank, size=size, device=CPU, seconds=60)
    for grid, (count, degrees, cases) in GRIDS.items():
        if count == size:
            mesh = mesh_of(CPU, size, degrees)
            for case in cases:
                told = in_grid(grid, case, mesh)
                if rank == 0:
                    torch.save(told, folder / f"{grid} {case}.pt")
    leave()


def in_grid(grid, case, mesh):
    """What comes of a case."""
    policy = policy_of(case, grid)
    total = sum(weight.numel() for weight in policy.trained().values())
    shards = Shards(policy, mesh, temperature=1.0)
    held = sum(weight.numel() for weight in shards.slices().values())
    optimizer = make_optimizer(shards.slices(), section_of(case), updates=10, places=shards.places())
    trainer = ShardedTrainer(shards, build(SECTION), optimizer, **settings_of(case))
    before = put_together(optimizer.state())
    reports, weights, after = taken(trainer, everywhere), dict(shards.gathered()), put_together(optimizer.state())
    if case == "asleep":
        nap(shards)
    optimizer.restore(shards.cut_state(before))
    again = taken(trainer, everywhere)
    return {"reports": reports, "again": again, "weights": weights, "state": after, "held": held / total}
