"""Finds and loads a taskset by its name: a module beside the recipe, an installed package, or one of verifiers' own.

A taskset yields tasks, each of which asks and judges by itself, and may come with an `Env` that plays a game or a user.
What it would need that a coroutine in this process has not (containers, tool servers, other models, a harness that is a
program) is refused when it is loaded. `missing` only looks at files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import plugins
from stretto.errors import Problem, RecipeError

if TYPE_CHECKING:
    import verifiers.v1 as vf

FIELD = "task.source.taskset"
CONFIG = "task.source.config"
CORPORA = ("words",)
"""What the taskset textarena downloads with nltk; it is never let do that."""
HARNESSES = ("null",)
"""Harnesses that a conversation in this process stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTaskset:
    """A taskset in this process."""

    env: vf.Env[Any]
    """What plays its tasks."""
    tasks: tuple[vf.Task[Any, Any, Any], ...]
    """The tasks, by index."""
    role: str
    """What the environment calls the agent that our model plays."""


def missing(name: str, folders: Sequence[str]) -> Problem | None:
    """Why there is no such taskset, without importing anything; none if there is one."""
    module = module_of(name)
    if module in sys.stdlib_module_names:
        return Problem(field=FIELD, reason=f"{module} belongs to Python itself", fix="give the taskset another name")
    if _is_built_in(module) or any(_holds(Path(folder), module) for folder in folders) or find_spec(module):
        return None
    reason = f"there is no taskset {name!r}: no file {module}.py beside the recipe, and no package {module}"
    return Problem(field=FIELD, reason=reason, fix="correct the name, write the file, or install the package")


def module_of(name: str) -> str:
    """The module that a taskset's name stands for, as verifiers finds it."""
    return name.replace("-", "_").lower()


def _is_built_in(module: str) -> bool:
    spec = find_spec("verifiers")
    return any(
        _holds(Path(place, "v1", "tasksets"), module) for place in (spec and spec.submodule_search_locations) or ()
    )


def _holds(folder: Path, module: str) -> bool:
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()


def load(name: str, config: Mapping[str, Any], count: int, folders: Sequence[str]) -> LoadedTaskset:
    """The taskset with its first `count` tasks; kept, because prompts and environment both ask for it."""
    if problem := missing(name, folders):
        raise RecipeError(problem)
    return _loaded(name, json.dumps(dict(config), sort_keys=True), count, tuple(folders))


@lru_cache(maxsize=4)
def _loaded(name: str, config: str, count: int, folders: tuple[str, ...]) -> LoadedTaskset:
    from pydantic import ValidationError

    try:
        return _made(name, json.loads(config), count, folders)
    except RecipeError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part not in ("taskset",))
        reason = f"taskset {name} refuses it: {first['msg']}"
        raise RecipeError.of(f"{CONFIG}.{place}" if place else CONFIG, reason, "correct it, or leave it out") from error
    except Exception as error:
        reason = f"taskset {name} cannot be loaded: {plugins.describe_error(error, folders)}"
        raise RecipeError.of(FIELD, reason, "mend it, or give it what it needs in task.source.config") from error


def _made(name: str, config: dict[str, Any], count: int, folders: tuple[str, ...]) -> LoadedTaskset:
    module = module_of(name)
    if not _is_built_in(module):
        plugins.load(module, folders)
    from verifiers.v1.utils.loaders import environment_class, resolve_env_config, taskset_class

    taskset_class(name)
    if module == "textarena":
        _refuse_downloads()
    settings = resolve_env_config({"taskset": {**config, "id": name}})
    roles = _refuse_other_agents(name, settings)
    env = environment_class(name)(settings)
    tasks = tuple(islice(env.taskset, count))
    _refuse_machines(name, env, tasks)
    if not tasks:
        raise RecipeError.of(FIELD, f"taskset {name} has no tasks with these settings", "change task.source.config")
    return LoadedTaskset(env=env, tasks=tasks, role=roles)


def _refuse_downloads() -> None:
    """verifiers' own textarena plays games of words, and asks nltk for a list of them."""
    import nltk

    try:
        for corpus in CORPORA:
            nltk.data.find(f"corpora/{corpus}")
    except LookupError as error:
        reason = f"its games need the nltk data {', '.join(CORPORA)}, which is not on this machine"
        fix = "fetch it where there is a network: python -m nltk.downloader words; or play a game without words"
        raise RecipeError.of(FIELD, reason, f"{fix}, as examples/textarena does") from error


def _refuse_other_agents(name: str, settings: Any) -> str:
    """The one agent of an environment; others would need models of their own."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id

    roles = agent_config_fields(settings)
    if len(roles) != 1:
        reason = f"taskset {name} is played by several agents ({', '.join(roles)}), which is not available yet"
        raise RecipeError.of(FIELD, reason, "use one with a single agent")
    role, agent = next(iter(roles.items()))
    harness = agent.harness.id if agent.harness is not None else default_harness_id(name)
    if harness not in (*HARNESSES, "bash") or (agent.harness is not None and harness == "bash"):
        reason = f"taskset {name} brings a harness of its own, {harness}, which is a program; that is not available yet"
        raise RecipeError.of(FIELD, reason, "run the program itself, with environment.kind: program")
    if agent.client is not None:
        reason = f"taskset {name} has a model of its own for its agent {role}, so nothing would be trained"
        raise RecipeError.of(FIELD, reason, "use another taskset")
    return role


def _refuse_machines(name: str, env: vf.Env[Any], tasks: Iterable[Any]) -> None:
    """What only a container or another process could give."""
    taskset, kind = env.taskset, type(env.taskset).task_type()
    fix = "use another taskset, or an agent of yours with environment.kind: program"
    if kind.NEEDS_CONTAINER or any(task.data.image is not None or task.data.agent_user is not None for task in tasks):
        raise RecipeError.of(FIELD, f"taskset {name} needs a container, which is not available yet", fix)
    if type(taskset).toolsets(taskset.config) or kind.toolsets(taskset.config.task):
        raise RecipeError.of(FIELD, f"taskset {name} starts tool servers, which is not available yet", fix)
