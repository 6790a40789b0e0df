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
from stretto.bench.cases import (
    PUBLISH,
    ROLLOUT,
    SCALING,
    STEP,
    STRATEGIES,
    STUDY,
    BenchCase,
    choose,
    enough_prompts,
    plain_shape,
)
from stretto.bench.compare import BenchSettings, Note, Row, rollout_rows, step_rows, study_rows
from stretto.bench.jobs import Run, run_apart
from stretto.bench.publish_rows import publish_rows
from stretto.bench.spread import CELLS, scaling_rows, strategies_rows
from stretto.checks.machine.engine_python import has_vllm
from stretto.checks.machine.load import busy_cores
from stretto.errors import RecipeError
from stretto.extras import install


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One bench."""

    cases: tuple[BenchCase, ...]
    """What it can measure; the first is measured where none is named."""
    rows: Callable[[BenchSettings, BenchCase], list[Row]]
    """Measures a case."""
    packages: tuple[str, ...] = ()
    """What it needs beside stretto, and the extra of this project that has it."""
    extra: str = "bench"
    """The extra that installs what the bench needs."""
    cells: int = 0
    """Workers of one thread each that our side has; 0 where it is one process."""
    wide: bool = False
    """True if a step may take the case's prompts once for each of them."""


BENCHES = {
    "rollout": Bench(cases=ROLLOUT, rows=rollout_rows),
    "step": Bench(cases=STEP, rows=step_rows, packages=("trl", "datasets")),
    "publish": Bench(cases=PUBLISH, rows=publish_rows, packages=("ray",), extra="ray", cells=CELLS),
    "study": Bench(cases=STUDY, rows=study_rows, packages=("bitsandbytes",), extra="quant"),
    "strategies": Bench(cases=STRATEGIES, rows=strategies_rows, packages=("ray",), extra="ray", cells=CELLS),
    "scaling": Bench(cases=SCALING, rows=scaling_rows, packages=("ray",), extra="ray", cells=CELLS, wide=True),
}
TURNS = 2
"""How often the sides take turns unless told otherwise."""
PEERS = ("trl", "plain")
"""What a step stands beside, the usual one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What the user asked for."""

    bench: str
    """A key of BENCHES."""
    cases: Sequence[str] = ()
    """Names of its cases; `all`; or none for the first."""
    model: str
    """The model, as a recipe names it."""
    shape: str | None = None
    """The shape of random weights, instead of a model."""
    prompts: int | None = None
    """Prompts a step; none for the case's."""
    samples: int | None = None
    """Answers per prompt; none for the case's."""
    turns: int | None = None
    """How often the sides take turns, each time in a new process; none for `TURNS`."""
    steps: int = 1
    """Repetitions that count, after one that does not."""
    batches: tuple[int, ...] = (8, 16, 64)
    """Answers that TRL trains at once."""
    threads: int | None = None
    """Threads of every side; default: what this process would use."""
    peer: str = "trl"
    """What a step stands beside: trl, or plain, which needs nothing but transformers."""


def measure(wish: BenchRequest, *, note: Note, run: Run = run_apart) -> dict[str, Any]:
    """The document. Raises a RecipeError before anything starts if the wish cannot be met."""
    bench = find(wish.bench)
    cases = choose(bench.cases, wish.cases, prompts=wish.prompts, samples=wish.samples)
    enough_prompts(prompts=max(case.prompts for case in cases) * (bench.cells if bench.wide else 1), steps=wish.steps)
    if wish.shape is not None:
        plain_shape(wish.shape)
    if wish.peer not in PEERS or (wish.peer != PEERS[0] and wish.bench != "step"):
        raise RecipeError.of("--peer", f"there is no peer {wish.peer!r} here", f"{' or '.join(PEERS)}, with bench step")
    if run is run_apart and wish.peer == PEERS[0]:
        require(bench.packages, bench.extra)
    if wish.bench == "publish" and (given := [name for name in ("prompts", "samples") if getattr(wish, name)]):
        raise RecipeError.of(f"--{given[0]}", "has no effect on this bench, which answers no prompts", "leave it out")
    if wish.bench == "step":
        _groups_in_batches(wish, cases[0])
    if bench.cells and wish.threads not in (None, 1):
        raise RecipeError.of("--threads", f"each of the {bench.cells} cells of this bench has one", "leave it out")
    if bench.cells and wish.turns is not None:
        reason = "has no effect on this bench, which measures all its steps with the same workers"
        raise RecipeError.of("--turns", reason, "leave it out, and use --steps for more of them")
    threads = 1 if bench.cells else wish.threads or machine.threads()
    about = machine.describe(threads=bench.cells or threads)  # first, so that `load` is not our own
    if busy := machine.busy_words(busy_cores()):
        note(f"{busy}; do not trust times and ratios that are measured meanwhile")
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        setting = BenchSettings(
            model=wish.model,
            shape=wish.shape,
            folder=Path(folder),
            threads=threads,
            steps=wish.steps,
            turns=wish.turns or TURNS,
            batches=wish.batches,
            run=run,
            note=note,
            peer=wish.peer,
            vllm=run is run_apart and has_vllm(),
        )
        rows = [row for case in cases for row in bench.rows(setting, case)]
    return {"bench": wish.bench, "machine": about, "rows": rows}


def find(name: str) -> Bench:
    """The bench of this name."""
    if name in BENCHES:
        return BENCHES[name]
    raise RecipeError.of("bench", f"there is no bench {name!r}", f"use one of {', '.join(BENCHES)}")


def require(packages: Sequence[str], extra: str = "bench") -> None:
    """Refuses to start without what the bench needs."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        reason = f"it needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise RecipeError.of("bench", reason, install(extra))


def _groups_in_batches(wish: BenchRequest, case: BenchCase) -> None:
    """GRPO compares the answers of a group, and TRL accumulates batches of one size until it has seen all of them."""
    answers = case.answers
    if case.samples < 2:
        raise RecipeError.of("--samples", "GRPO compares the answers to a prompt", "use at least 2")
    if not wish.batches or any(answers % batch for batch in wish.batches):
        reason = f"{answers} answers a step are not a multiple of {', '.join(map(str, wish.batches)) or 'nothing'}"
        raise RecipeError.of("--peer-batch", reason, f"use divisors of {answers}")
