"""A bench from its name to its document: what `stretto bench` calls. Loads no torch itself; the jobs do.

The document is the one that every bench prints with `--json`: bench, machine, rows.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.bench import machine
from stretto.bench.cases import ROLLOUT, STEP, Case, choose, enough_prompts
from stretto.bench.compare import Note, Row, Setting, rollout_rows, step_rows
from stretto.bench.jobs import Run, run_apart
from stretto.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One bench."""

    cases: tuple[Case, ...]
    """What it can measure; the first is measured where none is named."""
    rows: Callable[[Setting, Case], list[Row]]
    """Measures a case."""
    packages: tuple[str, ...] = ()
    """What its peer needs beside stretto."""


BENCHES = {
    "rollout": Bench(cases=ROLLOUT, rows=rollout_rows),
    "step": Bench(cases=STEP, rows=step_rows, packages=("trl", "datasets")),
}
WAITING = ("publish", "strategies", "scaling")
"""Benches of parts that are not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for."""

    bench: str
    """A key of BENCHES."""
    cases: Sequence[str] = ()
    """Names of its cases; `all`; or none for the first."""
    model: str
    """As a recipe names it."""
    prompts: int = 8
    """Prompts a step."""
    samples: int = 8
    """Answers per prompt."""
    steps: int = 1
    """Repetitions that count, after one that does not."""
    batches: tuple[int, ...] = (8, 16, 64)
    """Answers that TRL trains at once."""
    threads: int | None = None
    """Threads of every side; default: what this process would use."""


def measure(wish: Wish, *, note: Note, run: Run = run_apart) -> dict[str, Any]:
    """The document. Raises a RecipeError before anything starts if the wish cannot be met."""
    bench = find(wish.bench)
    enough_prompts(prompts=wish.prompts, steps=wish.steps)
    cases = choose(bench.cases, wish.cases, prompts=wish.prompts, samples=wish.samples)
    if run is run_apart:
        require(bench.packages)
    if wish.bench == "step":
        _divisible(wish)
    threads = wish.threads or machine.threads()
    about = machine.describe(threads=threads)  # first, so that `load` is not our own
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        setting = Setting(
            model=wish.model,
            folder=Path(folder),
            threads=threads,
            steps=wish.steps,
            batches=wish.batches,
            run=run,
            note=note,
        )
        rows = [row for case in cases for row in bench.rows(setting, case)]
    return {"bench": wish.bench, "machine": about, "rows": rows}


def find(name: str) -> Bench:
    """The bench of this name."""
    if name in BENCHES:
        return BENCHES[name]
    known = ", ".join(BENCHES)
    reason = f"{name} is not available yet" if name in WAITING else f"there is no bench {name!r}"
    raise RecipeError.of("bench", reason, f"use one of {known}")


def require(packages: Sequence[str]) -> None:
    """Refuses to start without what the peer needs."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        reason = (
            f"the comparison needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        )
        raise RecipeError.of("bench", reason, "pip install 'stretto[bench]'")


def _divisible(wish: Wish) -> None:
    """TRL accumulates batches of one size until it has seen every answer of the step."""
    answers = wish.prompts * wish.samples
    if not wish.batches or any(answers % batch for batch in wish.batches):
        reason = f"{answers} answers a step are not a multiple of {', '.join(map(str, wish.batches)) or 'nothing'}"
        raise RecipeError.of("--peer-batch", reason, f"use divisors of {answers}")
