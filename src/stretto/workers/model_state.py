"""What the next step of a trained model depends on, as files of a checkpoint: its trainer's state and its optimizer's.

An optimizer may be written in parts, by those who share it; whoever reads one takes what it has of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.storage.manifest import STATE
from stretto.storage.tensors import read_parts, write_state
from stretto.training.optimizer import wide_master
from stretto.training.parallel.zero1 import merge_states
from stretto.training.trainer import Trainer
from stretto.workers.api import STATES


def held(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a trainer and its optimizer hold now; the tensors are their own, and so change with the next update."""
    assert trainer.optimizer is not None
    return trainer.state(), trainer.optimizer.state()


def write(
    model: str, trainer: Mapping[str, Any], optimizer: Mapping[str, Any], folder: Path, *, part: int, of: int
) -> dict[str, str]:
    """Writes a model's state, or one of several parts of it, below a folder; returns the XXH3 of large files."""
    told, moments = STATES[model]
    state = folder / STATE
    state.mkdir(exist_ok=True)
    hashes = write_state(state, moments, optimizer, part=part, of=of)
    if part == 0:
        hashes |= write_state(state, told, trainer)
    return {f"{STATE}/{name}": hashed for name, hashed in hashes.items()}


def read(model: str, trainer: Trainer, weights: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """Puts a model's `weights` back, as an optimizer rounds its masters, and its trainer's state; returns the state of
    an optimizer that has all of them."""
    told, moments = STATES[model]
    (state,) = read_parts(folder, told)
    optimizer = merge_states(read_parts(folder, moments))
    trainer.restore(state)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(wide_master(optimizer["masters"][name]))
    return optimizer
