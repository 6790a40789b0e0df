"""Trains a critic as `Trainer` trains a policy: sums over trained tokens, divided and applied at the end of the step.

What it accumulates are squared errors of values instead of losses of log-probabilities; packing, memory, reduction and
the update are the same. Its numbers are reported under `critic/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from stretto.algorithms.base import Algorithm, Denominator
from stretto.algorithms.critic import value_terms
from stretto.models.value_model import ValueModel
from stretto.recipe.schema import Gae
from stretto.training.loss_counters import LossCounters
from stretto.training.optimizer import MasterAdamW
from stretto.training.packing import MicroBatch
from stretto.training.trainer import StepReport, Trainer

PREFIX = "critic/"
"""What a critic's metrics begin with."""


class ValueCounters(LossCounters):
    """Counters of a critic: how well the values that credit was given by foretold the returns."""

    def count(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, losses: Mapping[Denominator, Tensor]) -> None:
        """Adds one row; what stands for log-probabilities are the values."""
        rows, sums = batch.rows, self.sums
        sums["tokens"] += len(logprobs)
        sums["conversations"] += len(batch.samples)
        sums["trajectories"] += sum(sample.leads for sample in batch.samples)
        for denominator, loss in losses.items():
            sums[f"loss/{denominator}"] += float(loss.detach())
        assert rows.values is not None and rows.returns is not None  # its loss has read them
        returns, missed = rows.returns.double(), (rows.returns - rows.values).double()
        sums["value"] += float(rows.values.double().sum())
        for name, numbers in (("return", returns), ("missed", missed)):
            sums[name] += float(numbers.sum())
            sums[f"{name} squared"] += float(numbers.square().sum())
        for term in self.terms:
            for metric, watch in term.watch.items():
                sums[metric] += float(watch.numbers(logprobs, rows).sum())

    def metrics(self) -> dict[str, float]:
        """The step under the names of metrics.jsonl."""
        sums, tokens = self.sums, max(1.0, self.sums["tokens"])
        watched = {metric: watch.per for term in self.terms for metric, watch in term.watch.items()}
        spread = sums["return squared"] / tokens - (sums["return"] / tokens) ** 2
        missed = sums["missed squared"] / tokens - (sums["missed"] / tokens) ** 2
        return {
            **{metric: sums[metric] / self.denominator(per) for metric, per in watched.items()},
            "loss": self.objective(),
            "value": sums["value"] / tokens,
            "return": sums["return"] / tokens,
            **({"explained": 1 - missed / spread} if spread > 1e-12 else {}),  # of equal returns there is no share
            "tokens": sums["tokens"],
        }


class CriticTrainer(Trainer):
    """Gradients and updates of one critic."""

    name = "critic"
    counters = ValueCounters

    def __init__(
        self,
        model: ValueModel,
        algorithm: Algorithm,
        optimizer: MasterAdamW | None,
        *,
        gae: Gae | None,
        **settings: Any,
    ) -> None:
        """What the critic minimizes is the algorithm's, or PPO's with these numbers."""
        terms = algorithm.critic or value_terms(gae or Gae())
        # A trainer asks of what it trains what both have: parameters, device, type, states and what is read of them.
        super().__init__(model, replace(algorithm, terms=terms), optimizer, **settings)  # type: ignore[arg-type]

    def apply(self) -> StepReport:
        """One update, under names of its own."""
        report = super().apply()
        return replace(report, metrics={f"{PREFIX}{name}": number for name, number in report.metrics.items()})
