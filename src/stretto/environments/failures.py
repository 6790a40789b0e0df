"""What a user's environment or tool raised, in words: its type, its message, and the lines of the user's files.

An environment that raises costs its trajectory, and a tool that raises is told to the model. Neither ends the run, so
a mistake in a tool or in a background task is shown as a warning, once per line of code.
"""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

from stretto.errors import StrettoError
from stretto.sandbox import worker

SHOWN: set[str] = set()
"""Places in code that were warned of."""


def raised(error: BaseException) -> str:
    """Return the type, the message and the last frames of what a user's code raised."""
    ours = isinstance(error, StrettoError)
    told = worker.failure(error, users_only=ours)
    kind = "" if ours else f"{told['type']}: "
    return f"{kind}{told['message']}\n{told['trace']}".rstrip()


def warn_once(what: str, error: BaseException) -> bool:
    """Warn of what a line of the user's raised, the first time that it does. False where no such line is to blame."""
    place = worker.failure(error, users_only=True)["trace"]
    if place and place not in SHOWN:
        SHOWN.add(place)
        warnings.warn(f"{what}: {raised(error)}", stacklevel=3)
    return bool(place)


def note_lost_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle what no coroutine of an event loop took: warn of what a background task raised and nothing awaited."""
    error = context.get("exception")
    if not isinstance(error, BaseException) or not warn_once("a background task failed, and nothing awaited it", error):
        loop.default_exception_handler(context)
