"""Gradients of whitened advantages before the batch is complete: two sums instead of one, put together at the end.

Whitening takes the batch's mean off every advantage and divides by its deviation. While the weights have not moved the
ratio is 1, nothing is clipped, and a loss is linear in its advantage. The gradient is then (sum of a_i g_i - mean * sum
of g_i) / deviation, with the gradient g_i of a token at advantage 1: both sums can be added to in any order, before
anybody knows mean and deviation. It costs a second backward and a second accumulator, and so is for cells that would
wait for the last answer otherwise. Terms that are not linear in the advantage (`Term.credited`) are summed as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.advantages import LEAST_VARIANCE
from stretto.algorithms.base import Term, TokenStreams
from stretto.models.memory import memory_errors
from stretto.training.loss_counters import LossCounters
from stretto.training.packing import MicroBatch
from stretto.training.trainer import Trainer

GIVEN, UNIT = " as credited", " at advantage 1"
"""What the names of the two sums of a denominator end in."""


class WhiteningCounters(LossCounters):
    """Counters that know mean and deviation of all advantages in the end."""

    def count(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, losses: Mapping[Any, Tensor]) -> None:
        """Adds one row."""
        super().count(batch, logprobs, entropy, losses)
        advantage = batch.rows.advantage.double()
        self.sums["advantage"] += float(advantage.sum())
        self.sums["advantage squared"] += float(advantage.square().sum())

    def factor(self, kind: str) -> float:
        """What a sum counts for in the whole."""
        count = max(1.0, self.sums["tokens"])
        mean = self.sums["advantage"] / count
        deviation = 1.0
        if count > 1:
            variance = (self.sums["advantage squared"] - count * mean**2) / (count - 1)
            deviation = math.sqrt(max(0.0, variance) + LEAST_VARIANCE)
        if kind.endswith(GIVEN):
            return 1 / deviation
        return -mean / deviation if kind.endswith(UNIT) else 1.0

    def denominator(self, kind: Any) -> float:
        """That of the sum, by what its name begins with."""
        return super().denominator(kind.removesuffix(GIVEN).removesuffix(UNIT))

    def objective(self) -> float:
        """The value of the loss with whitened advantages."""
        kinds = [name.removeprefix("loss/") for name in self.sums if name.startswith("loss/")]
        return sum(self.factor(kind) * self.sums[f"loss/{kind}"] / self.denominator(kind) for kind in kinds)


class WhiteningTrainer(Trainer):
    """A trainer that is given advantages before they are whitened."""

    counters = WhiteningCounters

    def _sums(self, terms: Sequence[Term]) -> dict[Any, list[Term]]:
        found: dict[Any, list[Term]] = {}
        for term in terms:
            for part in (GIVEN, UNIT) if term.credited else ("",):
                found.setdefault(f"{term.denominator}{part}", []).append(term)
        return found

    def _losses(self, logprobs: Tensor, rows: TokenStreams) -> dict[Any, Tensor]:
        """The row's share of every sum."""
        at_one = replace(rows, advantage=torch.ones_like(rows.advantage))
        with memory_errors():
            return {
                kind: torch.stack(
                    [term.loss(logprobs, at_one if kind.endswith(UNIT) else rows).sum() for term in terms]
                ).sum()
                for kind, terms in self.terms_by_denominator.items()
            }

    def _mean_gradients(self) -> dict[str, Tensor]:
        """The sums with what each counts for, over their denominators."""
        assert isinstance(self.counted, WhiteningCounters)
        for kind, gradients in (self.accumulators if self.total is None else self.total).items():
            for gradient in gradients.values():
                gradient *= self.counted.factor(kind)
        return super()._mean_gradients()
