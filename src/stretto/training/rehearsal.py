"""Tries on a trainer what would run out of memory, and leaves it as it was: nothing is learned here."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import TrainingError
from stretto.models.logprob_head import accum_dtype
from stretto.training.parallel.fsdp import local
from stretto.training.trainer import Trainer
from stretto.types import Sample

GB = 2**30
"""As everywhere in this project."""


def row_fits(trainer: Trainer, samples: Sequence[Sample], tokens: int, *, again: bool = False) -> bool:
    """Whether these samples can be trained in rows of so many tokens; `again` after one, beside whose gradients a
    forward has less room."""
    before, trainer.token_budget = trainer.token_budget, tokens
    trainer.begin()
    try:
        for _ in range(1 + again):
            trainer.accumulate(samples)
        return trainer.token_budget == tokens  # or it went on with smaller rows
    except TrainingError:
        return False
    finally:
        trainer.begin()
        trainer.token_budget = before


def held_gb(trainer: Trainer) -> dict[str, float]:
    """What stays on the device while rows come and go, in GB, by what it is for."""
    trained = trainer.trained.values()
    sizes = {
        "weights": sum(local(weight).nbytes for weight in trainer.policy.network.parameters()),
        "gradients": sum(weight.numel() * accum_dtype(weight.dtype).itemsize for weight in trained),
        "optimizer": trainer.optimizer.nbytes() if trainer.optimizer is not None else 0,
    }
    return {name: size / GB for name, size in sizes.items()}
