"""What requests will need of the cache, before any is computed: contexts that several share stand there once.

Pure arithmetic without torch, because plans count with it too: `most_at_once` is how many answers find room in the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.engines.base import Request

CACHE_SHARE = 0.25
"""Share of the device's memory for keys and values where neither recipe nor plan says one."""

GRAIN = 64
"""Capacities are multiples of this many tokens."""

WORTH_SHARING = 512
"""Fewest tokens of cache that a shared prefix must save; below, the detour costs more than reading them once each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameContext:
    """The requests with one context."""

    count: int
    """How many."""
    length: int
    """Tokens of the context."""
    most: int
    """Most that one of them may sample."""
    stands: bool
    """True if the context is a shared prefix already, which others continue."""
    coming: int = 0
    """How many wait for a place together, those that have one now included: who comes later joins."""

    def joined_by(self, request: Request) -> SameContext:
        """The same context with one more request."""
        most = max(self.most, request.max_new_tokens)
        return replace(self, count=self.count + 1, length=len(request.tokens), most=most)

    @property
    def worth_sharing(self) -> bool:
        """Whether to keep the context once for all of them."""
        return self.stands or (max(self.count, self.coming) - 1) * self.length >= WORTH_SHARING


def not_yet(waiting: Iterable[Request], context: bytes, *, stands: bool) -> SameContext:
    """Nobody of those who wait with this context at the head of a queue has a place."""
    coming = sum(1 for _ in takewhile(lambda each: each.tokens.tobytes() == context, waiting))
    return SameContext(count=0, length=0, most=0, stands=stands, coming=coming)


def rooms(groups: Iterable[SameContext]) -> tuple[int, list[int]]:
    """Most tokens of cache that a request may come to need for itself, and those of prefixes that are to be shared."""
    own, prefixes = 0, []
    for group in groups:
        own = max(own, group.most + (0 if group.worth_sharing else group.length))
        prefixes += [group.length] if group.worth_sharing and not group.stands else []
    return own, prefixes


def rounded(count: int, grain: int = 1) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, … grains; two sizes for each doubling, so that sizes repeat."""
    grains = -(-count // grain)
    step = 1 << max(0, grains.bit_length() - 2)
    return -(-grains // step) * step * grain


def most_at_once(tokens: float, *, samples: int, prompt: int, most: int, recorded: bool) -> int:
    """How many answers a cache of so many tokens has room for, one at least; the rest as in `taken_by`."""
    needed = partial(taken_by, samples=samples, prompt=prompt, most=most, recorded=recorded)
    return max(1, bisect_right(range(1, 2 + int(tokens // GRAIN)), tokens, key=needed))


def taken_by(answers: int, *, samples: int, prompt: int, most: int, recorded: bool) -> int:
    """Tokens of cache for so many answers, `samples` of each prompt, that may have `most` tokens each. Where steps are
    `recorded`, there are places for the next size up."""
    own, prefixes = rooms([SameContext(count=samples, length=prompt, most=most, stands=False)])
    groups = -(-answers // samples) if prefixes else 0
    slots, shared = (rounded(answers), rounded(groups)) if recorded else (answers, groups)
    return slots * in_grains(own) + shared * in_grains(prompt)


def in_grains(tokens: int) -> int:
    """The capacity for so many tokens."""
    return -(-tokens // GRAIN) * GRAIN
