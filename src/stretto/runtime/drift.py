"""Guards that look at how a run develops: each warns with advice when something goes wrong slowly, or ends the run.

Windows of ten steps are compared, because single steps are noise. A warning comes once, and again only after what it
warns of was over in between. Earlier steps are read from the run's own metrics, so a resumed run has the same memory.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from stretto.errors import GuardError
from stretto.recipe.schema import Guards

WINDOW = 10
"""Steps that are averaged."""

SETTLED = 5
"""Steps after which a process has the memory that it needs."""

NOISE = 1e-4
"""Mean k3 below which its growth says nothing."""

COMPARED = ("reward/mean", "entropy", "kl/engine_trainer")
"""Metrics of which windows are compared."""

LEAST_GB = 0.5
"""Growth of memory below which its share says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftWarning:
    """Something that goes wrong slowly."""

    guard: str
    """The key below `guards` that has its threshold."""
    text: str
    """What it is, and what to do."""


class WindowMeans:
    """A metric's means over windows of steps: of the first, of the best, and of the one that ends now."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.seen = 0
        self.first = self.best = self.now = 0.0

    def add(self, value: float) -> None:
        """Takes the next step's."""
        self.last.append(value)
        self.seen += 1
        if self.seen < WINDOW:
            return
        self.now = fmean(self.last)
        if self.seen == WINDOW:
            self.first = self.best = self.now
        self.best = max(self.best, self.now)


class DriftGuards:
    """Watches a run, step by step."""

    def __init__(self, section: Guards, folder: Path, before: Iterable[Mapping[str, float]] = ()) -> None:
        """`before` are the metrics of the steps that were taken already."""
        self.section, self.folder = section, folder
        self.windows = {name: WindowMeans() for name in COMPARED}
        for row in before:
            self._note(row)
        self.warned: set[str] = set()
        # Memory is that of a process, so it is compared within this session.
        self.resident: list[float] = []

    def after_step(self, metrics: Mapping[str, float]) -> list[DriftWarning]:
        """Takes a step's metrics; returns what is new to warn of, or raises if the recipe wants that to end the run."""
        self._note(metrics)
        if (resident := metrics.get("memory/host_gb")) is not None:
            self.resident.append(resident)
        found = {guard: text for guard, look in LOOKS.items() if (text := look(self, metrics)) is not None}
        new = [DriftWarning(guard=guard, text=text) for guard, text in found.items() if guard not in self.warned]
        self.warned = set(found)
        fatal = [each for each in new if each.guard in self.section.stop_on]
        if fatal:
            raise GuardError("\n".join(f"guards.{each.guard}: {each.text}" for each in fatal))
        return new

    def _note(self, metrics: Mapping[str, float]) -> None:
        for name, means in self.windows.items():
            if name in metrics:
                means.add(metrics[name])

    def means(self, name: str) -> WindowMeans | None:
        """A metric's means; none before there are two windows that share no step."""
        means = self.windows[name]
        return means if means.seen >= 2 * WINDOW else None


def reward_collapse(run: DriftGuards, metrics: Mapping[str, float]) -> str | None:
    """The reward has lost much of what it was at its best."""
    share, means = run.section.reward_collapse, run.means("reward/mean")
    if share is None or means is None:
        return None
    first, best, now = means.first, means.best, means.now
    if now >= best - share * max(abs(best), best - first):
        return None
    return (
        f"the mean reward of the last {WINDOW} steps is {now:.3g}, and was {best:.3g} at its best; look at the newest "
        "samples, lower optimizer.lr or add algorithm.kl.coef, and go on from the best checkpoint"
    )


def entropy_collapse(run: DriftGuards, metrics: Mapping[str, float]) -> str | None:
    """Answers hardly differ any more."""
    share, means = run.section.entropy_collapse, run.means("entropy")
    if share is None or means is None or means.now >= share * means.first:
        return None
    return (
        f"the entropy of the last {WINDOW} steps is {means.now:.3g}, and was {means.first:.3g} at first, so answers "
        "hardly differ and little is learned; raise engine.temperature, widen the upper algorithm.clip, or lower "
        "optimizer.lr"
    )


def mismatch_growth(run: DriftGuards, metrics: Mapping[str, float]) -> str | None:
    """Engine and trainer come apart."""
    times, means = run.section.mismatch_growth, run.means("kl/engine_trainer")
    if times is None or means is None or means.now <= max(NOISE, times * means.first):
        return None
    return (
        f"engine and trainer differ by a mean k3 of {means.now:.2g}, and by {means.first:.2g} at first; use "
        "algorithm.correction, or model.dtype: float32, and try `stretto replay` on a late step"
    )


def loop_lag(run: DriftGuards, metrics: Mapping[str, float]) -> str | None:
    """Something blocks what everything waits for."""
    limit, lag = run.section.loop_lag, metrics.get("seconds/loop_lag", 0.0)
    if limit is None or lag <= limit:
        return None
    return (
        f"the event loop did not run for {lag:.1f} s, in which no environment, verdict or deadline went on; an "
        "environment that blocks belongs into processes (environment.hosts), or into asyncio.to_thread"
    )


def memory_growth(run: DriftGuards, metrics: Mapping[str, float]) -> str | None:
    """This process grows and grows."""
    share = run.section.memory_growth
    if share is None or len(run.resident) <= SETTLED:
        return None
    before, now = max(run.resident[:SETTLED]), run.resident[-1]
    if now - before <= max(LEAST_GB, share * before):
        return None
    return (
        f"this process holds {now:.1f} GB, {now - before:.1f} GB more than after its first {SETTLED} steps; see "
        "whether an environment, a reward or a callback keeps what it has seen, and resume the run in time"
    )


def disk_nearly_full(run: DriftGuards, metrics: Mapping[str, float]) -> str | None:
    """The next checkpoints may not find room."""
    limit = run.section.warn_disk_gb
    free = shutil.disk_usage(run.folder).free / 2**30
    if limit is None or free >= limit:
        return None
    return (
        f"{run.folder}: {free:.1f} GB are free, and below guards.min_disk_gb ({run.section.min_disk_gb:g}) the run "
        "stops; make room, or lower checkpoint.keep"
    )


LOOKS: Mapping[str, Callable[[DriftGuards, Mapping[str, float]], str | None]] = {
    "reward_collapse": reward_collapse,
    "entropy_collapse": entropy_collapse,
    "mismatch_growth": mismatch_growth,
    "loop_lag": loop_lag,
    "memory_growth": memory_growth,
    "warn_disk_gb": disk_nearly_full,
}
"""Guard -> what it looks at."""
