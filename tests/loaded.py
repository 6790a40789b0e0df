"""Two processes that load a model and keep parts of it, which start from here: a process of its own imports no test."""

import ctypes
import gc
import threading
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen3MoeConfig,
)

from stretto.models.converted import keeping
from stretto.models.load import load
from stretto.models.scalar_head import base_network, load_scorer
from stretto.models.scratch import character_tokenizer
from stretto.models.source import locate
from stretto.models.value_model import load_value_model
from stretto.recipe.schema import Adapter, ModelSection, NativeEngineSection
from stretto.training.parallel.fsdp import Shards, local, on_the_same_tensors
from stretto.training.parallel.mesh import join, leave, mesh_of
from stretto.training.parallel.sliced_scorer import SlicedScorer
from stretto.weights.tensors import checksums
from stretto.workers.lanes import lane_engine
from stretto.workers.mapped_weights import MappedWeights
from stretto.workers.worker_spec import LaneSpec
from tiny import CPU

MB = 2**20
GIVES_BACK = -3
"""glibc's number of a limit above which memory that is freed is nobody's at once: what is measured is what is alive."""
LORA = Adapter(rank=2, alpha=4)
SIZES = {
    "small": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    "large": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8},
}
"""The small one of a case is loaded first: what a process imports for it is not what a model takes."""
MIXTURES = {
    "small": {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts": 4},
    "large": {"hidden_size": 512, "num_hidden_layers": 8, "moe_intermediate_size": 512, "num_experts": 16},
}
KINDS = {
    "as it is": torch.bfloat16,
    "wide": torch.float32,
    "mixture": torch.bfloat16,
    "classifier": torch.bfloat16,
}
"""Models by what their files have; all of them compute in bfloat16."""
CASES = {
    "slices": ("as it is", {"adapter": LORA}, {}),
    "slices, all trained": ("as it is", {}, {}),
    "slices, of another type": ("wide", {"adapter": LORA}, {}),
    "slices, int8": ("as it is", {"adapter": LORA, "quantize": "int8"}, {}),
    "slices, mixture": ("mixture", {"adapter": LORA}, {}),
    "matrices": ("as it is", {"adapter": LORA}, {"tp": 2}),
    "experts": ("mixture", {"adapter": LORA}, {"ep": 2}),
    "lane": ("as it is", {"adapter": LORA}, {}),
    "lane, mixture": ("mixture", {}, {}),
    "frozen": ("classifier", {}, {}),
    "critic": ("wide", {}, {}),
}
"""The model, what is done with it, and the mesh of its cell."""


def write_model(folder, kind, size):
    """The files of a model, in a folder that is named after it."""
    tokenizer, dtype = character_tokenizer("01="), KINDS[kind]
    common = {"vocab_size": len(tokenizer), "num_attention_heads": 8, "num_key_value_heads": 8}
    common |= {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    if kind == "mixture":
        config = Qwen3MoeConfig(**common, **MIXTURES[size], head_dim=64, num_experts_per_tok=2)
    else:
        config = LlamaConfig(**common, **SIZES[size], num_labels=1)
    family = AutoModelForSequenceClassification if kind == "classifier" else AutoModelForCausalLM
    family.from_config(config, dtype=dtype).save_pretrained(folder / f"{kind} {size}")
    tokenizer.save_pretrained(folder / f"{kind} {size}")
    return folder / f"{kind} {size}"


def private():
    """MB that this process has and no other: not what it maps from files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class PrivatePeak:
    """By how many MB the most that a block has is above what there was before it, looked at all the time."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = self.most = private()
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()
        return self

    def watch(self):
        while not self.over.wait(0.0005):
            self.most = max(self.most, private())

    def __exit__(self, *error):
        self.over.set()
        self.watcher.join()
        self.found = max(self.most, private()) - self.before


@contextmanager
def files_of(folder, name):
    """Loading as workers of one host do."""
    mapped = MappedWeights(name, below=folder)
    try:
        with keeping(mapped.keep):
            yield
        dist.barrier()  # nobody closes before all have loaded
    finally:
        mapped.close()


def held_by(case, model, mesh):
    """Whatever holds the parts that a process keeps of a model, and these parts by name."""
    if case.startswith("lane"):
        lane = LaneSpec(cell="lane", rank=dist.get_rank(), size=dist.get_world_size(), team=dist.get_world_size())
        engine = lane_engine(model, NativeEngineSection(), lane, CPU)
        own = {id(tensor) for tensor in engine.tensors()}
        return engine, {name: each for name, each in engine.policy.network.named_parameters() if id(each) in own}
    if case == "frozen":
        slices = SlicedScorer(model, mesh)
    elif case == "critic":
        slices = Shards(model, mesh, temperature=1.0)
    else:
        slices = Shards(on_the_same_tensors(model), mesh, temperature=1.0, serving=model)
    return slices, {name: local(weight.detach()) for name, weight in slices.rows.named_parameters()}


def loaded(case, folder, size):
    """The model of a case, in full."""
    kind, choices, _ = CASES[case]
    name = str(folder / f"{kind} {size}")
    files, section = locate(name, folder), ModelSection(name=name, dtype="bfloat16", **({"adapter": None} | choices))
    if case == "frozen":
        more = {"dtype": torch.bfloat16, "device": CPU, "seed": 0, "token_budget": 60}
        return load_scorer("reward", files, base=None, **more)
    if case == "critic":
        base = base_network(section, files, seed=0, device=CPU, base=None)
        more = {"shared": None, "dtype": torch.bfloat16, "device": CPU, "seed": 0}
        return load_value_model(files, base=base, adapter=None, **more)
    return load(section, files, seed=0, device=CPU)


def measured(case, folder, mesh, size, how):
    """MB that a process keeps of a case, MB that it had at most, and checksums of what it keeps."""
    with files_of(folder, f"{case}-{size}") if how == "mapped" else nullcontext(), PrivatePeak() as peak:
        holder, parts = held_by(case, loaded(case, folder, size), mesh)
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in parts.values()}
    told = {"kept": sum(memories.values()) / MB, "peak": peak.found, "sums": checksums(parts.items())}
    del holder, parts
    return told


def in_parts(rank, folder, size, cases):
    """One process of two: each writes what every case came to."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(GIVES_BACK, 1 << 17)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    join(dist.FileStore(str(folder / "store"), size), rank=rank, size=size, device=CPU, seconds=300)
    meshes = {}
    for case in cases:
        degrees = CASES[case][2]
        key = tuple(degrees.items())
        if key not in meshes:
            meshes[key] = mesh_of(CPU, size, degrees)
        for how in ("mapped", "plain"):
            found = [measured(case, folder, meshes[key], size, how) for size in SIZES]
            torch.save(found[-1], folder / f"{case}-{how}-{rank}.pt")
            dist.barrier()
    leave()
