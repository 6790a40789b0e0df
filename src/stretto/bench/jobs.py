"""One measurement in one fresh process, and the seam that ours and every peer stand behind.

A side is a function from a job to what it measured. It runs in a process of its own, so that peak memory is its own
and no side warms anything up for another. Jobs and results travel as JSON files; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stretto.bench.cases import BenchCase
from stretto.errors import DeadlineError, StrettoError

DEADLINE = 2 * 3600.0
"""Seconds that one measurement may take."""

SIDES = {
    "prepare": "stretto.bench.prepare:prepare",
    "stretto step": "stretto.bench.ours:step",
    "stretto rollout": "stretto.bench.ours:rollout",
    "stretto study": "stretto.bench.study:step",
    "plans in turn": "stretto.bench.cells:in_turn",
    "plans alone": "stretto.bench.cells:alone",
    "plans agree": "stretto.bench.cells:agree",
    "cells in turn": "stretto.bench.cells:cells_in_turn",
    "publish": "stretto.bench.publishing:publish",
    "plain step": "stretto.bench.peer_plain:step",
    "plain replay": "stretto.bench.peer_plain:replay",
    "trl step": "stretto.bench.peer_trl:step",
    "trl replay": "stretto.bench.peer_trl:replay",
    "generate rollout": "stretto.bench.peer_generate:rollout",
    "vllm rollout": "stretto.bench.peer_vllm:rollout",
}
"""Name -> the function that measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a side is asked to measure."""

    side: str
    """A key of SIDES."""
    case: BenchCase
    """The work."""
    model: str
    """`prepare`: the model as a recipe names it; others: the folder that it made of it."""
    folder: str
    """Where the case's files are: the prompts, the first adapter, and the tokens to replay."""
    threads: int
    """Threads of torch."""
    steps: int = 1
    """How often the work is measured, after once that does not count."""
    batch: int | None = None
    """Answers that a peer trains at once, where it asks the user for that number."""
    plans: tuple[str, ...] = ()
    """Several cells: the names of the plans that are followed. `publish`: the way of handing over."""
    shape: str | None = None
    """`prepare`: the shape of random weights, instead of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a side came to."""

    name: str = ""
    """The library's name and version."""
    seconds: tuple[float, ...] = ()
    """Seconds of each repetition."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds per stage in the fastest repetition."""
    generated: int = 0
    """Tokens sampled in a repetition."""
    trained: int = 0
    """Tokens trained in a repetition."""
    memory: int = 0
    """Bytes at the peak, less those after imports."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else it found; JSON-able."""

    @property
    def best(self) -> float:
        """Seconds of the fastest repetition: what the side can do when nothing disturbs it."""
        return min(self.seconds)


Run = Callable[[Job], JobResult]
"""Has a job done somewhere; raises a StrettoError if it could not be."""


def job_from(data: Mapping[str, Any]) -> Job:
    """A job as it was written."""
    return Job(**{**data, "case": BenchCase(**data["case"]), "plans": tuple(data["plans"])})


def measured_from(data: Mapping[str, Any]) -> JobResult:
    """A result as it was written."""
    return JobResult(**{**data, "seconds": tuple(data["seconds"])})


def run_apart(job: Job) -> JobResult:
    """Has the job done in a fresh process. What that prints goes to a file in the job's folder."""
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join([job.side, *([str(job.batch)] if job.batch else []), *job.plans]).replace(" ", "-")
    asked, answer, log = (folder / f"{stem}.{ending}" for ending in ("job.json", "result.json", "log"))
    asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
    answer.unlink(missing_ok=True)
    number = str(job.threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "stretto.bench.worker", str(asked), str(answer)]
    with log.open("w", encoding="utf-8") as written:
        try:
            code = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=written, stderr=written, timeout=DEADLINE
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"bench: {job.side} of {job.case.name} was not done within {DEADLINE:g} s") from error
    if not answer.exists():
        raise StrettoError(f"bench: {job.side} of {job.case.name} {_why(code)}: {_last_line(log)}")
    data = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in data:
        raise StrettoError(f"bench: {job.side} of {job.case.name}: {data['error']}")
    return measured_from(data)


def _why(code: int) -> str:
    """What an exit code says about a process without a result."""
    if code == -9:
        return "was killed, most likely because the machine ran out of memory"
    return f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def with_memory(measured: JobResult, memory: int) -> JobResult:
    """The result with the peak that its process saw."""
    return replace(measured, memory=memory)
