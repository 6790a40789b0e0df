"""A step as a run folder has recorded it: the groups that were trained on, with what each token was credited with.

The samples file is the source; what it rounds (log-probabilities and advantages, to six decimals) is rounded here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RecipeError
from stretto.storage.atomic import read_small
from stretto.storage.json_lines import numbers_of, read_rows
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Trajectory

SampleKey = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What is known of a step."""

    step: int
    """Its number."""
    rows: tuple[Mapping[str, Any], ...]
    """The lines of its samples file, of those trajectories that were trained on and of the others."""
    groups: tuple[Group, ...]
    """What it has trained on, in launch order."""
    advantages: Mapping[SampleKey, NDArray[np.float64]]
    """Conversation -> the recorded credit of each trained token."""
    texts: Mapping[SampleKey, str]
    """Conversation -> its tokens as text, as the run saw it."""
    metrics: Mapping[str, float]
    """The step's line of metrics.jsonl; empty where there is none."""


def read_step(folder: Path, step: int) -> RecordedStep:
    """A step of a run's folder; a RecipeError where it is not recorded, or not as a step is."""
    path = folder / "samples" / f"step-{step:06d}.jsonl"
    if not path.is_file():
        raise RecipeError.of("--step", f"{path} is not there, so step {step} cannot be replayed", _there_are(folder))
    metrics = next((numbers_of(row) for row in read_rows(folder / "metrics.jsonl") if row["step"] == step), {})
    try:
        rows = tuple(json.loads(line) for line in read_small(path).decode("utf-8").splitlines())
        groups = tuple(_group(members) for members in _together(rows) if any(row["used"] for row in members))
        advantages, texts = dict[SampleKey, NDArray[np.float64]](), dict[SampleKey, str]()
        for row in rows:
            for index, talk in enumerate(row["conversations"]):
                key = (row["prompt"], row["visit"], row["attempt"], index)
                advantages[key] = np.array(talk["advantages"], dtype=float)[np.array(talk["trained"], dtype=bool)]
                texts[key] = talk["text"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        why = f"{path} does not hold the samples of a step ({error!r})"
        raise RecipeError.of("--step", why, "replay another step") from error
    return RecordedStep(step=step, rows=rows, groups=groups, advantages=advantages, texts=texts, metrics=metrics)


def _there_are(folder: Path) -> str:
    steps = sorted(int(path.stem.rpartition("-")[2]) for path in (folder / "samples").glob("step-*.jsonl"))
    return f"name one of {steps[0]} to {steps[-1]}" if steps else "name a run that has taken a step"


def _together(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The judged rows of each prompt's visit, in the order of the file, which is that of launches."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["reward"] is not None and row["failure"] is None:
            found.setdefault((row["prompt"], row["visit"]), []).append(row)
    return list(found.values())


def _group(rows: Sequence[Mapping[str, Any]]) -> Group:
    trajectories = tuple(_trajectory(row) for row in rows)
    rewards = tuple(
        Reward(value=told["value"], outcome=told["outcome"], parts=told["parts"], costly=tuple(told.get("costly", ())))
        for told in (row["reward"] for row in rows)
    )
    return Group(prompt=trajectories[0].prompt, trajectories=trajectories, rewards=rewards)


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    turns = row.get("turn_rewards")
    return Trajectory(
        prompt=Prompt(id=row["prompt"], messages=tuple(row["messages"]), reference=row["reference"]),
        visit=row["visit"],
        attempt=row["attempt"],
        conversations=tuple(_conversation(talk) for talk in row["conversations"]),
        outcome=Outcome(answer=row["answer"] or "", turn_rewards=None if turns is None else tuple(turns)),
    )


def _conversation(talk: Mapping[str, Any]) -> Conversation:
    tokens, trained = np.array(talk["tokens"], dtype=np.int64), np.array(talk["trained"], dtype=bool)
    logprobs = np.array(talk["logprobs"], dtype=np.float64)
    if not len(tokens) == len(trained) == len(logprobs) == len(talk["advantages"]):
        raise ValueError("tokens and their numbers are not equally many")
    usual = ((0, int(trained.sum())),)
    return Conversation(
        tokens=tokens,
        trained=trained,
        logprobs=logprobs,
        stop=talk["stop"],
        version=talk["version"],
        parent=None if talk["parent"] is None else (talk["parent"][0], talk["parent"][1]),
        turns=tuple((call, count) for call, count in talk.get("turns", usual)),
    )
