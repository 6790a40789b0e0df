"""The main program of a process that makes the prompts of a reasoning-gym task. It is no module for importing.

It is started as a file (`python -P gym.py`) with one JSON request on standard input and answers with one on standard
output. A process of its own has two reasons: some tasks depend on the order of sets, which is fixed here by
PYTHONHASHSEED, and the package loads much that a training process has no use for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

TRIES = 20
"""Entries looked at per prompt that is wanted, before a task is said to have too few different ones."""
SIZE = 1_000_000
"""What the task is told its size is: the same whatever is asked for, so that more prompts extend the set."""


def make(name: str, config: dict[str, Any], seed: int, count: int) -> dict[str, Any]:
    """`count` different entries of a task, or what stands against it."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        return {"unknown": name, "known": sorted(DATASETS)}
    kind, settings = DATASETS[name]
    fields = [field.name for field in dataclasses.fields(settings) if field.name not in ("seed", "size")]
    for key in config:
        if key not in fields:
            return {"key": key, "known": fields}
    try:
        if name == "composite" and "datasets" in config:
            config = {**config, "datasets": [DatasetSpec(**each) for each in config["datasets"]]}
        made = kind(config=settings(**config, seed=seed, size=SIZE))
    except Exception as error:
        return {"refused": str(error) or type(error).__name__}
    return {"entries": different(made, count)}


def different(made: Any, count: int) -> list[dict[str, Any]]:
    """The first entries whose questions differ; fewer where there are no more."""
    found: dict[str, dict[str, Any]] = {}
    for index in range(min(SIZE, count * TRIES + 1000)):
        entry = made[index]
        found.setdefault(entry["question"], {key: entry[key] for key in ("question", "answer", "metadata")})
        if len(found) == count:
            break
    return list(found.values())


def main() -> None:
    """One request, one answer; what the package prints goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    answer = json.dumps(make(**json.load(sys.stdin)))
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        out.write(answer)


if __name__ == "__main__":
    main()
