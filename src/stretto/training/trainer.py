"""Accumulates gradients of samples, and makes one update of them. It knows no algorithm by name.

A step is `begin`, any number of `accumulate` calls in any order, and `apply`. Gradients are sums in fp32
accumulators, fed by hooks as they appear; what they are divided by is known only at the end, when everything has been
counted. Weights move in `apply` alone, so a step that fails half-way has changed nothing.

Running out of memory does not change a result either. In a forward nothing has been accumulated yet, so the row is
cut in two and tried again. In a backward some layers already have their share, so the accumulators are void: the
smaller token budget is remembered and every sample of the step is done again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.algorithms.base import Algorithm, Denominator, Term, TokenStreams
from stretto.errors import StaleSampleError, TrainingError
from stretto.models.candidates import candidate_logprobs
from stretto.models.load import Policy
from stretto.models.logprob_head import accum_dtype
from stretto.models.memory import OutOfMemory, memory_errors, recompute_activations
from stretto.training.accumulators import Accumulators, as_one, by_denominator, by_name, empty_sum, lay_out, square_sum
from stretto.training.loss_counters import LossCounters
from stretto.training.optimizer import MasterAdamW
from stretto.training.packing import MicroBatch, divide, pack
from stretto.training.rows import halved, map_microbatches
from stretto.training.suspects import find_suspects
from stretto.types import Conversation, Sample, Weights

SMALLEST_BUDGET = 16
"""Below this many tokens the token budget is not halved any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one update did."""

    metrics: Mapping[str, float]
    """Numbers by the names of metrics.jsonl."""
    applied: bool
    """False if the gradient was not finite and the update was skipped."""
    suspects: tuple[tuple[str, int, int, int], ...] = ()
    """Then the samples that this comes from, as far as they were found."""


class Trainer:
    """Gradients and updates of one policy."""

    name = "trainer"
    counters = LossCounters
    in_lockstep = False  # True where others take part in whatever it computes, so that it tries nothing by itself

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: MasterAdamW | None,
        *,
        token_budget: int,
        temperature: float,
        clip: float | None,
        checkpointing: str | bool,
        staleness: int = 0,
    ) -> None:
        """`staleness` is how many versions the weights that sampled may lag behind those that are trained.

        `make_room`, if it is set, frees memory that others can spare while this trains: the engine's idle KV cache.
        """
        self.policy, self.algorithm, self.optimizer = policy, algorithm, optimizer
        self.token_budget, self.temperature, self.clip = token_budget, temperature, clip
        self.asked_budget = token_budget
        self.version, self.staleness = 0, staleness
        self.recomputes = False
        self.may_recompute = checkpointing == "auto"
        self.make_room: Callable[[], None] | None = None
        self.trained = policy.trained()
        self.terms_by_denominator = self._sums(algorithm.terms)
        self.current: Denominator | None = None
        self.hooks = [
            weight.register_post_accumulate_grad_hook(self._collector(name)) for name, weight in self.trained.items()
        ]
        if checkpointing is True:
            self.recompute()
        self.begin()

    def begin(self) -> None:
        """Forgets gradients, counters and samples of a step."""
        self.accumulators: Accumulators = {}
        self.total: Accumulators | None = None
        self.meter = self.counted = self.counters(self.algorithm.terms)
        self.ledger: list[Sample] = []
        self.made_room = False
        # Whose backward is under way.
        self.row: Sequence[Sample] = ()

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Adds the gradients of these samples to the step."""
        for sample in samples:
            sampled = sample.conversation.version
            if not self.version - self.staleness <= sampled <= self.version:
                older = f", nor from the {self.staleness} before" if self.staleness else ""
                raise StaleSampleError(f"sample {sample.key} comes from weights {sampled}, not {self.version}{older}")
        useful = [self._against_its_sampler(sample) for sample in samples if sample.conversation.trained.any()]
        self.ledger += useful
        with suppress(OutOfMemory):
            self._accumulate(useful)
            return
        # Not inside a handler: the exception holds the frames that hold the failed row, and so its memory.
        self._redo()

    def _against_its_sampler(self, sample: Sample) -> Sample:
        """A sample of older weights has its ratio to those; where nobody asked them, the engine has their word."""
        if sample.old is not None or sample.conversation.version == self.version:
            return sample
        return replace(sample, old=sample.conversation.logprobs[sample.conversation.trained])

    def reduce(self, add: Callable[[Tensor], None], sums: Mapping[str, float], *, keep: bool = True) -> None:
        """Makes the step's sums those of all cells that train: `add` adds a tensor over them, `sums` is the counters'.

        What this cell has accumulated stays as it is, because a cell that dies meanwhile makes the rest begin again;
        where that cannot be, it need not be kept, and takes no second time the memory.
        """
        self.total = {}
        for kind in self.terms_by_denominator:
            mine = self.accumulators.get(kind, {})
            if not keep:
                self.total[kind] = {
                    name: mine.pop(name) if name in mine else empty_sum(weight) for name, weight in self.trained.items()
                }
                for tensor in self.total[kind].values():
                    add(tensor)
                continue
            add(flat := as_one(mine, self.trained))
            self.total[kind] = by_name(flat, self.trained)
        self.counted = self.counters(self.algorithm.terms)
        self.counted.sums.update(sums)

    def apply(self) -> StepReport:
        """Divides by the global denominators, clips, and makes one update; then the step is over."""
        gradients = self._mean_gradients()
        # A sum that fp32 cannot hold is infinite, and the update skipped: Adam's second moments could not hold it.
        norm = float(self._squares(gradients).to(accum_dtype(self.policy.dtype)).sqrt())
        metrics = {**self.counted.metrics(), "grad_norm": norm}
        finite = math.isfinite(norm) and math.isfinite(metrics["loss"])
        if finite and self.counted.sums["conversations"]:
            if self.clip is not None and norm > self.clip:
                torch._foreach_mul_(list(gradients.values()), self.clip / norm)
            assert self.optimizer is not None  # a cell that only generates or scores has none, and updates nothing
            metrics["learning_rate"] = self.optimizer.step(gradients)
        suspects = () if finite or self.in_lockstep else find_suspects(self, self.ledger)
        self.begin()
        return StepReport(metrics=metrics, applied=finite, suspects=suspects)

    def weights(self) -> Weights:
        """The weights as they are now, under a new version; where they are, engines on this device read them."""
        self.version += 1
        return self.shared()

    def shared(self) -> Weights:
        """The weights under their version, for engines that read these tensors."""
        return Weights(version=self.version, manifest={}, where="shared")

    def score(
        self, conversations: Sequence[Conversation], *, reference: Policy | None = None, without_adapter: bool = False
    ) -> list[NDArray[np.float64]]:
        """Log-probability of every trained token, by the policy, with the experts that sampled it, or, with any, by the
        policy without its adapter or a frozen copy."""
        scorer = reference or self.policy
        if without_adapter:
            conversations = [replace(each, experts=None) for each in conversations]
        with torch.no_grad(), scorer.without_adapter() if without_adapter else nullcontext():
            numbers = partial(self._numbers, scorer)
            return map_microbatches(conversations, budget=self.token_budget, numbers=numbers, smaller=self._halves)

    def _numbers(self, scorer: Policy, piece: Sequence[Sample]) -> list[NDArray[np.float64]]:
        """Log-probabilities of a row's conversations."""
        batch = self._pack(piece, scorer)
        if scorer is not self.policy:
            batch = replace(batch, experts=None)  # another model has experts of its own
        logprobs, *_ = self._forward(batch, scorer)
        return np.split(logprobs.double().cpu().numpy(), np.cumsum(batch.rows.lengths.cpu().numpy())[:-1])

    def close(self) -> None:
        """Takes its hooks off the policy, which may get another trainer."""
        for hook in self.hooks:
            hook.remove()

    def recompute(self) -> None:
        """Switches gradient checkpointing on: less memory for a third more arithmetic, the same gradient."""
        recompute_activations(self.policy.network)
        self.recomputes = True

    def state(self) -> dict[str, Any]:
        """What the next step depends on."""
        budgets = {"token_budget": self.token_budget, "asked_budget": self.asked_budget}
        return {"version": self.version, **budgets, "recomputes": self.recomputes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. What memory was found to hold is for this budget and setting only."""
        self.version = state["version"]
        if state.get("asked_budget", self.asked_budget) == self.asked_budget:
            self.token_budget = state["token_budget"]
        if state["recomputes"] and not self.recomputes and self.may_recompute:
            self.recompute()
        self.begin()

    def _accumulate(self, samples: Sequence[Sample]) -> None:
        """Rows in order; a row whose forward does not fit is cut in two."""
        # A row is of one kind.
        alike = [[s for s in samples if s.old is None], [s for s in samples if s.old is not None]]
        queue = deque(row for part in alike for row in self.rows_of(part))
        lay_out(self.accumulators, self.terms_by_denominator if queue else (), self.trained, self.policy.network)
        while queue:
            piece, begun = queue.popleft(), time.perf_counter()
            try:
                batch = self._pack(piece, self.policy)
                logprobs, entropy, rows = self._forward(batch, self.policy)
                losses = self._losses(logprobs, rows)
            except OutOfMemory:
                queue.extendleft(reversed(self._halves(piece)))
                continue
            self.row = piece
            self._backward(losses)
            self.meter.count(replace(batch, rows=rows), logprobs.detach(), entropy, losses)
            self.meter.time(batch, time.perf_counter() - begun)

    def rows_of(self, samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        """Samples in rows; what a term of the loss must see at once is in one."""
        return divide(samples, self.token_budget, share=not self.policy.apart, whole=self.algorithm.whole)

    def _redo(self) -> None:
        """Does every sample of the step again within a smaller budget, after a row's backward ran out of memory."""
        while True:
            before = self.token_budget
            cut = self._halves(self.row)
            if len(cut) > 1 and self.token_budget == before:
                self._save_memory()
            ledger, made_room = self.ledger, self.made_room
            self.begin()
            self.ledger, self.made_room = ledger, made_room
            for weight in self.trained.values():
                weight.grad = None
            try:
                return self._accumulate(ledger)
            except OutOfMemory:
                continue

    def _halves(self, piece: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        """A row cut in two; what cannot be cut needs less memory per token instead."""
        if (cut := halved(piece, share=not self.policy.apart, whole=self.algorithm.whole)) is None:
            self._save_memory()
            return [tuple(piece)]
        parts, tokens = cut
        self.token_budget = max(SMALLEST_BUDGET, min(self.token_budget, tokens))
        return parts

    def _save_memory(self) -> None:
        """The last resorts: what others need not hold, and then activations, if the recipe leaves that open."""
        if self.make_room is not None and not self.made_room:
            self.made_room = True
            self.make_room()
            return
        if self.recomputes or self.in_lockstep or not self.may_recompute:
            more = "" if self.recomputes else ", or set optimizer.checkpointing: true"
            raise TrainingError(
                "the device has too little memory to train a single conversation; lower engine.max_new_tokens, or "
                f"train an adapter or a smaller model{more}"
            )
        self.recompute()

    def _pack(self, samples: Sequence[Sample], policy: Policy) -> MicroBatch:
        """A row where the policy is that is asked; another may be elsewhere."""
        with memory_errors():
            row = pack(samples, device=policy.device, dtype=accum_dtype(policy.dtype), reads=policy.reads)
            return replace(row, shared=0) if policy.apart else row

    def _forward(self, batch: MicroBatch, policy: Policy) -> tuple[Tensor, Tensor, TokenStreams]:
        """Log-probabilities and entropies of a row's trained tokens, and its streams with those of other tokens that a
        loss asks for."""
        rows, temperature = batch.rows, self.temperature
        with memory_errors():
            states = policy.hidden(batch.tokens, batch.positions, batch.layout, experts=batch.experts)[batch.sources]
            logprobs, entropy = policy.read(states, batch.targets, temperature=temperature, kept=batch.kept)
            if (named := rows.likeliest) is not None:
                rows = replace(rows, chosen=candidate_logprobs(states, policy.head(), named, temperature=temperature))
        return logprobs, entropy, rows

    def _sums(self, terms: Sequence[Term]) -> dict[Denominator, list[Term]]:
        """What is summed apart, because it is divided apart in the end."""
        return by_denominator(terms)

    def _losses(self, logprobs: Tensor, rows: TokenStreams) -> dict[Denominator, Tensor]:
        """The row's share of every sum, one number per denominator."""
        with memory_errors():
            return {
                denominator: torch.stack([term.loss(logprobs, rows).sum() for term in terms]).sum()
                for denominator, terms in self.terms_by_denominator.items()
            }

    def _backward(self, losses: Mapping[Denominator, Tensor]) -> None:
        """One backward per denominator: their sums are divided by different counts at the end."""
        with memory_errors():
            for index, (denominator, loss) in enumerate(losses.items()):
                self.current = denominator
                loss.backward(retain_graph=index + 1 < len(losses))

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        """A hook that moves a parameter's gradient into the accumulator as soon as it is complete."""

        def collect(weight: Tensor) -> None:
            assert weight.grad is not None
            gradient, weight.grad = weight.grad, None
            self._add(name, gradient)

        return collect

    def _add(self, name: str, gradient: Tensor) -> None:
        """Adds a gradient to the sum of the denominator whose backward is under way."""
        assert self.current is not None
        mine = self.accumulators.setdefault(self.current, {})
        if name in mine:
            mine[name] += gradient
        else:
            mine[name] = gradient.to(accum_dtype(gradient.dtype), copy=gradient.dtype == accum_dtype(gradient.dtype))

    def _squares(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The sum of the squares of all gradients, in fp64."""
        return square_sum(gradients.values(), self.policy.device)

    def _mean_gradients(self) -> dict[str, Tensor]:
        """Accumulated sums over their denominators, added up; the accumulators are used up by it."""
        total: dict[str, Tensor] = {}
        for kind, gradients in (self.accumulators if self.total is None else self.total).items():
            for name, gradient in gradients.items():
                gradient /= self.counted.denominator(kind)
                total[name] = total[name].add_(gradient) if name in total else gradient
        return {name: total[name] if name in total else empty_sum(weight) for name, weight in self.trained.items()}
