"""Conversations dealt to several who answer at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.types import Conversation


async def dealt(
    conversations: Sequence[Conversation],
    among: Sequence[str],
    ask: Callable[[str, Sequence[Conversation]], Awaitable[Sequence[NDArray[np.float64]]]],
) -> list[NDArray[np.float64]]:
    """Numbers of each conversation, asked of several in turn and all at once."""
    count = len(among)
    shares = [list(conversations[index::count]) for index in range(count)]
    found = await asyncio.gather(*(ask(each, share) for each, share in zip(among, shares, strict=True)))
    return [found[index % count][index // count] for index in range(len(conversations))]
