"""A run's folder as data: recipe, plan, metrics, spans, events and samples, read without trust and without PyTorch.

Everything that shows a run reads it here: the page, the terminal, comparisons. A run may be under way or may have been
killed, so a file that is missing or a line that is torn is passed over. Samples are read a step at a time, because
those of a long run do not fit into memory; all else is small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError
from stretto.recipe import yaml_io
from stretto.report.timeline import Span
from stretto.storage import lock
from stretto.storage.json_lines import content_of, numbers_of, parsed, read_rows, step_ranges, whole

SAVED = re.compile(r"step-(\d{6,})")
"""Name of a checkpoint's folder."""


@dataclass(frozen=True)
class RunRecord:
    """A run's folder, each file of which is read when it is first asked for, and then kept.

    Example: RunRecord(Path("runs/tiny-001")).metrics[-1]["reward/mean"].
    """

    folder: Path
    """The run's folder."""
    over: bool = False
    """True if the process that trains there has stopped, though it is still there."""

    def __post_init__(self) -> None:
        if not (self.folder / "recipe.yaml").is_file():
            reason, fix = "is not a run: it holds no recipe.yaml", "name a folder that train made"
            raise RecipeError.of(str(self.folder), reason, fix)

    @property
    def name(self) -> str:
        """What the run is called: the name of its folder."""
        return self.folder.resolve().name

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Every key of the recipe, as the run used it, in sections."""
        text = content_of(self.folder / "recipe.yaml").decode("utf-8", errors="replace")
        data, _ = yaml_io.read(text, name=str(self.folder / "recipe.yaml"))
        return data if isinstance(data, dict) else {}

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the recipe by its dotted name, such as batch.samples."""
        at: Any = self.recipe
        for part in key.split("."):
            if not isinstance(at, Mapping) or part not in at:
                return default
            at = at[part]
        return at

    @cached_property
    def plan(self) -> dict[str, Any]:
        """plan.json: cells, and what was `predicted` and `measured` where that is known."""
        with suppress(ValueError, RecursionError):
            plan = json.loads(content_of(self.folder / "plan.json").decode("utf-8"))
            return plan if isinstance(plan, dict) else {}
        return {}

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """A row for each step, by the names of metrics.jsonl, numbers alone; the first may be of step 0."""
        return [numbers_of(row) for row in read_rows(self.folder / "metrics.jsonl")]

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Starts, resumes and checkpoints."""
        return list(read_rows(self.folder / "events.jsonl"))

    @cached_property
    def spans(self) -> list[Span]:
        """What worked when, in the order in which it ended; seconds count from the start of the session it was in."""
        lines = content_of(self.folder / "timeline.json").split(b"\n")
        return [span for line in lines if (span := _span(line)) is not None]

    @cached_property
    def sampled(self) -> dict[int, Path]:
        """Step -> the file of its samples, in order."""
        return self._steps_of("step")

    @cached_property
    def evaluated(self) -> dict[int, Path]:
        """Step -> the file of the held-out answers after it, in order."""
        return self._steps_of("eval")

    def _steps_of(self, kind: str) -> dict[int, Path]:
        named = re.compile(rf"{kind}-(\d{{6,}})\.jsonl")
        found = ((named.fullmatch(path.name), path) for path in (self.folder / "samples").glob(f"{kind}-*.jsonl"))
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def samples(self, step: int, *, held_out: bool = False) -> list[dict[str, Any]]:
        """Every trajectory of a step, or the `held_out` ones of the evaluation after it, as
        docs/reference/run-folder.md describes them; none where there is no file."""
        path = (self.evaluated if held_out else self.sampled).get(step)
        lines = [] if path is None else content_of(path).split(b"\n")
        return [row for line in lines if (row := parsed(line)) is not None]

    def truncated(self, step: int, rows: Sequence[Mapping[str, Any]], *, held_out: bool = False) -> str:
        """What a file of answers lacks of those that metrics.jsonl counts, in words; empty if it lacks none."""
        path = (self.evaluated if held_out else self.sampled)[step]
        metrics: Mapping[str, float] = next((row for row in self.metrics if row["step"] == step), {})
        wanted = int(metrics.get("eval/asked" if held_out else "trajectories/launched", 0))
        torn = not rows or not content_of(path).endswith(b"\n")
        if len(rows) >= wanted and not torn:
            return ""
        told = f"{len(rows)} of {wanted} answers are left" if len(rows) < wanted else "answers are missing at its end"
        return f"samples/{path.name} is truncated: {told}"

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """(first, last) of each range of steps that were taken and that metrics.jsonl has no line of: those between
        its lines, and those up to the newest checkpoint."""
        there = sorted({int(row["step"]) for row in self.metrics})
        saved = [
            int(match[1]) for path in self.folder.glob("checkpoints/step-*") if (match := SAVED.fullmatch(path.name))
        ]
        edges = [0, *(step for step in there if step > 0), max([*there, *saved], default=0) + 1]
        return [(low + 1, high - 1) for low, high in pairwise(edges) if high - low > 1]

    @property
    def lost(self) -> str:
        """The steps that metrics.jsonl lacks, in words; empty if it lacks none."""
        told = step_ranges({step for low, high in self.gaps for step in range(low, high + 1)})
        return f"metrics.jsonl lacks {told}" if told else ""

    @property
    def steps(self) -> int:
        """The last step that has metrics; 0 before the first."""
        return max((int(row["step"]) for row in self.metrics), default=0)

    @property
    def alive(self) -> bool:
        """True if a process trains in the folder now."""
        return not self.over and lock.is_held(self.folder)

    @property
    def written(self) -> list[Path]:
        """The files that grow with every step, as far as they are there."""
        names = ("metrics.jsonl", "timeline.json", "events.jsonl")
        return [path for name in names if (path := self.folder / name).is_file()]

    @property
    def finished(self) -> bool:
        """True if the last step of the recipe was taken."""
        return 0 < int(self.setting("run.steps", 0)) <= self.steps


def flat(recipe: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a recipe; lists are values as a whole, but for those of sections."""
    for key, value in recipe.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from flat(item, f"{name}.{item.get('name', index)}.")
        else:
            yield name, value


IDENTITY = ("run.folder",)
"""Keys in which every two runs differ."""


def changed_keys(runs: list[RunRecord]) -> dict[str, list[Any]]:
    """Dotted key -> its value in each run, of the keys in which they differ; None where a run does not have one."""
    recipes = [dict(flat(run.recipe)) for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key not in IDENTITY)
    values = {key: [recipe.get(key) for recipe in recipes] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _span(line: bytes) -> Span | None:
    """The event on a line of timeline.json; none where there is no whole one."""
    event = parsed(line.rstrip().rstrip(b","))
    with suppress(KeyError, TypeError, ValueError):
        if event is not None and (step := whole(event["args"]["step"])) is not None:
            counts = {name: int(event["args"].get(name, 0)) for name in ("groups", "tokens", "shared", "version")}
            return Span(
                stage=str(event["name"]),
                cell=str(event["tid"]),
                start=float(event["ts"]) / 1e6,
                seconds=float(event["dur"]) / 1e6,
                step=step,
                simulated=bool(event["args"].get("simulated")),
                **counts,
            )
    return None
