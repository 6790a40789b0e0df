"""Seconds that one lane (one engine on one cell) takes to generate answers of given lengths: continuous batching.

Requests are admitted in order while there is a slot and room for their caches, leave when they end, and are preempted,
newest first, when the caches outgrow the pool; what was preempted is computed again. Between two such events a tick
changes only by the growing caches, so whole stretches are taken at once. The scheduler simulates lanes together with
everything else; this is the same arithmetic for one lane alone, for closed forms and for pruning.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A tick of decoding for a number of sequences: everything that does not depend on how long they are."""

    weights: float
    """Bytes of weights that one rank reads."""
    bandwidth: float
    """Bandwidth of the device's memory, bytes/s."""
    share: float
    """Share of that bandwidth that decoding reaches."""
    products: float
    """Seconds of products, which hide behind reading or hide it."""
    fixed: float
    """Seconds that it takes however small it is."""
    messages: float
    """Seconds of messages between ranks."""

    def seconds(self, cache: float) -> float:
        """The tick, with so many bytes of caches to read on each rank."""
        read = (self.weights + cache) / self.bandwidth
        return self.fixed + max(read / self.share, self.products) + self.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What generating a set of answers took."""

    seconds: float
    """From the first tick to the last."""
    ticks: int
    """Decode steps."""
    preempted: int
    """Times that a request lost its cache."""
    busy: float
    """Requests in flight, averaged over time."""
    ends: tuple[float, ...]
    """When each request ended, in the order given."""


Tick = Callable[[float, float], float]
"""Batch and mean context -> seconds."""


def decode(
    lengths: Sequence[int],
    prompt: float,
    tick: Tick,
    *,
    slots: int,
    pool: float,
    prefill: Callable[[float], float] = lambda tokens: 0.0,
) -> Decoded:
    """Generates answers of these lengths behind prompts of one length; `pool` is the tokens that caches may hold."""
    waiting = deque((index, 0) for index in range(len(lengths)))
    active: list[tuple[int, int, int]] = []  # a heap of (tick at which it ends, request, tick at which it began)
    order: list[tuple[int, int]] = []  # as they were admitted: (request, tick at which it began), newest last
    ends = [0.0] * len(lengths)
    gone: set[tuple[int, int]] = set()
    now, ticks, live, preempted, area = 0.0, 0, 0.0, 0, 0.0
    while waiting or active:
        came = 0.0
        while waiting and len(active) < slots:
            index, done = waiting[0]
            if active and live + prompt + done + len(active) + 1 > pool:
                break
            waiting.popleft()
            began = ticks - done
            heapq.heappush(active, (began + lengths[index], index, began))
            order.append((index, began))
            live += prompt + done
            came += prompt + done
        now += prefill(came) if came else 0.0
        batch = len(active)
        stretch = active[0][0] - ticks
        if live + batch * stretch > pool and batch > 1:
            stretch = max(1, min(stretch, int((pool - live) / batch)))
        spent = stretch * tick(batch, (live + batch * stretch / 2) / batch)
        now, ticks, live, area = now + spent, ticks + stretch, live + batch * stretch, area + batch * spent
        while active and active[0][0] <= ticks:
            _, index, began = heapq.heappop(active)
            ends[index] = now
            gone.add((index, began))
            live -= prompt + lengths[index]
        while live + len(active) > pool and len(active) > 1:
            index, began = order.pop()
            if (index, began) in gone:
                continue
            active.remove((began + lengths[index], index, began))
            heapq.heapify(active)
            live -= prompt + ticks - began
            waiting.appendleft((index, ticks - began))
            preempted += 1
    return Decoded(seconds=now, ticks=ticks, preempted=preempted, busy=area / now if now else 0.0, ends=tuple(ends))
