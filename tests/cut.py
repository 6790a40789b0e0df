"""Four processes, two by two, that each have a part of a model; they start from here, and its first tells all."""

import copy
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, Qwen2Config

from families import FAMILIES, LORA, SIZES, keep_double, sharpen
from stretto.algorithms.base import build
from stretto.models.cut_collectives import ALONE, Ranks
from stretto.models.few_bits import FORMATS
from stretto.models.lora import add_adapter
from stretto.models.quantised import quantise
from stretto.models.tensor_parallel import copies_made_equal, cut_network
from stretto.recipe.schema import AlgorithmSection
from stretto.training.trainer import Trainer
from tiny import CPU, SETTINGS, Recorder, credited, policy_from, random_groups

CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SIZES),
    "mistral": FAMILIES["mistral with a window"],
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": FAMILIES["qwen3 with wide heads"],
    "qwen3 moe": FAMILIES["qwen3 with experts"],
    "deepseek v3": FAMILIES["deepseek v3 with narrow values"],
}
MIXTURES = ("mixtral", "qwen3 moe", "deepseek v3")
WAYS = ("matrices", "experts", "matrices and experts", "experts of both")
"""What is cut: matrices over pairs of the same rows; experts over pairs of other rows; both; and matrices and experts
over the pairs of the same rows."""
CASES = [
    (family, way, adapter)
    for family in CONFIGS
    for way in WAYS
    for adapter in (False, True)
    if way == "matrices" or family in MIXTURES
] + [
    ("mixtral", "experts", "int8"),
    ("deepseek v3", "matrices", "int8"),
    ("mixtral", "matrices", "nf4"),
    ("qwen3 moe", "experts of both", "nf4"),
    ("qwen2", "matrices", "fp8"),
    ("mixtral", "matrices", "recomputed"),
]
"""Of Mistral's one key-value head all have a copy."""
ALGORITHM = build(AlgorithmSection(name="grpo", kl={"coef": 0.1, "estimator": "k2"}))


def policy_of(family, adapter):
    """A model of its own in fp64."""
    policy = policy_from(CONFIGS[family]())
    sharpen(policy.network)
    if adapter in FORMATS:
        quantise(policy.network, adapter, CPU)
    if adapter is True or adapter in FORMATS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experts in few bits get no adapter
            policy.adapted = add_adapter(policy.network, LORA, seed=0)
        sharpen_adapter(policy.network)
    keep_double(policy.network)
    return policy


@torch.no_grad()
def sharpen_adapter(network):
    """Adapters that are not 0, which would hide half of their gradient."""
    noise = torch.Generator().manual_seed(0)
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.3, generator=noise)


def samples_of(other):
    """What the processes train: each pair of other rows its own."""
    every = credited(ALGORITHM, random_groups(1))
    return every[other::2]


def gradients_of(policy, samples, recomputed=False):
    """The gradient of a step, and what else it tells."""
    recorder = Recorder()
    settings = SETTINGS | {"token_budget": 60, "checkpointing": recomputed}
    trainer = Trainer(policy, ALGORITHM, recorder, **settings)
    for row in trainer.rows_of(samples):
        trainer.accumulate(row)
    sums = dict(trainer.meter.sums)
    found = copy.copy(trainer.accumulators)
    trainer.close()
    return {kind: {name: each.clone() for name, each in part.items()} for kind, part in found.items()}, sums


def ranks_of(mesh, axis):
    return Ranks(mesh.get_local_rank(axis), mesh.size(mesh.mesh_dim_names.index(axis)), mesh.get_group(axis))


def summed(mesh, cut, gradients, sums):
    """Whole gradients and counters, from those of all processes."""
    found = {}
    other, tensor = ranks_of(mesh, "other"), ranks_of(mesh, "tensor")
    for kind, part in gradients.items():
        copies_made_equal(part, cut)
        for name, gradient in sorted(part.items()):
            if name not in cut.spread:
                dist.all_reduce(gradient, group=other.group)
            if (of := cut.cuts.get(name)) is not None:
                gradient = of.whole(everybody(gradient, cut, name, other, tensor))
            found[f"{kind} {name}"] = gradient
    everywhere = [None] * 2
    dist.all_gather_object(everywhere, sums, group=other.group)
    return found, {name: sum(each[name] for each in everywhere) for name in sums}


def everybody(part, cut, name, other, tensor):
    """The parts of a parameter in their order."""
    parts, of = [part], cut.cuts[name]
    for axis in (tensor, other):
        if axis is tensor and of.size % 2 == 0 and cut.tensor.size == 1:
            continue  # spread over others alone
        if axis is other and of.size <= cut.tensor.size:
            continue
        joined = torch.stack(parts)
        found = [torch.empty_like(joined) for _ in range(axis.size)]
        dist.all_gather(found, joined, group=axis.group)
        parts = [each for one in found for each in one]
    return parts[:: cut.copies(name)]


def in_parts(rank, folder):
    """One of the four."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tensor"))
    other, tensor = ranks_of(mesh, "other"), ranks_of(mesh, "tensor")
    for family, way, adapter in CASES:
        policy = policy_of(family, adapter)
        cut = cut_network(
            policy.network,
            tensor=tensor if "matrices" in way or way == "experts of both" else ALONE,
            experts={"matrices": None, "experts of both": ALONE}.get(way, other),
        )
        held = sum(weight.numel() for weight in policy.network.get_decoder().layers.parameters())
        gradients, sums = gradients_of(policy, samples_of(other.rank), adapter == "recomputed")
        whole, sums = summed(mesh, cut, gradients, sums)
        if rank == 0:
            torch.save({"gradients": whole, "sums": sums, "held": held}, folder / f"{family} {way} {adapter}.pt")
    dist.destroy_process_group()
