"""Prompts of a taskset of verifiers: what its tasks ask, for reports and plans; the environment plays the tasks.

Loading one runs its code and takes seconds, so plain checks only look whether it is there. A prompt's id is the task's
key, and its tags say which task of which taskset it is; what a task knows of its answer stays in the task.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto import plugins
from stretto.environments.verifiers import tasksets
from stretto.errors import Problem, RecipeError
from stretto.extras import missing_extra
from stretto.recipe.schema import TaskSection, VerifiersSource
from stretto.types import Message, Prompt

MAX_PROMPTS = 100_000
"""Prompts are held in memory."""


def problems(task: TaskSection, source: VerifiersSource, folders: tuple[str, ...]) -> Iterator[Problem]:
    """What is wrong with the settings, without loading anything."""
    if lacking := missing_extra("verifiers", "task.source.kind"):
        yield lacking
    elif absent := tasksets.missing(source.taskset, folders):
        yield absent
    for key in ("prompt", "system"):
        if getattr(task, key) is not None:
            reason = "has no effect, because the tasks of a taskset write their own messages"
            yield Problem(field=f"task.{key}", reason=reason, fix="remove it")
    if source.count > MAX_PROMPTS:
        reason = f"{source.count} tasks are too many"
        yield Problem(field="task.source.count", reason=reason, fix=f"use at most {MAX_PROMPTS}")
    for key in ("id", "idx"):
        if key in source.config:
            yield Problem(field=f"task.source.config.{key}", reason="is given by task.source.taskset", fix="remove it")


def read(
    task: TaskSection, source: VerifiersSource, root: Path, limit: int | None
) -> tuple[list[Prompt], list[Problem]]:
    """Every prompt, and what is wrong with the settings; with a limit, the taskset is only looked for."""
    folders = plugins.folders_of(root)
    if (wrong := list(problems(task, source, folders))) or limit is not None:
        return [], wrong
    try:
        loaded = tasksets.load(source.taskset, source.config, source.count, folders)
    except RecipeError as error:
        return [], list(error.problems)
    prompts = [_prompt(source, each, place) for place, each in enumerate(loaded.tasks)]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        reason = f"taskset {source.taskset} has several tasks with one key, so they cannot be told apart"
        return [], [Problem(field=tasksets.FIELD, reason=reason, fix="give its tasks keys of their own")]
    return prompts, []


def _prompt(source: VerifiersSource, task: Any, place: int) -> Prompt:
    name = task.data.id or task.key[:16]
    return Prompt(
        id=f"{source.taskset}/{name}",
        messages=_messages(task.data),
        tags={"taskset": source.taskset, "config": dict(source.config), "count": source.count, "index": place},
    )


def _messages(data: Any) -> tuple[Message, ...]:
    """How the conversation opens, as far as the task says; where somebody else opens it, what the task is called."""
    asked = data.prompt if data.prompt is not None else data.description or data.name or "(somebody else begins)"
    said: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(asked, str):
        return (*said, {"role": "user", "content": asked})
    return (*said, *({"role": each.role, "content": _text(each.content)} for each in asked))


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(getattr(part, "text", "") for part in content)
