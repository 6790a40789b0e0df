"""What requests will need of the cache, before any is computed: contexts that several share stand there once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stretto.engines.base import Request

WORTH_A_TRUNK = 512
"""Fewest tokens of cache that a trunk must save; below, the detour costs more than reading them once each."""


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
    """True if the context stands in a trunk already, which others continue."""

    def joined_by(self, request: Request) -> SameContext:
        """The same context with one more request."""
        most = max(self.most, request.max_new_tokens)
        return replace(self, count=self.count + 1, length=len(request.tokens), most=most)

    @property
    def worth_a_trunk(self) -> bool:
        """Whether to keep the context once for all of them."""
        return self.stands or (self.count - 1) * self.length >= WORTH_A_TRUNK


NOBODY = SameContext(count=0, length=0, most=0, stands=False)
"""Before the first."""


def rooms(groups: Iterable[SameContext]) -> tuple[int, list[int]]:
    """Most tokens of cache that a request may come to need for itself, and those of every trunk that is to be made."""
    own, trunks = 0, []
    for group in groups:
        own = max(own, group.most + (0 if group.worth_a_trunk else group.length))
        trunks += [group.length] if group.worth_a_trunk and not group.stands else []
    return own, trunks
