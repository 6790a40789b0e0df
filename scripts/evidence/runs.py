"""What the evidence scripts share: runs of the command line, and what their accuracies say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]


def stretto(*arguments: str) -> str:
    """Runs the command line next to this interpreter; one thread each, because several run side by side."""
    command = [str(Path(sys.executable).with_name("stretto")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path) -> list[dict]:
    """The lines of a run's events.jsonl."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


TIMES = ("seconds/", "idle", "memory/", "micro_batches", "decode/")
"""How metrics begin that say how long something took or how it was dealt out: two equal runs differ in them."""


def results(run: Path) -> list[dict]:
    """The same without them."""
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in metrics(run)]


def verdict(before: dict, after: dict) -> str:
    """learns, flat, or what it is instead; each of the two has an accuracy and an interval."""
    rise = after["accuracy"] - before["accuracy"]
    if rise >= 0.2 and after["interval"][0] > before["interval"][1]:
        return "learns"
    return "flat" if after["interval"][0] <= before["accuracy"] <= after["interval"][1] else "moves"
