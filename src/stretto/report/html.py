"""report.html: runs on one page that opens from a file, without a server and without a network.

The page itself lies in `page/`, as files; here its parts are put together with what `read_run` read and `pack` made
small. A page has at most `LIMIT` bytes: curves and timelines always have room, answers of so many steps as fit, and the
page says which. Its policy lets nothing be loaded and no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from stretto.algorithms.catalog import find_facts
from stretto.report.pack import blob, columns, packed_heldout, packed_spans, packed_step
from stretto.report.read_run import RunRecord, changed_keys, flat
from stretto.storage.atomic import replace

LIMIT = 3_000_000
"""Bytes of a page."""
STYLES = ("vendor/uPlot.min.css", "style.css")
LICENSE = "vendor/LICENSE"
"""Of the charts; a page carries it along."""
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "unpack.js",
    "elements.js",
    "overview.js",
    "curves.js",
    "tokens.js",
    "answers.js",
    "heldout.js",
    "timeline.js",
    "main.js",
)
"""Files of `page/`, in the order in which they need each other."""


class ReportPage:
    """A page over some runs. Written again while they go on, it packs only the steps that are new."""

    def __init__(self, folders: Sequence[Path], *, steps: Sequence[int] = ()) -> None:
        """`steps` are those whose answers the page has to hold before all others."""
        self.folders, self.steps = tuple(folders), tuple(steps)
        self._packed: dict[tuple[Path, int, int], str | None] = {}

    def write(self, path: Path, *, explained: Sequence[Mapping[str, Any] | None] = (), over: bool = False) -> None:
        """Writes the page in one move; `explained` is what `runtime.explain_run` says of each run, `over` as in
        `RunRecord`."""
        replace(path, self.parts(explained=explained, over=over))

    def parts(self, *, explained: Sequence[Mapping[str, Any] | None] = (), over: bool = False) -> Iterator[str]:
        """The page's text."""
        runs = [RunRecord(folder, over=over) for folder in self.folders]
        style, script = _joined(STYLES), f"/*\n{_joined((LICENSE,))}*/\n{_joined(SCRIPTS)}"
        timelines = [blob(packed_spans(run.spans)) for run in runs]
        heldout = [_heldout(run, LIMIT // (8 * len(runs))) for run in runs]
        beside = sum(len(text) for text in (*timelines, *heldout) if text)
        room = LIMIT - len(_shell()) - len(style) - len(script) - beside - _head_room(runs)
        answers = [self._answers(run, max(0, room) // len(runs)) for run in runs]
        told = [*explained, *[None] * (len(runs) - len(explained))]
        head = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "differing": changed_keys(runs),
            "runs": [_run(run, kept, why) for run, kept, why in zip(runs, answers, told, strict=True)],
        }
        blobs = {"head": blob(head)}
        for index, (timeline, kept) in enumerate(zip(timelines, answers, strict=True)):
            blobs |= {f"heldout-{index}": text} if (text := heldout[index]) else {}
            blobs |= {f"timeline-{index}": timeline} | {f"step-{index}-{step}": text for step, text in kept.items()}
        title = " · ".join(run.name for run in runs)
        yield from _page(title, style, script, blobs)

    def _answers(self, run: RunRecord, room: int) -> dict[int, str]:
        """Step -> its packed answers: those that matter most, until the room is used up."""
        kept: dict[int, str] = {}
        misses = 0
        for step in by_interest(run, first=self.steps):
            text = self._packed_step(run, step, room if not kept else max(room, 0))
            if text is None or len(text) > room:
                misses += 1
                if misses > 3:  # what is left is too small for any
                    break
                continue
            room -= len(text) + 60
            kept[step] = text
        return dict(sorted(kept.items()))

    def _packed_step(self, run: RunRecord, step: int, room: int) -> str | None:
        """A step's blob; one that was packed before, and is as it was, is not packed again."""
        size = -1
        with suppress(OSError):
            size = run.sampled[step].stat().st_size
        key = (run.folder, step, size)
        if (known := self._packed.get(key)) is not None:
            return known
        text = packed_step(run.samples(step), limit=min(room, LIMIT // 4))
        self._packed[key] = text
        return text


def by_interest(run: RunRecord, *, first: Sequence[int] = ()) -> list[int]:
    """The steps that have samples, the most telling first: the newest, the first, the odd ones, then ever finer.

    Odd are the steps with the lowest reward, the largest gradient and the largest gap between engine and trainer.
    """
    steps = list(run.sampled)
    if not steps:
        return []
    rows = [row for row in run.metrics if row["step"] in run.sampled]
    extremes = (("reward/mean", -1.0), ("grad_norm", 1.0), ("kl/engine_trainer", 1.0))
    odd = [
        int(max(rows, key=lambda row: sign * row.get(name, -sign * float("inf")))["step"])
        for name, sign in extremes
        if any(name in row for row in rows)
    ]
    evaluated = [int(row["step"]) for row in rows if "eval/accuracy" in row] if len(steps) > 50 else []
    order = [*(step for step in first if step in run.sampled), steps[-1], steps[0], *odd]
    return list(dict.fromkeys([*order, *_ever_finer(evaluated), *_ever_finer(steps)]))


def _ever_finer(steps: Sequence[int]) -> list[int]:
    """The steps in an order in which any beginning is spread evenly: the middle, those of the halves, and so on."""
    order, spans = list[int](), [(0, len(steps))]
    while spans:
        low, high = spans.pop(0)
        if low < high:
            middle = (low + high) // 2
            order.append(steps[middle])
            spans += [(low, middle), (middle + 1, high)]
    return order


def _run(run: RunRecord, answers: Mapping[int, str], explained: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the page knows of a run beside its answers and its timeline."""
    facts = find_facts(str(run.setting("algorithm.name")))
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": run.steps,
        "planned_steps": run.setting("run.steps"),
        "finished": run.finished,
        "alive": run.alive,
        "metrics": columns(run.metrics),
        "plan": run.plan,
        "recipe": dict(flat(run.recipe)),
        "weights": {str(part.get("name")): part.get("weight", 1.0) for part in run.setting("rewards") or ()},
        "drops": facts is None or facts.drops,
        "price_per_gpu_hour": run.setting("placement.price_per_gpu_hour"),
        "sampled": len(run.sampled),
        "answers": list(answers),
        "heldout": list(run.evaluated),
        "explained": explained,
    }


def _heldout(run: RunRecord, limit: int) -> str | None:
    """The blob of the held-out answers of a run's first and last evaluation; none where none were kept."""
    steps = list(dict.fromkeys([*list(run.evaluated)[:1], *list(run.evaluated)[-1:]]))
    return packed_heldout({step: run.samples(step, held_out=True) for step in steps}, limit=limit)


def _head_room(runs: Sequence[RunRecord]) -> int:
    """Bytes that the curves and everything else may take: the metrics as they are packed, and a margin."""
    return sum(len(blob(columns(run.metrics))) + len(blob(run.plan)) + len(blob(run.recipe)) for run in runs) + 40_000


@cache
def _shell() -> str:
    return files("stretto.report").joinpath("page/shell.html").read_text(encoding="utf-8")


@cache
def _joined(names: tuple[str, ...]) -> str:
    folder = files("stretto.report").joinpath("page")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _page(title: str, style: str, script: str, blobs: Mapping[str, str]) -> Iterator[str]:
    """The shell with its places filled. What is put in is not looked at again, so no text can bring a place along."""
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    filled = {"title": escape(title), "policy": policy, "style": style, "script": script}
    before, *others = _shell().split("{{")
    yield before
    for other in others:
        name, _, after = other.partition("}}")
        if name == "blobs":
            for key, text in blobs.items():
                yield f'<script type="application/octet-stream" id="{key}">{text}</script>\n'
        else:
            yield filled[name]
        yield after


def _hash(text: str) -> str:
    """How a content policy names an inline script or style."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def page_path(folders: Sequence[Path], out: Path | None) -> Path:
    """Where a page goes unless something else is said: into its run, or where one stands if it is of several."""
    if out is not None:
        return out
    return folders[0] / "report.html" if len(folders) == 1 else Path(os.curdir) / "report.html"
