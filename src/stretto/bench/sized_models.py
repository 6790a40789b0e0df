"""Critics and reward models of another size than the policy: its architecture with more or fewer layers, all of noise.

What such a model says means nothing, but costs what a taught one would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from stretto.bench.cases import SEED, BenchCase
from stretto.bench.jobs import Job
from stretto.models.load import DTYPES

CLASSES: dict[str, Any] = {"critic": AutoModelForCausalLM, "judge": AutoModelForSequenceClassification}
"""Which model of a case -> what transformers makes of it; a critic gets its head where it is loaded."""


def sized_name(job: Job, which: str) -> str:
    """The model as a recipe names it, once `write_sized_models` was there: the policy's own where it is as large."""
    size = getattr(job.case, which)
    return "scratch" if size == 1 else str(_folder(Path(job.folder), job.case, which))


def write_sized_models(folder: Path, case: BenchCase, model: Path) -> None:
    """Writes those of a case that differ from the policy in `model`; `folder` is the case's."""
    for which, made in CLASSES.items():
        size, path = getattr(case, which), _folder(folder, case, which)
        if size in (0, 1) or path.exists():
            continue
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        layers, kinds = config.num_hidden_layers, getattr(config, "layer_types", None)
        config.num_hidden_layers = max(1, round(size * layers))
        if kinds is not None:
            config.layer_types = [kinds[index % layers] for index in range(config.num_hidden_layers)]
        if which == "judge":
            config.num_labels = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            network = made.from_config(config, dtype=DTYPES[case.dtype], trust_remote_code=False)
        network.save_pretrained(path)


def _folder(folder: Path, case: BenchCase, which: str) -> Path:
    return folder.parent / f"{which}-{getattr(case, which):g}-{case.dtype}"
