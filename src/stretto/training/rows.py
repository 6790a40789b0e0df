"""Asks a model about conversations a packed row at a time, whatever it is asked: log-probabilities, values, scores.

A row that finds no memory is cut and tried again. Nothing is accumulated here, so that changes no number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.models.memory import OutOfMemory
from stretto.training.packing import divide, merge, middle_of
from stretto.types import Conversation, Sample

Numbers = NDArray[np.float64]


def map_microbatches(
    conversations: Sequence[Conversation],
    *,
    budget: int,
    numbers: Callable[[Sequence[Sample]], Sequence[Numbers]],
    smaller: Callable[[Sequence[Sample]], list[tuple[Sample, ...]]],
) -> list[Numbers]:
    """The numbers of each conversation, in the order given; none for one in which nothing was sampled.

    `numbers` computes one row; where it raises OutOfMemory, `smaller` says what to try instead.
    """
    found: dict[int, Numbers] = {}
    queue = deque(divide(asked(conversations), budget))
    while queue:
        piece = queue.popleft()
        try:
            row = numbers(piece)
        except OutOfMemory:
            queue.extendleft(reversed(smaller(piece)))
            continue
        found.update({sample.key[3]: mine for sample, mine in zip(piece, row, strict=True)})
    return in_order(found, len(conversations))


def halved(
    row: Sequence[Sample], *, share: bool = True, whole: bool = False
) -> tuple[list[tuple[Sample, ...]], int] | None:
    """A row cut in two, and half of the tokens that it computes, or none where it cannot be cut; `share` and `whole`
    are as in `divide`."""
    middle, talks = middle_of(row, whole=whole), [sample.conversation.tokens for sample in row]
    if middle is None:
        return None
    tokens = len(merge(talks).tokens) if share else sum(map(len, talks))
    return [tuple(row[:middle]), tuple(row[middle:])], tokens // 2


def asked(conversations: Sequence[Conversation]) -> list[Sample]:
    """Conversations in which something was sampled, as samples; the last number of a key is the conversation's."""
    return [
        Sample(key=("", 0, 0, index), conversation=c, advantage=np.zeros(c.sampled), leads=True)
        for index, c in enumerate(conversations)
        if c.trained.any()
    ]


def in_order(found: Mapping[int, Numbers], count: int) -> list[Numbers]:
    """The numbers of so many conversations; none for one that was not asked about."""
    return [found.get(index, np.zeros(0)) for index in range(count)]
