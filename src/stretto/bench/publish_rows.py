"""Rows of `stretto bench publish`: what each way of handing over takes, beside what the planner expects of it.

The forecast is of the hand-over alone; the proof that follows it in every publish stands beside it. Where vLLM is not
installed its row says so, and has no numbers.
"""

from __future__ import annotations

from stretto.bench.cases import BenchCase
from stretto.bench.compare import BenchSettings, CaseJobs, Row
from stretto.bench.jobs import JobResult
from stretto.checks.machine.engine_python import FIX

NATIVE, VLLM = ("same process", "second cell"), "vLLM"
"""Ways of handing over: to the native engine, and to vLLM."""


def publish_rows(setting: BenchSettings, case: BenchCase) -> list[Row]:
    """A row for each way."""
    desk = CaseJobs(setting, case)
    taken: dict[str, JobResult | None] = {way: desk.measure("publish", plans=(way,)) for way in NATIVE}
    taken[VLLM] = desk.measure("publish", plans=(VLLM,)) if setting.vllm else None
    return [_row(desk, way, found) for way, found in taken.items()]


def _row(desk: CaseJobs, way: str, found: JobResult | None) -> Row:
    """One way. Where tensors are shared nothing is handed over, so there is no ratio."""
    case = desk.case
    row: Row = {
        "case": f"{case.name}, {way}",
        "unit": "s/hand-over",
        "stretto": None,
        "peer": None,
        "peer_name": "what the planner predicts",
        "ratio": None,
        "way": way,
        "model": desk.setting.shape or desk.setting.model,
        "device": "cpu",
        "dtype": case.dtype,
        "trained_weights": "adapter" if case.adapter else "all",
    }
    if found is None:
        return row | {"failed": {way: f"vLLM is not installed; {FIX}"}}
    moved, expected = found.stages["hand-over"], found.facts["predicted"]
    return row | {
        "stretto": moved,
        "peer": expected,
        "ratio": expected / moved if expected and moved else None,
        "seconds": {"publish": found.best, **found.stages},
        "bytes": found.facts["bytes"],
        "constants": found.facts["constants"],
    }
