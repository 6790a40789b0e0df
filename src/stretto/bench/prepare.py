"""Makes what all sides of a case start from: the model as a plain folder, the prompts, the first adapter.

Done in a process of its own, so that reading a GGUF file or a hub's cache is in nobody's time and nobody's memory.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stretto.bench import machine
from stretto.bench.cases import SEED, BenchCase, make_prompts
from stretto.bench.flops import ModelSizes
from stretto.bench.jobs import Job, JobResult
from stretto.bench.random_model import random_policy
from stretto.bench.sized_models import write_sized_models
from stretto.environments.render import Renderer
from stretto.models.load import DTYPES, Policy, choose_device, load
from stretto.models.source import locate
from stretto.recipe.schema import Adapter, ModelSection, Placement
from stretto.runtime.precision import bf16_slowdown
from stretto.types import Prompt

ADAPTER = Adapter(rank=16, alpha=32.0)
"""What is trained where a case says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """A prompt as every side gets it."""

    prompt: Prompt
    """The chat."""
    tokens: NDArray[np.int64]
    """The same through the model's chat template."""


def prepare(job: Job) -> JobResult:
    """Writes the files; the facts are the model's sizes, the machine's rate at its shapes, and how long prompts are."""
    folder, case = Path(job.folder), job.case
    folder.mkdir(parents=True, exist_ok=True)
    model = folder.parent / f"model-{case.dtype}"
    device = choose_device("auto")
    if not model.exists():
        starting_point(job, device).save(model)
    write_sized_models(folder, case, model)
    section = model_section(str(model), case)
    policy = load(section, locate(section.name, model), seed=SEED, device=device)
    if case.adapter:  # its random half must be the same on both sides
        policy.save(folder / "adapter")
    renderer = Renderer(policy.tokenizer, stop=policy.stop_tokens)
    prompts = make_prompts(case, lambda messages: len(renderer.open(messages)), rounds=1 + job.steps)
    rows = [{**asdict(prompt), "tokens": renderer.open(prompt.messages).tolist()} for prompt in prompts]
    (folder / "prompts.json").write_text(json.dumps(rows), encoding="utf-8")
    sizes, shapes = measures(policy)
    rate = machine.matmul_rate(shapes, dtype=case.dtype, device=device.type)
    lengths = [len(row["tokens"]) for row in rows]
    facts = {
        "model": str(model),
        "sizes": asdict(sizes),
        "rate": rate,
        "prompt": max(lengths),
        "device": device_name(device),
        "slow": bf16_slowdown(Placement()) if case.dtype == "bfloat16" else None,
    }
    return JobResult(name="prepare", facts=facts)


def starting_point(job: Job, device: torch.device) -> Policy:
    """The model, or random weights of the shape."""
    if job.shape is not None:
        return random_policy(job.shape, dtype=DTYPES[job.case.dtype], device=device, seed=SEED)
    section = ModelSection(name=job.model, dtype=job.case.dtype, adapter=None)
    return load(section, locate(job.model, Path.cwd()), seed=SEED, device=device)


def device_name(device: torch.device) -> str:
    """A GPU's own name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def model_section(name: str, case: BenchCase) -> ModelSection:
    """The case's model as a recipe would ask for it."""
    return ModelSection(name=name, dtype=case.dtype, adapter=ADAPTER if case.adapter else None)


def read_prompts(job: Job) -> list[tuple[PreparedPrompt, ...]]:
    """What `prepare` wrote: the prompts of each repetition, the one that does not count first."""
    rows: list[dict[str, Any]] = json.loads((Path(job.folder) / "prompts.json").read_text(encoding="utf-8"))
    asked = [
        PreparedPrompt(
            prompt=Prompt(id=row["id"], messages=tuple(row["messages"]), reference=row["reference"]),
            tokens=np.array(row["tokens"], dtype=np.int64),
        )
        for row in rows
    ]
    size = job.case.prompts
    return [tuple(asked[start : start + size]) for start in range(0, len(asked), size)]


def measures(policy: Policy) -> tuple[ModelSizes, dict[tuple[int, int], int]]:
    """What arithmetic follows from, and the (out, in) shapes of all weights that are multiplied, with their number."""
    network, config = policy.network, policy.network.config.get_text_config()
    head = network.get_output_embeddings()
    shapes: Counter[tuple[int, int]] = Counter()
    adapter = 0
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            if "lora_" in name:
                adapter += module.weight.numel()
            else:
                shapes[module.out_features, module.in_features] += 1
    linear = sum(out * width * count for (out, width), count in shapes.items())
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes[head.out_features, head.in_features] += 1
    sizes = ModelSizes(
        layers=config.num_hidden_layers,
        linear=linear,
        head=head.weight.numel(),
        attention=config.num_attention_heads * size,
        adapter=adapter,
    )
    return sizes, dict(shapes)
