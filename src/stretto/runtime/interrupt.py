"""What ends a run early in good order: Ctrl-C, SIGTERM, SIGHUP, or a time limit. The first is answered and cancels.

Ctrl-C is asyncio's affair and stays so: it cancels the run at its next await, which may be a while after the key was
pressed. SIGTERM (Slurm, spot machines, `docker stop`) and SIGHUP (a terminal that was closed) are made to do the same,
where nobody has told the process to treat them otherwise: what `nohup` ignores stays ignored. A second one, of
whatever kind, interrupts at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from stretto.errors import RunStopped

T = TypeVar("T")

HEARD = b"\nfinishing what runs, then a checkpoint is written; press Ctrl-C again to stop at once\n"
TOLD = "\n{}: finishing what runs, then a checkpoint is written; another signal stops at once\n"

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that do what Ctrl-C does, where they would end the process."""


class StopRequest:
    """What has asked a run to end before its last step, if anything has."""

    def __init__(self, end: tuple[float, str] | None = None) -> None:
        """`end` is when the run's time is over, on the monotonic clock, and who says so."""
        self.end = end
        self.why, self.exit_code = "", 128 + signal.SIGINT
        # True once it was asked again, and is not to finish anything.
        self.at_once = False
        self.task: asyncio.Task[Any] | None = None

    def note(self, number: int) -> bool:
        """A signal has come; True if it is the first thing that asks."""
        first = not self.why
        if first:
            self.why, self.exit_code = signal.Signals(number).name, 128 + number
        self.at_once = not first
        return first

    def time_is_over(self, who: str) -> None:
        """Cancels the run, as SIGTERM would, which is what comes next."""
        if not self.why:
            self.why, self.exit_code = who, 128 + signal.SIGTERM
            if self.task is not None:
                self.task.cancel()


def end_early(number: int, frame: object) -> None:
    """Ends a command that has no run yet, or none any more."""
    name = signal.Signals(number).name
    raise RunStopped(f"stopped by {name}", exit_code=128 + number, why=name)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, signals that would end the process at once unwind it, as Ctrl-C does; in the main thread."""
    here = threading.current_thread() is threading.main_thread()
    mine = [number for number in ENDING if here and signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end_early)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


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
def interrupt_answered(request: StopRequest | None = None) -> Iterator[None]:
    """Within it, the first Ctrl-C is answered on standard error and then handled as before, as all later ones are; and
    signals that would end the process are handled so, too. `request` is told which of them came first."""
    asked = request or StopRequest()
    with suppress(RuntimeError):  # no event loop
        asked.task = asyncio.current_task()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt: Any = signal.getsignal(signal.SIGINT)
    before: dict[int, Any] = {number: signal.getsignal(number) for number in ENDING}
    before = {number: how for number, how in before.items() if how in (signal.SIG_DFL, end_early)}
    before |= {signal.SIGINT: interrupt} if callable(interrupt) else {}

    def answer(number: int, frame: Any) -> None:
        first = asked.note(number)
        if not first:
            give_back()
        with suppress(OSError):  # not `print`, which may be what was interrupted
            os.write(2, b"" if not first else HEARD if number == signal.SIGINT else TOLD.format(asked.why).encode())
        if callable(interrupt):
            interrupt(number, frame)  # asyncio's own: it cancels the first time, and raises the second
        elif first and asked.task is not None:
            asked.task.cancel()
        else:
            raise KeyboardInterrupt

    def give_back() -> None:
        for number, how in before.items():
            if signal.getsignal(number) is answer:  # else it is asyncio's again, which may have put back its own
                signal.signal(number, how)

    for number in before:
        signal.signal(number, answer)
    try:
        yield
    finally:
        give_back()
