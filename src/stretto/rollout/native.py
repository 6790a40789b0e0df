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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.rollout.base import Completion, Facts, Request
from stretto.rollout.cache import DecodeLayout, KeyValueCache, PrefillLayout
from stretto.rollout.sampling import draw, signed
from stretto.train.attention import TreeLayout
from stretto.train.head import chunk_logits, logprobs_of
from stretto.train.model import Policy
from stretto.train.packing import merge
from stretto.types import Receipt, StopReason, Weights

PREFILL_TOKENS = 8192
"""Most context tokens prefilled at once; bounds the memory of a prefill, not the batch."""

CACHE_SHARE = 0.25
"""Share of the device's memory for keys and values when the recipe says `auto`."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The active sequences, one row each; row i lives in slot i of the cache."""

    keys: Tensor
    """Noise keys."""
    lengths: Tensor
    """Tokens in the cache."""
    sampled: Tensor
    """Tokens sampled so far."""
    limits: Tensor
    """Most tokens to sample."""
    temperatures: Tensor
    """Sampling temperatures."""
    stops: Tensor
    """(n, k) ids that end a sequence, padded with -1."""
    newest: Tensor
    """The tokens sampled last."""
    hidden: Tensor
    """(n, W) states that predict the next tokens."""

    def take(self, rows: Tensor) -> None:
        """Keeps these rows, in this order."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[rows])

    def add(self, other: Batch) -> None:
        """Appends rows."""
        for field in fields(self):
            mine, new = getattr(self, field.name), getattr(other, field.name)
            if field.name == "stops" and mine.shape[1] != new.shape[1]:
                width = max(mine.shape[1], new.shape[1])
                mine, new = (torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in (mine, new))
            setattr(self, field.name, torch.cat([mine, new]))


@dataclass(slots=True, kw_only=True)
class Progress:
    """What one active request has so far, on the host."""

    request: Request
    """What was asked."""
    tokens: list[int]
    """Sampled tokens."""
    logprobs: list[float]
    """Their log-probabilities."""


class NativeEngine:
    """Generates with a `Policy`."""

    def __init__(self, policy: Policy, *, memory_share: float | str = "auto", slots: int | None = None) -> None:
        self.policy = policy
        self.version = 0
        self.cache = KeyValueCache()
        self.waiting: deque[Request] = deque()
        self.active: list[Progress] = []
        self.batch: Batch | None = None
        self.most_slots = slots
        self.kv_tokens = _cache_tokens(policy, CACHE_SHARE if memory_share == "auto" else float(memory_share))

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
            self._completion(Progress(request=r, tokens=[], logprobs=[]), "abort")
            for r in self.waiting
            if r.key in gone
        ]
        self.waiting = deque(request for request in self.waiting if request.key not in gone)
        ended: dict[int, StopReason] = {
            row: "abort" for row, progress in enumerate(self.active) if progress.request.key in gone
        }
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
        return Receipt(version=self.version, manifest={}, shared=True)

    def sleep(self, keep: bool) -> None:
        """Gives the cache's memory back; the weights are the trainer's."""
        self.cache.clear()

    def wake(self) -> None:
        """Nothing to undo: the cache is taken as needed."""

    def close(self) -> None:
        """Forgets everything."""
        self.waiting.clear()
        self.active.clear()
        self.batch = None
        self.cache.clear()

    def _admit(self) -> None:
        """Prefills as many waiting requests as there is room for, in their order; one alone always may enter."""
        if self.waiting and not self.active:
            # What fits together must not depend on what was asked before, or a resumed run would batch differently.
            self.cache.clear()
        while self.waiting:
            chosen: list[Request] = []
            tokens = longest = 0
            while self.waiting:
                request = self.waiting[0]
                longest = max(longest, _room(request))
                tokens += len(request.tokens)
                count = len(self.active) + len(chosen) + 1
                slots, capacity = self.cache.shape_with(slots=count, tokens=longest)
                full = slots * capacity > self.kv_tokens or count > (self.most_slots or count)
                if (full and count > 1) or (chosen and tokens > PREFILL_TOKENS):
                    break
                chosen.append(self.waiting.popleft())
            if not chosen:
                return
            self._prefill(chosen)

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Computes the contexts into free slots and appends the requests to the batch."""
        device, first = self.policy.device, len(self.active)
        self.cache.reserve(slots=first + len(requests), tokens=max(map(_room, requests)))
        tree = merge([request.tokens for request in requests])
        places = [torch.as_tensor(place, device=device) for place in tree.places]
        layout = PrefillLayout(
            tree=TreeLayout.of(tree.segments, device), places=places, first_slot=first, cache=self.cache
        )
        hidden = self.policy.hidden(
            torch.as_tensor(tree.tokens, device=device), torch.as_tensor(tree.positions, device=device), layout
        )
        width = max(len(request.stop) for request in requests)
        stops = [sorted(request.stop) + [-1] * (width - len(request.stop)) for request in requests]

        def column(values: Iterable[float], dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        new = Batch(
            keys=column(signed(request.key) for request in requests),
            lengths=column(len(request.tokens) for request in requests),
            sampled=column(0 for _ in requests),
            limits=column(request.max_new_tokens for request in requests),
            temperatures=column((request.temperature for request in requests), torch.float64),
            stops=torch.tensor(stops, dtype=torch.long, device=device).reshape(len(requests), width),
            newest=column(-1 for _ in requests),
            hidden=hidden[torch.stack([place[-1] for place in places])],
        )
        if self.batch is None:
            self.batch = new
        else:
            self.batch.add(new)
        self.active += [Progress(request=request, tokens=[], logprobs=[]) for request in requests]

    def _tick(self) -> list[Completion]:
        """Samples one token for every active sequence; those that go on get their next hidden state."""
        batch = self.batch
        if batch is None:
            return []
        logits = chunk_logits(batch.hidden, self.policy.head(), 1.0)
        tokens, logprobs = draw(logits, keys=batch.keys, positions=batch.sampled, temperatures=batch.temperatures)
        batch.newest = tokens
        batch.sampled += 1
        stopped = (tokens[:, None] == batch.stops).any(-1)
        full = batch.sampled >= batch.limits
        for progress, token, logprob in zip(self.active, tokens.tolist(), logprobs.tolist(), strict=True):
            progress.tokens.append(token)
            progress.logprobs.append(logprob)
        ended: dict[int, StopReason] = {
            row: "stop" if stop else "length"
            for row, (stop, length) in enumerate(zip(stopped.tolist(), full.tolist(), strict=True))
            if stop or length
        }
        done = self._retire(ended)
        self._decode()
        return done

    def _decode(self) -> None:
        """One forward over the newest token of every active sequence."""
        batch = self.batch
        if batch is None:
            return
        batch.lengths += 1
        layout = DecodeLayout(lengths=batch.lengths, longest=int(batch.lengths.max()), cache=self.cache)
        batch.hidden = self.policy.hidden(batch.newest, batch.lengths - 1, layout)

    def _retire(self, ended: dict[int, StopReason]) -> list[Completion]:
        """Takes ended sequences out and closes the gaps they leave in batch and cache."""
        if not ended or self.batch is None:
            return []
        done = [self._completion(self.active[row], why) for row, why in ended.items()]
        left = len(self.active) - len(ended)
        movers = iter(row for row in range(left, len(self.active)) if row not in ended)
        order = [next(movers) if row in ended else row for row in range(left)]
        for target, source in enumerate(order):
            if source != target:
                self.cache.move(source=source, target=target, tokens=int(self.batch.lengths[source]))
        self.active = [self.active[row] for row in order]
        self.batch.take(torch.tensor(order, dtype=torch.long, device=self.policy.device))
        if not self.active:
            self.batch = None
        return done

    def _completion(self, progress: Progress, stop: StopReason) -> Completion:
        return Completion(
            key=progress.request.key,
            tokens=np.array(progress.tokens, dtype=np.int64),
            logprobs=np.array(progress.logprobs, dtype=np.float64),
            stop=stop,
            version=self.version,
        )


def _room(request: Request) -> int:
    """Tokens of cache a request may come to need."""
    return len(request.tokens) + request.max_new_tokens


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
