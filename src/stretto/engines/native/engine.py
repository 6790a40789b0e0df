"""The engine that runs on the very modules that are trained: continuous batching in plain torch, on CPU or GPU.

Requests wait in a queue, are prefilled together (contexts that begin alike are computed once), and then decode as one
batch until they end; a sequence leaves the batch the moment it ends, and waiting ones enter. Publishing weights to it
is free, because they are the trainer's own tensors. What it samples depends on the request's key and the logits
alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.base import Completion, Request
from stretto.engines.native.admission import CACHE_SHARE, SameContext, not_yet, rooms
from stretto.engines.native.batch import DecodeBatch
from stretto.engines.native.cache import SharedPrefixes, cache_tokens
from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.decode_times import DecodeTimes
from stretto.engines.native.expert_notes import ExpertNotes
from stretto.engines.native.prefill import FreePlaces, OpenPrefix, prefill
from stretto.engines.native.speculative import GrowingAnswer, NgramDrafts
from stretto.engines.native.truncation import KeptSets, Truncation
from stretto.engines.stop_texts import StopTexts
from stretto.errors import EngineError, RecipeError
from stretto.kernels.cuda.decode_graphs import steps_for
from stretto.models.expert_choices import noting
from stretto.models.load import Policy
from stretto.models.memory import OutOfMemory, memory_errors
from stretto.types import Receipt, StopReason, Weights

PREFILL_TOKENS = 8192
"""Most context tokens prefilled at once; bounds the memory of a prefill, not the batch."""

TOO_LITTLE = (
    "engine.memory_share: the device ran out of memory while it generated; lower it (auto is what the plan says, or "
    f"{CACHE_SHARE:g}), or lower engine.max_new_tokens or batch.prompts"
)
"""What is said when memory is out."""

FORWARD_COSTS = {"cpu": 24.0, "cuda": 256.0}
"""What one forward costs beside its tokens, in tokens: reading all weights. SmolLM2 in bf16 on two cores: 16 ms for two
sequences, 19 ms for 8, 34 ms for 31, 55 ms for 63, on 2026-11-28."""


class NativeEngine:
    """Generates with a `Policy`."""

    packs = True
    """Whether it computes packed rows."""

    def __init__(
        self,
        policy: Policy,
        *,
        memory_share: float | str = "auto",
        slots: int | None = None,
        speculate: bool | str = "auto",
        graphs: bool = False,
        steps: Steps | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        if policy.apart and self.packs:
            reason = "its layers cannot be given packed rows, which is what is asked of them here"
            raise RecipeError.of("model.name", reason, "use a decoder such as Llama, Qwen, Mistral or Gemma 3")
        self.policy = policy
        self.speculate = bool(speculate)  # "auto" is yes: how much follows from what it brings
        self.truncation = truncation or Truncation()
        self.kept, self.stop_texts = KeptSets(), StopTexts(policy.tokenizer)
        self.experts = ExpertNotes() if policy.routing is not None else None
        self.drafts, self.times = NgramDrafts(), DecodeTimes()
        self.version = 0
        self.kv_tokens = cache_tokens(policy, CACHE_SHARE if memory_share == "auto" else float(memory_share))
        self.steps = steps or steps_for(policy, self.kv_tokens, graphs=graphs)
        self.cache, self.prefixes = self.steps.cache, self.steps.prefixes
        self.prefill_tokens, self.used_prefixes = PREFILL_TOKENS, 0
        self.open: dict[bytes, OpenPrefix] = {}
        self.shared: SharedPrefixes | None = None
        self.changed = True
        self.waiting, self.active = deque[Request](), list[Request]()
        self.answers: list[GrowingAnswer] = []
        self.batch: DecodeBatch | None = None
        self.most_slots = slots

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests."""
        self.waiting.extend(requests)

    @torch.no_grad()
    def step(self, budget_seconds: float) -> list[Completion]:
        """Decodes until something completes or the budget is used."""
        with suppress(OutOfMemory), memory_errors():
            return self._decode_until(time.monotonic() + budget_seconds)
        # Not inside a handler: the exception holds the frames that hold the failed step, and so its memory.
        raise EngineError(TOO_LITTLE)

    def _decode_until(self, end: float) -> list[Completion]:
        while self.waiting or self.active:
            done = self._advance()
            if done or self.steps.over(time.monotonic() >= end):
                return done
        return []

    def _advance(self) -> list[Completion]:
        """Lets waiting requests in, and samples for all that are active."""
        self._admit()
        begun = time.monotonic()
        done = self._tick()
        self.times.note(len(self.active), time.monotonic() - begun)
        return done

    def abort(self, keys: Sequence[int]) -> list[Completion]:
        """Takes requests out of the queue and the batch."""
        gone = set(keys)
        partial = [
            self._completion(r, np.zeros(0, np.int64), np.zeros(0), "abort") for r in self.waiting if r.key in gone
        ]
        self.waiting = deque(request for request in self.waiting if request.key not in gone)
        ended: dict[int, StopReason] = {row: "abort" for row, request in enumerate(self.active) if request.key in gone}
        return partial + self._retire(ended)

    def receive(self, weights: Weights) -> Receipt:
        """Takes over a version; the tensors are the trainer's own."""
        if weights.where != "shared":
            raise ValueError(f"the native engine reads the trainer's tensors, not weights at {weights.where}")
        self.version = weights.version
        self.open = {}  # what prefixes hold was computed with other weights: nobody joins it any more
        self.steps.weights_changed()
        return self.holds()

    def holds(self) -> Receipt:
        """The version of the weights; the tensors are the trainer's own."""
        return Receipt(version=self.version, manifest={}, shared=True)

    def checksums(self, names: Collection[str]) -> dict[str, str]:
        """Of the tensors that it shares with the trainer, and of copies that decode steps read instead."""
        return self.steps.checksums(names)

    def sleep(self, keep: bool) -> None:
        """Gives the cache's memory back, unless something is decoded in it; the weights are the trainer's."""
        if not self.active:
            self._clear()
            self.steps.release()

    def wake(self) -> None:
        """The cache is taken as needed; weights may lie elsewhere than before."""
        self.steps.weights_changed()

    def close(self) -> None:
        """Forgets everything."""
        for held in (self.waiting, self.active, self.answers, self.kept.rows):
            held.clear()
        self.experts = ExpertNotes() if self.experts is not None else None
        self.batch = None
        self.sleep(keep=False)

    def _clear(self) -> None:
        self.cache.clear()
        self.prefixes.clear()
        self.open = {}
        self.used_prefixes = 0

    def _admit(self) -> None:
        """Prefills as many waiting requests as there is room for, in their order; one alone always may enter."""
        if self.waiting and not self.active:
            # What fits together and what is guessed must not depend on what was asked before, or a resumed run would
            # batch differently.
            self._clear()
            self.drafts.restart()
        while self.waiting:
            chosen: list[Request] = []
            tokens, groups = 0, dict[bytes, SameContext]()
            while self.waiting:
                request = self.waiting[0]
                context = request.tokens.tobytes()
                tokens += 0 if context in groups or context in self.open else len(request.tokens)
                before = groups.get(context) or not_yet(self.waiting, context, stands=context in self.open)
                grown = groups | {context: before.joined_by(request)}
                count = len(self.active) + len(chosen) + 1
                full = self._size_with(count, grown.values()) > self.kv_tokens or count > (self.most_slots or count)
                if (full and count > 1) or (chosen and tokens > self.prefill_tokens):
                    break
                chosen.append(self.waiting.popleft())
                groups = grown
            if not chosen:
                return
            self._prefill(chosen, groups)

    def _size_with(self, sequences: int, groups: Collection[SameContext]) -> int:
        """Tokens of cache, prefixes included, with so many active sequences once these groups have entered."""
        own, shared = rooms(groups)
        slots, capacity = self.cache.shape_with(slots=sequences, tokens=own)
        prefixes, length = self.prefixes.shape_with(**self._prefixes_with(shared))
        return slots * capacity + prefixes * length

    def _prefixes_with(self, shared: Sequence[int]) -> dict[str, int]:
        """Slots for prefixes, and tokens of the longest, once these have come."""
        return {"slots": max(self.prefixes.slots, self.used_prefixes + len(shared)), "tokens": max(shared, default=0)}

    def _prefill(self, requests: Sequence[Request], groups: Mapping[bytes, SameContext]) -> None:
        """Computes the contexts into free slots and prefixes, and appends the requests to the batch."""
        first, (own, shared) = len(self.active), rooms(groups.values())
        self.cache.reserve(slots=first + len(requests), tokens=own)
        self.prefixes.reserve(**self._prefixes_with(shared))
        new, self.open = prefill(
            self.policy,
            requests,
            groups,
            own=FreePlaces(cache=self.cache, first=first),
            prefixes=FreePlaces(cache=self.prefixes, first=self.used_prefixes),
            known=self.open,
            notes=self.experts,
        )
        self.used_prefixes += len(shared)
        if self.batch is None:
            self.batch = new
        else:
            self.batch.add(new)
        self.active += requests
        self.answers += [GrowingAnswer(request.tokens) for request in requests]
        self.changed = True

    def _tick(self) -> list[Completion]:
        """Samples for every active sequence; those that go on get their next hidden states.

        What a draft guessed is right while it is the token that the key draws; the first wrong one is replaced by that.
        """
        batch = self.batch
        if batch is None:
            return []
        width = batch.hidden.shape[1]
        ids: Tensor | None = None
        if self.truncation.active:
            tokens, logprobs, ids = self.steps.draw_kept(batch, self.truncation)
        else:
            tokens, logprobs = self.steps.draw(batch)
        right = (tokens[:, :-1] == batch.drafts).long().cumprod(1).sum(1)
        hits = (tokens[..., None] == batch.stops[:, None]).any(-1)
        until_stop = (hits.long().argmax(1) + 1).masked_fill(~hits.any(1), width)
        said = torch.minimum(torch.minimum(right + 1, until_stop), batch.limits - batch.sampled)
        cut = set(self.stop_texts.cut(self.active, batch.tokens, batch.sampled, tokens, said))
        batch.extend(tokens, logprobs, said)
        stopped = hits.gather(1, said[:, None] - 1)[:, 0]
        # All that decides how the step goes on, in one look: each makes the host wait for the device.
        told = (right, said, stopped.long(), batch.limits - batch.sampled, batch.lengths - batch.bases)
        rows = torch.cat([torch.stack(told, 1), tokens], 1).tolist()
        counts = [row[1] for row in rows]
        if ids is not None:
            self.kept.note(self.active, ids, counts)
        if self.experts is not None:
            self.experts.said(self.active, counts)
        if width > 1:
            self.drafts.judge(tried=sum(min(row[0] + 1, width - 1) for row in rows), right=sum(row[0] for row in rows))
        if self.speculate:
            for answer, row in zip(self.answers, rows, strict=True):
                answer.said += row[len(told) : len(told) + row[1]]
        stops = cut.union(index for index, row in enumerate(rows) if row[2])
        ends = [index for index, row in enumerate(rows) if row[3] <= 0 or index in stops]
        ended: dict[int, StopReason] = {index: "stop" if index in stops else "length" for index in ends}
        going = [row for index, row in enumerate(rows) if index not in ended]
        done = self._retire(ended)
        self._decode(own=max((row[4] for row in going), default=0), left=max((row[3] for row in going), default=0))
        return done

    def _decode(self, *, own: int, left: int) -> None:
        """One forward over the newest token of every active sequence and the drafts that go on from it: of those, the
        most tokens that one has in its slot, and the most that one may still sample."""
        batch = self.batch
        if batch is None:
            return
        if self.changed:
            self.shared, self.changed = SharedPrefixes.of(batch.prefixes, batch.bases, self.prefixes), False
        batch.drafts = self._guess(batch, min(self.cache.capacity - own, left))
        with noting(self.policy.routing) as choices:
            batch.hidden = self.steps.forward(batch, self.shared, own)
            if choices is not None and self.experts is not None:
                self.experts.decoded(self.active, choices.taken())

    def _guess(self, batch: DecodeBatch, room: int) -> Tensor:
        """(n, w-1) drafts, as many as are worth a forward and have room in the cache."""
        n, device = len(batch.newest), self.policy.device
        width = min(self.drafts.width(n, FORWARD_COSTS[device.type]), room) if self.speculate else 1
        if width < 2:
            return torch.zeros(n, 0, dtype=torch.long, device=device)
        found = [self.drafts.guess(answer, width - 1) for answer in self.answers]
        return torch.tensor([guess + [-1] * (width - 1 - len(guess)) for guess in found], device=device)

    def _retire(self, ended: dict[int, StopReason]) -> list[Completion]:
        """Takes ended sequences out and closes the gaps they leave in batch and cache."""
        if not ended or self.batch is None:
            return []
        batch, done = self.batch, self._completions(self.batch, ended)
        for completion, row in zip(done, ended, strict=True):
            if self.speculate and completion.stop != "abort" and self.active[row].temperature > 0:
                self.drafts.learn(self.active[row].tokens.tobytes(), completion.tokens.tolist())
        left = len(self.active) - len(ended)
        movers = iter(row for row in range(left, len(self.active)) if row not in ended)
        order = [next(movers) if row in ended else row for row in range(left)]
        for target, source in enumerate(order):
            if source != target:
                # With what is in flight, which an abort finds in the cache already.
                own = int(batch.lengths[source] - batch.bases[source]) + batch.hidden.shape[1]
                self.cache.move(source=source, target=target, tokens=own)
        self.changed = True
        self.active = [self.active[row] for row in order]
        self.answers = [self.answers[row] for row in order]
        batch.take(torch.tensor(order, dtype=torch.long, device=self.policy.device))
        self._close_prefixes(batch)
        if not self.active:
            self.batch = None
            self.steps.rest()
        return done

    def _close_prefixes(self, batch: DecodeBatch) -> None:
        """Moves prefixes into the places of those that nobody continues."""
        left = sorted(set(batch.prefixes.tolist()) - {-1})
        for target, source in enumerate(left):
            if source != target:
                self.prefixes.move(source=source, target=target, tokens=int(batch.bases[batch.prefixes == source][0]))
                batch.prefixes[batch.prefixes == source] = target
        self.used_prefixes = len(left)
        kept = {context: prefix for context, prefix in self.open.items() if prefix.slot in left}
        self.open = {context: replace(prefix, slot=left.index(prefix.slot)) for context, prefix in kept.items()}

    def _completions(self, batch: DecodeBatch, ended: dict[int, StopReason]) -> list[Completion]:
        """What became of these rows; all of it leaves the device at once."""
        rows = torch.tensor(list(ended), device=self.policy.device)
        tokens, logprobs = batch.tokens[rows].cpu().numpy(), batch.logprobs[rows].cpu().numpy()
        lengths = batch.sampled[rows].tolist()
        return [
            self._completion(self.active[row], tokens[index, :length], logprobs[index, :length], why)
            for index, ((row, why), length) in enumerate(zip(ended.items(), lengths, strict=True))
        ]

    def _completion(
        self, request: Request, tokens: NDArray[np.int64], logprobs: NDArray[np.float64], stop: StopReason
    ) -> Completion:
        kept = self.kept.take(request.key) if self.truncation.active else None
        experts = self.experts.take(request.key) if self.experts is not None else None
        drawn: dict[str, Any] = {"tokens": tokens, "logprobs": logprobs, "kept": kept, "experts": experts}
        return Completion(key=request.key, stop=stop, version=self.version, **drawn)
