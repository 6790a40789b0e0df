"""Which samples make a step that is not finite so: each is tried alone, after the step has failed anyway."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch

from stretto.errors import StrettoError
from stretto.training.loss_counters import LossCounters
from stretto.types import Sample

NAMED = 3
"""How many are looked for: where weights are not finite every sample would be one."""

SampleKey = tuple[str, int, int, int]


class Accumulating(Protocol):
    """What of a trainer is needed."""

    accumulators: Any
    """Gradients, by denominator and name."""
    meter: LossCounters
    """Losses and counts."""

    def begin(self) -> None:
        """Forgets what was accumulated."""
        ...

    def accumulate(self, samples: Sequence[Sample], /) -> None:
        """Adds gradients and counts."""
        ...


def find_suspects(trainer: Accumulating, samples: Sequence[Sample]) -> tuple[SampleKey, ...]:
    """The first samples whose own loss or gradient is no finite number. What was accumulated is lost."""
    try:
        return tuple(islice(_suspects(trainer, samples), NAMED))
    except StrettoError:  # it is the step's failure that is to be told, not that of this search
        return ()


def _suspects(trainer: Accumulating, samples: Sequence[Sample]) -> Iterator[SampleKey]:
    for sample in samples:
        trainer.begin()
        trainer.accumulate([sample])
        losses = [value for name, value in trainer.meter.sums.items() if name.startswith("loss/")]
        gradients = [each for named in trainer.accumulators.values() for each in named.values()]
        if not (all(map(math.isfinite, losses)) and all(bool(torch.isfinite(each).all()) for each in gradients)):
            yield sample.key
