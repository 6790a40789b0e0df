"""An answer to Ctrl-C while what runs is being finished; what the key does is asyncio's affair and stays so.

asyncio cancels the run at its next await, which may be a while after the key was pressed; a second press interrupts at
once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

HEARD = b"\nfinishing what runs, then a checkpoint is written; press Ctrl-C again to stop at once\n"


def stop_if_interrupted() -> None:
    """Ends what Ctrl-C was pressed for while it could not be told: in long work that never awaits, or in `unbroken`.

    For places where nothing is lost.
    """
    with suppress(RuntimeError):  # no event loop: then Ctrl-C interrupts at once anyway
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


async def unbroken(work: Coroutine[Any, Any, T], *, once: Callable[[], bool] = lambda: True) -> T:
    """The result of work that Ctrl-C does not end any more `once` it has begun what must not be left half done.

    Who calls this asks `stop_if_interrupted` afterwards.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.done() or once():
            return await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


@contextmanager
def interrupt_answered() -> Iterator[None]:
    """Within it, the first Ctrl-C is answered on standard error and then handled as before, as all later ones are."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def answer(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, handler)
        with suppress(OSError):  # not `print`, which may be what was interrupted
            os.write(2, HEARD)
        handler(number, frame)

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is answer:  # else it is asyncio's again, which may have put back its own
            signal.signal(signal.SIGINT, handler)
