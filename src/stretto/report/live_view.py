"""What a terminal shows below the bar while a run goes: curves, the parts of the reward, where time goes, an answer.

Text of a few lines from numbers that are handed over; what it is told of a model's answer is made harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.report.curve import curve
from stretto.report.samples_text import harmless, reward_text

STAGES = ("generate", "reward", "reference", "value", "old", "train", "fit", "publish")
"""In the order of a step."""

BAR = 30
"""Characters of the longest lane."""


def lines(
    rewards: Sequence[float],
    accuracies: Sequence[float],
    metrics: Mapping[str, float],
    answer: Mapping[str, Any] | None,
    width: int,
    marks: str,
) -> list[str]:
    """Everything, each line at most `width` characters long; nothing before the first step."""
    if not metrics:
        return []
    room = max(10, min(60, width - 26))
    found = [_spark("reward", rewards, room, marks), _spark("accuracy", accuracies, room, marks), _parts(metrics)]
    found += _lanes(metrics, marks)
    found += _answer(answer)
    return [line[:width] for line in found if line]


def _spark(title: str, values: Sequence[float], room: int, marks: str) -> str:
    """A curve on one line, with its last value."""
    if not values:
        return ""
    *_, drawn = curve(values, min(room, max(8, len(values))), 1, marks).partition("| ")
    return f"{title:<10}{drawn}  {values[-1]:.3g}"


def _parts(metrics: Mapping[str, float]) -> str:
    parts = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("reward/part/")}
    told = [f"{harmless(name)} {value:.3f}" for name, value in parts.items()] if len(parts) > 1 else []
    told += [f"length {metrics['length/mean']:.0f}"] if "length/mean" in metrics else []
    told += [f"cut off {metrics['length/truncated']:.0%}"] if metrics.get("length/truncated") else []
    told += [f"no contrast {metrics['groups/dead']:.0f}"] if metrics.get("groups/dead") else []
    told += [f"entropy {metrics['entropy']:.2f}"] if "entropy" in metrics else []
    return f"{'parts' if len(parts) > 1 else 'answers':<10}{'  '.join(told)}"


def _lanes(metrics: Mapping[str, float], marks: str) -> list[str]:
    """A bar for each stage, as long as its share of the step, and the share of idle devices."""
    whole = metrics.get("seconds/step", 0.0)
    if whole <= 0:
        return []
    found = []
    for stage in STAGES:
        seconds = metrics.get(f"seconds/{stage}", 0.0)
        length = round(BAR * min(1.0, seconds / whole))
        if length or seconds >= 0.01 * whole:
            found.append(f"{stage:<10}{marks[-1] * length:<{BAR}}  {seconds:.2g} s")
    idle = metrics.get("idle", 0.0)
    return [*found, f"{'idle':<10}{marks[1] * round(BAR * idle):<{BAR}}  {idle:.0%}"]


def _answer(row: Mapping[str, Any] | None) -> list[str]:
    """One answer of the step: the end of what was asked, what was said, and what it was worth."""
    if row is None or not row["messages"]:
        return []
    asked = " ".join(harmless(str(row["messages"][-1]["content"])).split())
    said = " ".join(harmless(str(row.get("answer") or "")).split())
    asked = asked if len(asked) <= 60 else f"...{asked[-57:]}"
    said = said if len(said) <= 60 else f"{said[:57]}..."
    return [f"{'asked':<10}{asked}", f"{'answered':<10}{said}", f"{'reward':<10}{reward_text(row.get('reward'), {})}"]
