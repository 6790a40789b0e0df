"""Deadlines for stages that keep this process busy and cannot be asked how they are: a thread looks at the clock.

When a stage overruns, the stacks of all threads go to a file of the run folder and a signal interrupts the main thread,
which raises a DeadlineError. That works where Python runs or waits: between two operations of torch, in a sleep, at a
lock. If the main thread has not left the stage a little later, the process ends at once with the same message and exit
code, after `last_words` has ended our worker processes.

The same thread sees that the event loop does not turn, and names the line that blocks it. Where that is an environment
past its deadline, or one that Ctrl-C has asked to end, that line is interrupted.

What it cannot do: interrupt an operation inside a library or the kernel (the process then ends without its cleanups,
and a resume starts from the newest checkpoint), do anything while a library keeps Python's global lock, show the
stacks of other processes, or tell a stage that hangs from one that is slow. Outside the main thread nothing is
watched, because signals arrive only there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

from stretto.algorithms.catalog import find_facts
from stretto.environments.failures import blocking
from stretto.environments.hosts import GRACE
from stretto.errors import DeadlineError
from stretto.recipe.schema import Recipe
from stretto.threads import end
from stretto.workers.deadlines import call_deadlines

PATIENCE = 10.0
"""Seconds after its deadline in which a stage has ended, by itself or by force."""

SPARE = 5.0
"""How many of them a stage gets before it is interrupted that looks at its deadline itself."""

TIMES = 10
"""How often a stage is interrupted in that time; where Python discards exceptions (`__del__`, hooks), once is lost."""

QUIET = 30.0
"""Seconds without a turn of the event loop after which the line that blocks it is named."""

LOOKS = 0.1
"""Seconds between two interruptions of environments that block the loop one after the other."""

SIGNAL = signal.SIGURG
"""Ignored by default, so that one which arrives a moment too late harms nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """How long a stage may take."""

    seconds: float
    """Until it is interrupted."""
    key: str
    """The recipe's key that says so."""
    spare: float = 0.0
    """Seconds of that which are not the deadline's: it looks at that itself, and is only stopped if it cannot."""


def limits(recipe: Recipe) -> dict[str, StageLimit]:
    """Stage -> its limit. Every call of a worker has a deadline of its own, at the start what is left of that of all
    of it; these are for the process that calls them, which gets a little more, so that who is late is named."""
    given, reward = call_deadlines(recipe), recipe.deadlines.reward
    rounds = 1 + (recipe.evaluate.pass_k > 1)
    evaluate = rounds * (given.generate + reward)
    facts = find_facts(recipe.algorithm.name)
    most = recipe.batch.max_rounds if facts is None or facts.drops else 1
    step = most * (given.generate + reward) + 2 * given.train + given.publish

    def spared(seconds: float, key: str, spare: float = SPARE) -> StageLimit:
        return StageLimit(seconds=seconds + spare, key=key, spare=spare)

    return {
        "step": spared(step, "deadlines.generate"),
        "start": spared(given.start, "deadlines.start"),
        "evaluate": spared(evaluate, "deadlines.generate"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWatch:
    """Facts about the event loop with which a stage's watch sees that it is blocked."""

    turned: Callable[[], float]
    """When (`time.monotonic`) it turned last."""
    note: Callable[[str], object]
    """Shows a line."""
    deadline: float
    """Seconds that an environment may take, `environment.deadline`."""
    asked: Callable[[], bool] = lambda: False
    """True once Ctrl-C or a signal has asked the run to end."""
    quiet: float = QUIET
    """Seconds without a turn after which the line that blocks it is named."""
    grace: float = GRACE
    """Seconds that an environment has to end after its deadline, or after the run was asked to end."""

    def silent(self) -> float:
        """Return for how many seconds it has not turned."""
        return time.monotonic() - self.turned()

    def is_past(self) -> bool:
        """Return true if an environment that blocks it has had its time."""
        return self.silent() >= (self.grace if self.asked() else self.deadline + self.grace)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWatch:
    """Watches over the stages of a run, one at a time."""

    limits: Mapping[str, StageLimit]
    """Stage -> its limit; others are not watched."""
    folder: Path
    """Where the stacks of a stage that overran go."""
    moved: Callable[[], float] = lambda: 0.0
    """When (`time.monotonic`) the processes that judge answers last got on: while they do, no stage is interrupted for
    their sake, because many answers take long."""
    last_words: Callable[[], None] = lambda: None
    """Called in another thread before the process is ended by force."""
    patience: float = PATIENCE
    """Seconds between the deadline and that."""
    loop: LoopWatch | None = None
    """The event loop that the stages run in, if it is watched."""

    @contextmanager
    def stage(self, stage: str, step: int, last: str) -> Iterator[None]:
        """A stage of a step, interrupted when it overruns. `last` says in words what was finished before it."""
        limit = self.limits.get(stage)
        if limit is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        stacks = self.folder / f"stacks-{stage}-{step:06d}.txt"
        where = f"where every thread stands is in {stacks}"
        why = [
            f"{stage}: step {step} is not finished after {limit.seconds:g} s, since {datetime.now():%H:%M:%S}; "
            f"{last}; {where}\n"
            f"    fix: look there for what it waits for, or raise {limit.key}"
        ]

        left, changing, main = threading.Event(), threading.Lock(), threading.get_ident()
        blocked = threading.Event()

        def interrupt(number: int, frame: FrameType | None) -> None:
            if not left.is_set() and (not blocked.is_set() or blocking(frame).environment):
                raise DeadlineError(why[0])

        def seen() -> str | None:
            """Wait for the stage to end or to overrun; why an environment is to be interrupted, if one blocks it."""
            due, named, loop = time.monotonic() + limit.seconds, 0.0, self.loop
            while (now := time.monotonic()) < due:
                if left.wait(min(due - now, 1.0, loop.quiet / 4) if loop else due - now):
                    return None
                if time.monotonic() >= due:
                    due = max(due, self.moved() + limit.seconds)
                if loop is None or loop.silent() < min(loop.quiet, loop.grace):
                    continue
                code, silent, turned = blocking(sys._current_frames().get(main)), loop.silent(), loop.turned()
                if silent >= loop.quiet and named != turned:
                    named = turned
                    loop.note(f"{code.place} has blocked the run for {silent:.0f} s: nothing else runs meanwhile")
                if code.environment and loop.is_past():
                    fix = "let it await or end there, or give the environment processes, which can be killed: "
                    return (
                        f"{stage}: {code.place} has blocked step {step} for {silent:.0f} s, past environment.deadline "
                        f"({loop.deadline:g} s); {where}\n    fix: {fix}environment.hosts=2"
                    )
            return None

        def signaled(pause: float) -> bool:
            """Interrupt the main thread; true once the stage is left, if that is before the pause is over."""
            with changing:  # a signal that is sent before the stage is left arrives before the next one begins
                if left.is_set():
                    return True
                signal.pthread_kill(main, SIGNAL)
            return left.wait(pause)

        def look() -> None:
            text, end = seen(), time.monotonic() + self.patience
            if left.is_set():
                return
            with suppress(OSError), stacks.open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            if text is not None:
                why[0] = text
                blocked.set()
                while time.monotonic() < end:  # others may block it in their turn
                    if signaled(LOOKS):
                        return
            else:
                for _ in range(TIMES):
                    if signaled((self.patience - limit.spare) / TIMES):
                        return
            self._end(why[0])

        thread = threading.Thread(target=look, name=f"watch-{stage}", daemon=True)
        before = signal.signal(SIGNAL, interrupt)
        try:
            try:
                thread.start()
                yield
            finally:
                with changing:
                    left.set()
        finally:
            left.set()  # the interruption may have come just before it was said above
            signal.signal(SIGNAL, before)

    def _end(self, text: str) -> None:
        """Leaves without asking the main thread, which may hold any lock: so no `print` either."""
        with suppress(Exception):
            self.last_words()
        shown = "\x1b[?25h\n" if os.isatty(2) else ""  # a live display hides the cursor
        with suppress(OSError):
            os.write(2, f"{shown}{text}\n".encode())
        end(DeadlineError.exit_code)
