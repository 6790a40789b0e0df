"""Several workers asked at the same time: all alike, or each about a share of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto.errors import DeadlineError, LostTouchError, WorkerLost
from stretto.types import Conversation

T = TypeVar("T")


def raise_first(answers: Sequence[T | BaseException]) -> list[T]:
    """Answers without errors. Where one died, that is what is raised, and else that one does not answer, with what
    another says that failed: it may be what was waited for. Who only lost touch with others is the last to be asked."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        late = next((error for error in errors if isinstance(error, DeadlineError)), None)
        failed = next((error for error in errors if not isinstance(error, DeadlineError | LostTouchError)), None)
        if late is not None and failed is not None and not isinstance(failed, WorkerLost):
            late = DeadlineError(f"{late}\n    another has failed: {failed}")
        raise next((error for error in errors if isinstance(error, WorkerLost)), late or failed or errors[0])
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What these calls come to; all of them are over when it raises."""
    return raise_first(await asyncio.gather(*calls, return_exceptions=True))


async def scatter_gather(
    conversations: Sequence[Conversation],
    among: Sequence[str],
    ask: Callable[[str, Sequence[Conversation]], Awaitable[Sequence[NDArray[np.float64]]]],
) -> list[NDArray[np.float64]]:
    """Numbers of each conversation, asked of several in turn and all at once."""
    count = len(among)
    shares = [list(conversations[index::count]) for index in range(count)]
    found = await asyncio.gather(*(ask(each, share) for each, share in zip(among, shares, strict=True)))
    return [found[index % count][index // count] for index in range(len(conversations))]
