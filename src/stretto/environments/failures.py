"""Lines of the user's files: where an environment or a tool raised, and where one blocks the event loop.

An environment that raises costs its trajectory, and a tool that raises is told to the model. Neither ends the run, so
a mistake in a tool or in a background task is shown as a warning, once per line of code.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from dataclasses import dataclass
from types import FrameType
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingCode:
    """Code that runs in a thread whose event loop does not turn."""

    place: str
    """File, line and function: the user's, where one is at work."""
    environment: bool
    """True if nothing but an environment is at work there, so that an exception costs no more than it."""


def blocking(frame: FrameType | None) -> BlockingCode:
    """Return the code that runs in a stack above the event loop, from its innermost frame."""
    named, first, only = None, frame, True
    while frame is not None and not frame.f_code.co_filename.endswith(os.path.join("asyncio", "events.py")):
        file = frame.f_code.co_filename
        named = named or (frame if worker.is_users(file) else None)
        only = only and (
            not file.startswith(worker.OWN) or file.startswith(os.path.join(worker.OWN, "environments", ""))
        )
        frame = frame.f_back
    shown = named or first
    if shown is None:
        return BlockingCode(place="an unknown place", environment=False)
    place = f"{shown.f_code.co_filename}, line {shown.f_lineno}, in {shown.f_code.co_name}"
    mine = first is not None and first.f_code.co_filename.startswith(worker.OWN)
    return BlockingCode(place=place, environment=frame is not None and only and (named is not None or mine))
