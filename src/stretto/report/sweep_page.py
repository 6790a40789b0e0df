"""What a sweep came to: a row for each run, the mean over seeds of each setting, the best one, and a picture of all.

It reads the folders of its runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stretto.report.chart import chart
from stretto.report.compare_runs import RunSummary, columns, pair_verdict, table
from stretto.report.read_run import RunRecord

SEED = "seed"
"""The key whose values are repetitions of one setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRun:
    """A run of a sweep."""

    record: RunRecord
    """Its folder."""
    setting: Mapping[str, Any]
    """Its values, by key."""

    @property
    def name(self) -> str:
        """The setting without the seed, in words."""
        told = [f"{key.rpartition('.')[2]} {value}" for key, value in self.setting.items() if key != SEED]
        return ", ".join(told) or "all seeds"


def page(runs: Sequence[SweptRun]) -> list[str]:
    """Everything, for a terminal."""
    if not runs:
        return ["no run has begun"]
    summaries = [RunSummary.of(run.record) for run in runs]
    lines = table(summaries)
    groups: dict[str, list[float]] = defaultdict(list)
    for run, summary in zip(runs, summaries, strict=True):
        value = summary.accuracy if summary.accuracy is not None else summary.reward
        if value is not None:
            groups[run.name].append(value)
    what = "accuracy" if all(summary.accuracy is not None for summary in summaries) else "accuracy or reward"
    if len(groups) < len(runs) and len(groups) > 0:
        rows = [["setting", "seeds", f"mean {what}", "least", "most"]]
        rows += [
            [name, str(len(found)), f"{fmean(found):.3f}", f"{min(found):.3f}", f"{max(found):.3f}"]
            for name, found in sorted(groups.items(), key=lambda item: -fmean(item[1]))
        ]
        lines += ["", *columns(rows)]
    judged = [pair for pair in zip(runs, summaries, strict=True) if pair[1].accuracy is not None and pair[1].prompts]
    if len(judged) > 1:
        (best, first), (next_best, second) = sorted(judged, key=lambda pair: -(pair[1].accuracy or 0.0))[:2]
        names, records = (second.name, first.name), (next_best.record, best.record)
        lines += ["", pair_verdict(names, records, (second, first))[1]]
    return lines


def picture(runs: Sequence[SweptRun]) -> str:
    """Curves of the held-out accuracy, or of the reward where it was evaluated less than twice."""
    accuracies = [_curve(run, "eval/accuracy") for run in runs]
    judged = all(len(curve) > 1 for curve in accuracies)
    curves = accuracies if judged else [_curve(run, "reward/mean") for run in runs]
    lines: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for run, curve in zip(runs, curves, strict=True):
        if curve:
            lines[run.name].append(curve)
    shared = {name: _of_same_steps(found) for name, found in lines.items()}
    shown = {name: found for name, found in shared.items() if found[0]}
    values = [y for found in shown.values() for curve in found for _, y in curve]
    if not values or not any(x for found in shown.values() for curve in found for x, _ in curve):
        return EMPTY
    top, bottom = (1.0 if judged or max(values) <= 1 else max(values)), min(0.0, *values)
    up = "held-out accuracy" if judged else "mean reward"
    keys = ", ".join(dict.fromkeys(key for run in runs for key in run.setting))
    return chart(f"sweep over {keys}", "step", up, shown, top=top, bottom=bottom)


EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>\n'
"""A picture of a sweep without a step."""


def _curve(run: SweptRun, metric: str) -> list[tuple[float, float]]:
    return [(row["step"], row[metric]) for row in run.record.metrics if metric in row]


def _of_same_steps(curves: Sequence[Sequence[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    """The curves at the steps that all of them have."""
    steps = set.intersection(*({x for x, _ in curve} for curve in curves))
    return [[(x, y) for x, y in curve if x in steps] for curve in curves]
