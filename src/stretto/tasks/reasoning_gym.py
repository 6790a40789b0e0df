"""Prompts of reasoning-gym: any of its tasks by name, made from a seed and the task's own settings.

A prompt's id is a hash of its question, and a question comes once: what is held out is never trained on, even where a
task repeats itself. What its scorer needs travels in the prompt's tags to the reward of kind reasoning_gym.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from stretto.errors import Problem, RecipeError
from stretto.extras import missing_extra
from stretto.recipe.schema import GymSource, TaskSection
from stretto.tasks import gym
from stretto.tasks.template import chat, fill, printable
from stretto.tasks.template import problems as template_problems
from stretto.types import Prompt

MAX_PROMPTS = 100_000
"""Prompts are held in memory."""
FEW = 8
"""Prompts made for a look at the task; of some tasks each takes a second."""
SECONDS = 600.0
"""How long a task may take to make its prompts."""
SOURCE = "task.source"


def problems(task: TaskSection, source: GymSource) -> Iterator[Problem]:
    """What is wrong with the settings, without making anything."""
    held, count = task.holdout.prompts, source.limit
    if lacking := missing_extra("reasoning_gym", f"{SOURCE}.kind"):
        yield lacking
    if source.seed < 0:
        yield Problem(field=f"{SOURCE}.seed", reason=f"{source.seed} is negative", fix="use 0 or more")
    if count > MAX_PROMPTS:
        yield Problem(field=f"{SOURCE}.count", reason=f"{count} prompts are too many", fix=f"use at most {MAX_PROMPTS}")
    elif held != "auto" and held >= count:
        reason = f"{held} are held out of the {count} of task.source.count, which leaves none to train on"
        yield Problem(field="task.holdout.prompts", reason=reason, fix=f"use at most {count - 1}, or more prompts")
    for key, instead in (("seed", "seed"), ("size", "count")):
        if key in source.config:
            reason = f"is given by task.source.{instead}"
            yield Problem(field=f"{SOURCE}.config.{key}", reason=reason, fix=f"use task.source.{instead} instead")
    if task.prompt is not None:
        yield from template_problems(task.prompt, ("question",))


def read(task: TaskSection, source: GymSource, root: Path, limit: int | None) -> tuple[list[Prompt], list[Problem]]:
    """The prompts, or with a limit a few of them, or what is wrong with the settings."""
    if wrong := list(problems(task, source)):
        return [], wrong
    count, name, few = source.limit, source.name, limit is not None
    request = {
        "name": name,
        "config": source.config,
        "seed": source.seed,
        "count": min(FEW, count) if few else count,
    }
    try:
        made = _made(json.dumps(request, sort_keys=True))
    except RecipeError as error:
        return [], list(error.problems)
    if "entries" not in made:
        return [], [_refusal(made, name)]
    entries = made["entries"]
    if not few and len(entries) < count and source.count != "auto":
        reason = f"{count} prompts are wanted, and {name} with these settings gives only {len(entries)} different ones"
        fix = f"use at most {len(entries)}, or widen task.source.config"
        return [], [Problem(field=f"{SOURCE}.count", reason=reason, fix=fix)]
    return [_prompt(task, source, entry) for entry in entries], []


def _prompt(task: TaskSection, source: GymSource, entry: dict[str, Any]) -> Prompt:
    question = str(entry["question"])
    text = question if task.prompt is None else fill(task.prompt, {"question": question})
    return Prompt(
        id=f"{source.name}/{hashlib.blake2b(question.encode(), digest_size=8).hexdigest()}",
        messages=chat(text, task.system),
        reference=entry["answer"],
        tags={"task": source.name, "config": source.config, "question": question, "metadata": entry["metadata"]},
    )


def _refusal(made: dict[str, Any], name: str) -> Problem:
    """Why there are no entries, from what the process said."""
    if "refused" in made:
        reason = f"{name} refuses these settings: {printable(made['refused'], 200)}"
        return Problem(field=f"{SOURCE}.config", reason=reason, fix="change them; leave out what may stay as it is")
    wanted, known = made.get("key", name), made["known"]
    near = get_close_matches(wanted, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    if "key" in made:
        reason = f"{name} has no setting {printable(wanted)!r}"
        return Problem(
            field=f"{SOURCE}.config.{wanted}", reason=reason, fix=f"{hint}it has {', '.join(known) or 'none'}"
        )
    reason = f"reasoning-gym has no task {printable(name)!r}"
    fix = f"{hint}it has {len(known)}, such as chain_sum, spell_backward and countdown"
    return Problem(field=f"{SOURCE}.name", reason=reason, fix=fix)


@lru_cache(maxsize=2)
def _made(request: str) -> dict[str, Any]:
    """The answer of a process of its own; remembered, because a run asks for its prompts more than once."""
    name = json.loads(request)["name"]
    surroundings = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", gym.__file__],
            input=request,
            capture_output=True,
            encoding="utf-8",
            env=surroundings,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        reason = f"{name} did not make its prompts within {SECONDS:g} s"
        raise RecipeError.of(f"{SOURCE}.count", reason, "use fewer, or easier settings") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = f"{name} failed while it made prompts: {printable(lines[-1], 200)}"
        raise RecipeError.of(f"{SOURCE}.config", reason, "change the settings, or use another task")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
