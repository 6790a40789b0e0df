"""The engine that runs on the very modules that are trained: continuous batching in plain torch, on CPU or GPU.

Requests wait in a queue, are prefilled together (contexts that begin alike are computed once), and then decode as one
batch until they end; a sequence leaves the batch the moment it ends, and waiting ones enter. Publishing weights to it
is free, because they are the trainer's own tensors. What it samples depends on the request's key and the logits
alone.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.rollout.admission import NOBODY, SameContext, rooms
from stretto.rollout.base import Completion, Facts, Request
from stretto.rollout.batch import Batch, entering
from stretto.rollout.cache import Fill, PrefillLayout, Trunks
from stretto.rollout.drafts import Drafts
from stretto.rollout.graphs import steps_for
from stretto.rollout.steps import Steps
from stretto.train.attention import TreeLayout
from stretto.train.head import logprobs_of
from stretto.train.model import Policy
from stretto.train.packing import merge
from stretto.types import Receipt, StopReason, Weights

PREFILL_TOKENS = 8192
"""Most context tokens prefilled at once; bounds the memory of a prefill, not the batch."""

CACHE_SHARE = 0.25
"""Share of the device's memory for keys and values when the recipe says `auto`."""

FORWARD_COSTS = {"cpu": 24.0, "cuda": 256.0}
"""What one forward costs beside its tokens, in tokens: reading all weights. SmolLM2 in bf16 on two cores: 31 ms for one
sequence, 37 ms for 8, 66 ms for 32, 111 ms for 64, on 2026-11-18."""


class NativeEngine:
    """Generates with a `Policy`."""

    name = "engine"

    def __init__(
        self,
        policy: Policy,
        *,
        memory_share: float | str = "auto",
        slots: int | None = None,
        speculate: bool | str = "auto",
        steps: Steps | None = None,
    ) -> None:
        self.policy = policy
        self.speculate, self.drafts = bool(speculate), Drafts()  # "auto" is yes: how much follows from what it brings
        self.version = 0
        self.kv_tokens = _cache_tokens(policy, CACHE_SHARE if memory_share == "auto" else float(memory_share))
        self.steps = steps or steps_for(policy, self.kv_tokens)
        self.cache, self.trunks = self.steps.cache, self.steps.trunks
        self.used_trunks = 0
        self.shared: Trunks | None = None
        self.changed = True
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.batch: Batch | None = None
        self.most_slots = slots

    @property
    def facts(self) -> Facts:
        """What it can do."""
        return Facts(keyed_noise=True, slots=self.most_slots or self.kv_tokens, kv_tokens=self.kv_tokens)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests."""
        self.waiting.extend(requests)

    @torch.no_grad()
    def step(self, budget_seconds: float) -> list[Completion]:
        """Decodes until something completes or the budget is used."""
        end = time.monotonic() + budget_seconds
        while self.waiting or self.active:
            self._admit()
            done = self._tick()
            if done or time.monotonic() >= end:
                return done
        return []

    def abort(self, keys: Sequence[int]) -> list[Completion]:
        """Takes requests out of the queue and the batch."""
        gone = set(keys)
        partial = [
            self._completion(r, np.zeros(0, np.int64), np.zeros(0), "abort") for r in self.waiting if r.key in gone
        ]
        self.waiting = deque(request for request in self.waiting if request.key not in gone)
        ended: dict[int, StopReason] = {row: "abort" for row, request in enumerate(self.active) if request.key in gone}
        return partial + self._retire(ended)

    @torch.no_grad()
    def score(self, rows: Sequence[NDArray[np.int64]], temperature: float) -> list[NDArray[np.float64]]:
        """Log-probability of every token but the first of each row."""
        scores = []
        for row in rows:
            tree = merge([row])
            tokens = torch.as_tensor(row, device=self.policy.device)
            positions = torch.arange(len(row), device=self.policy.device)
            hidden = self.policy.hidden(tokens, positions, TreeLayout.of(tree.segments, self.policy.device))
            logprobs, _ = logprobs_of(hidden[:-1], self.policy.head(), tokens[1:], temperature=temperature)
            scores.append(logprobs.double().cpu().numpy())
        return scores

    def receive(self, weights: Weights) -> Receipt:
        """Takes over a version; the tensors are the trainer's own."""
        if weights.where != "shared":
            raise ValueError(
                f"the native engine reads the trainer's tensors and cannot fetch weights from {weights.where}"
            )
        self.version = weights.version
        self.steps.weights_changed()
        return self.holds()

    def holds(self) -> Receipt:
        """Its version; the tensors are the trainer's own."""
        return Receipt(version=self.version, manifest={}, shared=True)

    def settle(self) -> None:
        """What was learned for drafts is known from now on."""
        self.drafts.settle()

    def state(self) -> Mapping[str, Any]:
        """What its drafts are made of: in bf16 the width of a forward can decide a near tie."""
        return self.drafts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Guesses as the engine did whose state it was."""
        self.drafts.restore(state)

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
        self.waiting.clear()
        self.active.clear()
        self.batch = None
        self.sleep(keep=False)

    def _clear(self) -> None:
        self.cache.clear()
        self.trunks.clear()
        self.used_trunks = 0

    def _admit(self) -> None:
        """Prefills as many waiting requests as there is room for, in their order; one alone always may enter."""
        if self.waiting and not self.active:
            # What fits together must not depend on what was asked before, or a resumed run would batch differently.
            self._clear()
            self.drafts.restart()
        while self.waiting:
            chosen: list[Request] = []
            tokens, groups = 0, dict[bytes, SameContext]()
            while self.waiting:
                request = self.waiting[0]
                context = request.tokens.tobytes()
                tokens += 0 if context in groups else len(request.tokens)
                grown = groups | {context: groups.get(context, NOBODY).joined_by(request)}
                count = len(self.active) + len(chosen) + 1
                full = self._size_with(count, grown.values()) > self.kv_tokens or count > (self.most_slots or count)
                if (full and count > 1) or (chosen and tokens > PREFILL_TOKENS):
                    break
                chosen.append(self.waiting.popleft())
                groups = grown
            if not chosen:
                return
            self._prefill(chosen, groups)

    def _size_with(self, sequences: int, groups: Collection[SameContext]) -> int:
        """Tokens of cache, trunks included, with so many active sequences once these groups have entered."""
        own, shared = rooms(groups)
        slots, capacity = self.cache.shape_with(slots=sequences, tokens=own)
        trunks, length = self.trunks.shape_with(slots=self._trunks_with(len(shared)), tokens=max(shared, default=0))
        return slots * capacity + trunks * length

    def _trunks_with(self, more: int) -> int:
        """Slots for trunks once there are so many more."""
        return max(self.trunks.slots, self.used_trunks + more)

    def _prefill(self, requests: Sequence[Request], groups: Mapping[bytes, SameContext]) -> None:
        """Computes the contexts into free slots and trunks, and appends the requests to the batch."""
        device, first = self.policy.device, len(self.active)
        own, shared = rooms(groups.values())
        self.cache.reserve(slots=first + len(requests), tokens=own)
        self.trunks.reserve(slots=self._trunks_with(len(shared)), tokens=max(shared, default=0))
        tree = merge([request.tokens for request in requests])
        places = [torch.as_tensor(place, device=device) for place in tree.places]
        fills: list[Fill] = []
        trunk_of: dict[bytes, int] = {}
        for slot, (request, place) in enumerate(zip(requests, places, strict=True), first):
            context = request.tokens.tobytes()
            if not groups[context].worth_a_trunk:
                fills.append(Fill(cache=self.cache, slot=slot, places=place))
            elif context not in trunk_of:
                trunk_of[context] = self.used_trunks
                self.used_trunks += 1
                fills.append(Fill(cache=self.trunks, slot=trunk_of[context], places=place))
        hidden = self.policy.hidden(
            torch.as_tensor(tree.tokens, device=device),
            torch.as_tensor(tree.positions, device=device),
            PrefillLayout(tree=TreeLayout.of(tree.segments, device), fills=fills),
        )
        last = hidden[torch.stack([place[-1] for place in places])]
        new = entering(requests, last, [trunk_of.get(request.tokens.tobytes(), -1) for request in requests])
        if self.batch is None:
            self.batch = new
        else:
            self.batch.add(new)
        self.active += requests
        self.changed = True

    def _tick(self) -> list[Completion]:
        """Samples for every active sequence; those that go on get their next hidden states.

        What a draft guessed is right while it is the token that the key draws; the first wrong one is replaced by that.
        """
        batch = self.batch
        if batch is None:
            return []
        width = batch.hidden.shape[1]
        along = torch.arange(width, device=batch.hidden.device)
        tokens, logprobs = self.steps.draw(batch)
        right = (tokens[:, :-1] == batch.drafts).long().cumprod(1).sum(1)
        if width > 1:
            self.drafts.judge(tried=int((right + 1).clamp(max=width - 1).sum()), right=int(right.sum()))
        hits = (tokens[..., None] == batch.stops[:, None]).any(-1)
        until_stop = torch.where(hits.any(1), hits.long().argmax(1) + 1, width)
        said = torch.minimum(torch.minimum(right + 1, until_stop), batch.limits - batch.sampled)
        rows, columns = (along < said[:, None]).nonzero(as_tuple=True)
        batch.tokens[rows, batch.sampled[rows] + columns] = tokens[rows, columns]
        batch.logprobs[rows, batch.sampled[rows] + columns] = logprobs[rows, columns]
        batch.newest = tokens.gather(1, said[:, None] - 1)[:, 0]
        batch.sampled = batch.sampled + said
        batch.lengths = batch.lengths + said
        stopped = hits.gather(1, said[:, None] - 1)[:, 0]
        ends = stopped | (batch.sampled >= batch.limits)
        done = self._retire({row: "stop" if stopped[row] else "length" for row in ends.nonzero()[:, 0].tolist()})
        self._decode()
        return done

    def _decode(self) -> None:
        """One forward over the newest token of every active sequence and the drafts that go on from it."""
        batch = self.batch
        if batch is None:
            return
        if self.changed:
            self.shared, self.changed = Trunks.of(batch.trunks, batch.bases, self.trunks), False
        own = int((batch.lengths - batch.bases).max())
        batch.drafts = self._guess(batch, min(self.cache.capacity - own, int((batch.limits - batch.sampled).max())))
        batch.hidden = self.steps.forward(batch, self.shared, own)

    def _guess(self, batch: Batch, room: int) -> Tensor:
        """(n, w-1) drafts, as many as are worth a forward and have room in the cache."""
        n, device = len(batch.newest), self.policy.device
        width = min(self.drafts.width(n, FORWARD_COSTS[device.type]), room) if self.speculate else 1
        if width < 2:
            return torch.zeros(n, 0, dtype=torch.long, device=device)
        said = [tokens[:count] for tokens, count in zip(batch.tokens.tolist(), batch.sampled.tolist(), strict=True)]
        found = [self.drafts.guess(r.tokens, told, width - 1) for r, told in zip(self.active, said, strict=True)]
        return torch.tensor([guess + [-1] * (width - 1 - len(guess)) for guess in found], device=device)

    def _retire(self, ended: dict[int, StopReason]) -> list[Completion]:
        """Takes ended sequences out and closes the gaps they leave in batch and cache."""
        if not ended or self.batch is None:
            return []
        batch = self.batch
        rows = torch.tensor(list(ended), device=self.policy.device)
        tokens, logprobs = batch.tokens[rows].cpu().numpy(), batch.logprobs[rows].cpu().numpy()
        lengths = batch.sampled[rows].tolist()
        done = [
            self._completion(self.active[row], tokens[index, :length], logprobs[index, :length], why)
            for index, ((row, why), length) in enumerate(zip(ended.items(), lengths, strict=True))
        ]
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
        batch.take(torch.tensor(order, dtype=torch.long, device=self.policy.device))
        self._close_trunks(batch)
        if not self.active:
            self.batch = None
            self.steps.rest()
        return done

    def _close_trunks(self, batch: Batch) -> None:
        """Moves trunks into the places of those that nobody continues."""
        left = sorted(set(batch.trunks.tolist()) - {-1})
        for target, source in enumerate(left):
            if source != target:
                self.trunks.move(source=source, target=target, tokens=int(batch.bases[batch.trunks == source][0]))
                batch.trunks[batch.trunks == source] = target
        self.used_trunks = len(left)

    def _completion(
        self, request: Request, tokens: NDArray[np.int64], logprobs: NDArray[np.float64], stop: StopReason
    ) -> Completion:
        return Completion(key=request.key, tokens=tokens, logprobs=logprobs, stop=stop, version=self.version)


def _cache_tokens(policy: Policy, share: float) -> int:
    """How many tokens of keys and values fit into a share of the device's memory.

    Of all its memory, not of what happens to be free: what is admitted together must not differ from run to run.
    """
    config = policy.network.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * size * policy.dtype.itemsize
    if policy.device.type == "cuda":
        memory = torch.cuda.mem_get_info(policy.device)[1]
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, int(memory * share / per_token))
