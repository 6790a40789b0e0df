"""How a run shows itself while it goes: a live bar in a terminal, plain lines elsewhere, and curves at the end.

It is told numbers and shows them; it measures and keeps nothing that the run folder does not have. Both kinds share one
`_Course`, so that they say the same in the same words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from stretto.report import live_view
from stretto.report.curve import ASCII, BLOCKS, curve
from stretto.report.stream import tolerant

REFRESHED = 4
"""Times a second that a live view is drawn."""


class Progress(Protocol):
    """What the loop tells whoever watches; a context manager that leaves the terminal as it was."""

    def start(self, steps: int, done: int) -> None:
        """The run has so many steps, of which `done` are behind it."""
        ...

    def note(self, text: str) -> None:
        """What is going on outside of steps, such as "warm-up 120/200", or how the run is done; it stays to be read."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ended with these metrics, named as in metrics.jsonl."""
        ...

    def sampled(self, row: Mapping[str, Any]) -> None:
        """One answer of the step that ended, as its samples file has it."""
        ...

    def evaluated(
        self, step: int, accuracy: float, low: float, high: float, prompts: str = "", reward: float | None = None
    ) -> None:
        """The held-out accuracy after a step, with its interval, the prompts that it is over, in words, and the mean
        held-out reward, if there is one."""
        ...

    def finish(self, summary_lines: Sequence[str]) -> None:
        """The run ended: draws the curves and prints the lines."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def console_for(stream: TextIO | None) -> Progress:
    """A live display if the stream is a terminal that can draw one, else plain lines. Where none is open, nothing."""
    if stream is None:
        return SilentProgress()
    stream = tolerant(stream)
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return LiveProgress(Console(file=stream))
    return PlainProgress(stream)


@dataclass(slots=True, kw_only=True)
class _Course:
    """What was told so far, in words."""

    steps: int = 0
    """Steps of the run."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of every step seen."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward by step."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """Held-out accuracy by step."""
    heldout_rewards: dict[int, float] = field(default_factory=dict)
    """Mean held-out reward by step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of the newest step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Notes a step and says it in a line."""
        words = []
        self.metrics = metrics
        if (reward := metrics.get("reward/mean")) is not None:
            self.rewards[step] = reward
            words.append(f"reward {reward:.3f}")
        elif (loss := metrics.get("loss")) is not None:
            words.append(f"loss {loss:.3f}")
        if seconds := metrics.get("seconds/step"):
            self.seconds.append(seconds)
            if tokens := metrics.get("tokens/generated", metrics.get("rows/tokens")):
                words.append(f"{tokens / seconds:,.0f} tokens/s")
            words.append(f"{seconds:.1f} s")
            words.append(f"ETA {self._eta(step)}")
        return "  ".join(words)

    def evaluated(self, step: int, accuracy: float, low: float, high: float, prompts: str, reward: float | None) -> str:
        """Notes an evaluation and says it in a few words."""
        self.accuracies[step] = accuracy
        over = f" on {prompts}" if prompts else ""
        told = f"held-out accuracy {accuracy:.2f} [{low:.2f}, {high:.2f}]{over}"
        if reward is None:
            return told
        self.heldout_rewards[step] = reward
        return f"{told}, reward {reward:.3f}"

    def curves(self, width: int, marks: str) -> str:
        """Every curve under its title; held-out rewards where they are something else than the accuracy."""
        parts = []
        titled = [("reward", self.rewards), ("held-out accuracy", self.accuracies)]
        titled += [("held-out reward", self.heldout_rewards)] * (self.heldout_rewards != self.accuracies)
        for title, values in titled:
            if drawn := curve(list(values.values()), width, 5, marks):
                parts.append(f"{title}, step {min(values)} to {max(values)}\n{drawn}")
        return "\n\n".join(parts)

    def _eta(self, step: int) -> str:
        left = (self.steps - step) * sum(self.seconds) / len(self.seconds)
        return str(timedelta(seconds=round(left)))


class PlainProgress:
    """One line per step, for files, pipes and terminals that cannot draw."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = tolerant(stream)  # that nobody listens any more is no reason to end a training
        self._course = _Course()

    def start(self, steps: int, done: int) -> None:
        """Says how far the run is."""
        self._course.steps = steps
        self._line(f"step {done}/{steps}: {'continuing' if done else 'starting'}")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._line(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of its own."""
        steps = self._course.steps
        self._line(f"step {step:>{len(str(steps))}}/{steps}  {self._course.step(step, metrics)}".rstrip())

    def sampled(self, row: Mapping[str, Any]) -> None:
        """Nothing: `stretto samples` shows answers."""

    def evaluated(
        self, step: int, accuracy: float, low: float, high: float, prompts: str = "", reward: float | None = None
    ) -> None:
        """A line of its own."""
        self._line(f"step {step}: {self._course.evaluated(step, accuracy, low, high, prompts, reward)}")

    def finish(self, summary_lines: Sequence[str]) -> None:
        """Curves and summary as text, in characters that the stream can encode."""
        marks = BLOCKS if self._encodable(BLOCKS) == BLOCKS else ASCII
        for part in (self._course.curves(60, marks), "\n".join(summary_lines)):
            if part:
                self._line("\n" + part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def _line(self, text: str) -> None:
        print(self._encodable(_printable(text)), file=self._stream, flush=True)

    def _encodable(self, text: str) -> str:
        """The text with a question mark for every letter that the stream cannot take."""
        encoding = self._stream.encoding or "utf-8"
        return text.encode(encoding, errors="replace").decode(encoding)


class SilentProgress:
    """Says nothing, for commands whose output is one document."""

    def start(self, steps: int, done: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def sampled(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def evaluated(
        self, step: int, accuracy: float, low: float, high: float, prompts: str = "", reward: float | None = None
    ) -> None:
        """Nothing."""

    def finish(self, summary_lines: Sequence[str]) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveProgress:
    """A bar over the steps with the newest numbers beside it, and below it how the run goes."""

    def __init__(self, console: Console) -> None:
        console.file = tolerant(console.file)  # as above
        self._console = console
        self._course = _Course()
        self._answer: Mapping[str, Any] | None = None
        self._finished = False
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TextColumn("{task.fields[accuracy]}", markup=False),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=None, numbers="", accuracy="")
        self._live = Live(get_renderable=self._view, console=console, refresh_per_second=REFRESHED)

    def start(self, steps: int, done: int) -> None:
        """Gives the bar its length."""
        self._course.steps = steps
        self._bar.update(self._task, description="training", total=steps, completed=done)

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(Text(_printable(text)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar and shows the step's numbers."""
        numbers = self._course.step(step, metrics)
        self._bar.update(self._task, description="training", completed=step, numbers=numbers)

    def sampled(self, row: Mapping[str, Any]) -> None:
        """Shows the answer until the next step."""
        self._answer = row

    def evaluated(
        self, step: int, accuracy: float, low: float, high: float, prompts: str = "", reward: float | None = None
    ) -> None:
        """Shows the newest accuracy until the next."""
        self._bar.update(self._task, accuracy=self._course.evaluated(step, accuracy, low, high, prompts, reward))

    def finish(self, summary_lines: Sequence[str]) -> None:
        """Leaves the bar as it is and prints curves and summary below it."""
        self._finished = True
        self._live.stop()
        marks = self._marks()
        width = max(10, min(80, self._console.width - 12))
        for part in (self._course.curves(width, marks), "\n".join(summary_lines)):
            if part:
                self._console.print(Text("\n" + _printable(part)))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _view(self) -> Group:
        """The bar and, while the run goes and where the terminal is high enough, the lines below it."""
        course, width, marks = self._course, self._console.width, self._marks()
        shown = live_view.lines(
            list(course.rewards.values()), list(course.accuracies.values()), course.metrics, self._answer, width, marks
        )
        low = self._finished or self._console.height < len(shown) + 4
        return Group(self._bar, *(Text(line) for line in ([] if low else shown)))

    def _marks(self) -> str:
        return BLOCKS if self._console.encoding.startswith("utf") else ASCII


def _printable(text: str) -> str:
    """The text without control characters: what a model said must not steer a terminal."""
    return "".join(letter for letter in text if letter.isprintable() or letter == "\n")
