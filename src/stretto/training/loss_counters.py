"""What a step adds up beside its gradient: the counts that losses are divided by, and the numbers that watch the
method.

Everything here is a sum (or a largest value), so it can be gathered in any order and from several places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.algorithms.base import Denominator, Term
from stretto.algorithms.correction import FARTHEST, sampling_logprobs
from stretto.algorithms.kl import k3
from stretto.training.packing import MicroBatch

TWICE = 0.6931472
"""log 2, rounded up: what is exactly twice or half as likely is not outside."""

FEW_ROWS, ALIKE = 6, 0.03
"""Fewer of a kind, or sizes that spread by less than this share, do not tell what one costs whatever its size."""


class LossCounters:
    """Counters and watched sums of one step."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
        self.sums: dict[str, float] = defaultdict(float)
        self.logprobs: dict[tuple[str, int, int, int], NDArray[np.float32]] = {}
        """As `types.TrainedLogprobs`, of the samples that nobody has asked about yet."""

    def count(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, losses: Mapping[Any, Tensor]) -> None:
        """Adds one row."""
        rows, sums = batch.rows, self.sums
        sums["tokens"] += len(logprobs)
        sums["conversations"] += len(batch.samples)
        sums["trajectories"] += sum(sample.leads for sample in batch.samples)
        sums["shared"] += batch.shared
        for denominator, loss in losses.items():
            sums[f"loss/{denominator}"] += float(loss.detach())
        sampling = sampling_logprobs(logprobs, rows).double()
        log_weight = (sampling - rows.engine).double().clamp(-FARTHEST, FARTHEST)
        weight = log_weight.exp()
        # Where the engine's word stands for the trainer's, it cannot be held against itself: then the lag counts too.
        alone = rows.old is not None and torch.equal(rows.old, rows.engine)
        if not alone:
            each = sampling.float().cpu().numpy()
            ends = np.cumsum(rows.lengths.cpu().numpy())[:-1]
            self.logprobs |= {s.key: own for s, own in zip(batch.samples, np.split(each, ends), strict=True)}
        sums["k3"] += float(k3(rows.engine.double(), logprobs.double() if alone else sampling).sum())
        sums["weight"] += float(weight.sum())
        sums["weight squared"] += float(weight.square().sum())
        sums["largest"] = max(sums["largest"], float(log_weight.abs().max()))
        sums["outside"] += float((log_weight.abs() > TWICE).sum())
        sums["entropy"] += float(entropy.sum())
        if rows.reference is not None:
            sums["kl/reference"] += float(k3(logprobs.double(), rows.reference.double()).sum())
        for term in self.terms:
            for metric, watch in term.watch.items():
                sums[metric] += float(watch.numbers(logprobs, rows).sum().detach())

    def time(self, batch: MicroBatch, seconds: float) -> None:
        """Adds what a row took, so that what rows cost whatever their size can be told from what tokens cost."""
        tokens, sums = float(len(batch.tokens)), self.sums
        for name, number in (("", 1.0), (" tokens", tokens), (" squares", tokens * tokens)):
            sums[f"rows{name}"] += number
        sums["rows seconds"] += seconds
        sums["rows products"] += seconds * tokens

    def row_overhead(self) -> float | None:
        """The share of the rows' seconds that does not grow with their tokens, by least squares; none where rows are
        too few or too alike to tell."""
        names = ("", " tokens", " squares", " seconds", " products")
        return fixed_share(*(self.sums.get(f"rows{name}", 0.0) for name in names))

    def denominator(self, kind: Denominator) -> float:
        """What the sums of a term are divided by at the end of the step."""
        return 1.0 if kind == "constant" else max(1.0, self.sums[kind])

    def objective(self) -> float:
        """The value of the loss."""
        kinds = {term.denominator for term in self.terms}
        return sum(self.sums[f"loss/{kind}"] / self.denominator(kind) for kind in kinds)

    def metrics(self) -> dict[str, float]:
        """The step under the names of metrics.jsonl."""
        sums, tokens = self.sums, max(1.0, self.sums["tokens"])
        watched = {metric: watch.per for term in self.terms for metric, watch in term.watch.items()}
        watched |= {"kl/reference": "tokens"} if "kl/reference" in sums else {}
        squared, overhead = sums["weight squared"], self.row_overhead()
        return {
            **{metric: sums[metric] / self.denominator(per) for metric, per in watched.items()},
            "loss": self.objective(),
            **({"entropy": sums["entropy"] / tokens} if sums["tokens"] else {}),  # that of no token is not 0
            "kl/engine_trainer": sums["k3"] / tokens,
            "engine_trainer/largest": sums["largest"],
            "engine_trainer/outside": sums["outside"] / tokens,
            "ess": sums["weight"] ** 2 / (tokens * squared) if squared else 1.0,
            "tokens/trained": sums["tokens"],
            "tokens/shared": sums["shared"],
            "micro_batches": sums["rows"],
            **({} if overhead is None else {"micro_batches/overhead": overhead}),
        }


def fixed_share(count: float, sizes: float, squares: float, seconds: float, products: float) -> float | None:
    """The share of some seconds that does not grow with the sizes of what took them, by least squares over their sums;
    none where they are too few or their sizes too alike to tell."""
    spread = count * squares - sizes * sizes
    if count < FEW_ROWS or spread < (ALIKE * sizes) ** 2 or not seconds:
        return None
    slope = (count * products - sizes * seconds) / spread
    return min(1.0, max(0.0, 1.0 - slope * sizes / seconds))


def together(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several cells as those of one."""
    total: dict[str, float] = defaultdict(float)
    for sums in parts:
        for name, number in sums.items():
            total[name] = max(total[name], number) if name == "largest" else total[name] + number
    return dict(total)
