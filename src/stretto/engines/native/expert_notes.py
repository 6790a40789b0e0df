"""Which experts computed each token of the answers in progress, where a mixture is trained on those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.engines.base import Request
from stretto.types import ANY_EXPERT

Choices = NDArray[np.int16]
"""(tokens, routers, K)"""


class ExpertNotes:
    """By the keys of requests."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Choices]] = {}
        # Of the newest forward, of whose tokens it is not known yet which were right.
        self.latest: dict[int, Choices] = {}

    def begin(self, request: Request, context: Choices) -> None:
        """A context was computed."""
        self.rows[request.key] = [context]

    def decoded(self, requests: Sequence[Request], table: Choices) -> None:
        """A forward over the newest token of each answer and the drafts that go on from it."""
        width = len(table) // max(1, len(requests))
        self.latest = {request.key: table[row * width : (row + 1) * width] for row, request in enumerate(requests)}

    def said(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """So many tokens more were sampled from that forward: it had read as many, and further drafts were wrong."""
        for request, count in zip(requests, counts, strict=True):
            if (table := self.latest.pop(request.key, None)) is not None:
                self.rows[request.key].append(table[:count])

    def take(self, key: int) -> Choices | None:
        """Those of an answer that has ended, context included; its last token was not read any more."""
        self.latest.pop(key, None)
        if (parts := self.rows.pop(key, None)) is None:
            return None
        return np.concatenate([*parts, np.full_like(parts[0][:1], ANY_EXPERT)])
