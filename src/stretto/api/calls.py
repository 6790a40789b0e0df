"""stretto from Python: `train`, `resume`, `evaluate`, `sample`, `plan` and `check`, as the command line calls them.

They take the path of a recipe, its sections as dicts, or a `Recipe`, and refuse what the command line refuses, with a
`RecipeError` that lists all of it. They may be called where an event loop runs, as in a notebook: then the work is done
in a thread beside it. Ctrl-C ends a run with a checkpoint, and is a KeyboardInterrupt here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import threads
from stretto.api.functions import RewardLike, collect
from stretto.api.recipes import check_changed, check_deeply, open_recipe, probes
from stretto.api.run import Run
from stretto.api.targets import Target, ask, place_of, run_folder, source_of
from stretto.checks.recipe import examine
from stretto.environments.base import Address, Environment
from stretto.errors import Problem, RecipeError
from stretto.recipe.load import Changes, RecipeSource, folder_of, listed
from stretto.recipe.schema import Recipe
from stretto.runtime.recipe_changes import refuse_asking, refuse_nothing_asked, refuse_resume
from stretto.runtime.recipe_file import load_run_recipe
from stretto.runtime.user_functions import Callback, UserFunctions
from stretto.sandbox.fork_server import ForkServer
from stretto.types import Message

if TYPE_CHECKING:  # loaded by the functions that need them
    from stretto.api.planning import Plans
    from stretto.report.console import Progress
    from stretto.runtime.answers import Answer
    from stretto.runtime.evaluate import Evaluation

Note = Callable[[str], None]
"""Tells the user something that asks for nothing."""


def train(
    recipe: RecipeSource,
    *,
    rewards: Sequence[RewardLike] | None = None,
    environment: Environment | str | None = None,
    algorithm: Callable[..., Any] | str | None = None,
    callbacks: Sequence[Callback] = (),
    callbacks_strict: bool | None = None,
    changes: Changes = (),
    folder: str | os.PathLike[str] | None = None,
    name: str | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Run:
    """Trains a recipe in a new run folder.

    `rewards`, `environment` and `algorithm` take the place of the recipe's. A callback is called after each step with
    a `StepEvent` or with step and metrics. `changes` are changes to the recipe. `folder` is the run's folder, by
    default runs/<name>-<NNN>. `quiet` prints nothing; `progress` shows the run in another way.
    """
    refuse_copies("train", recipe)
    _refuse_name(name)
    root = folder_of(recipe)
    functions, own = collect(
        rewards=rewards, environment=environment, algorithm=algorithm, callbacks=callbacks, root=root
    )
    own |= {} if callbacks_strict is None else {"run.callbacks_strict": callbacks_strict}
    own |= {} if folder is None else {"run.folder": os.fspath(folder)}
    opened = open_recipe(recipe, [own, *listed(changes)], deep=False, functions=functions)
    called = name or (Path(recipe).stem if isinstance(recipe, str | os.PathLike) else "run")

    def work(given: UserFunctions) -> Run:
        _fit(opened, root, note or _note(quiet))
        check_deeply(opened, root)
        from stretto.runtime.session import start

        finished = start(opened, name=called, root=root, progress=_shown(progress, quiet), given=given)
        return Run(finished.folder, rewards, environment, algorithm)

    with _served(functions) as given:
        return threads.outside_loops(work, given)


def resume(
    folder: str | os.PathLike[str] | Run,
    *,
    rewards: Sequence[RewardLike] | None = None,
    environment: Environment | str | None = None,
    algorithm: Callable[..., Any] | str | None = None,
    callbacks: Sequence[Callback] = (),
    callbacks_strict: bool | None = None,
    changes: Changes = (),
    allow: Sequence[str] = (),
    restart: bool = False,
    quiet: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Run:
    """Goes on with a run where its newest checkpoint stands, or from the beginning with `restart`.

    Functions that were given as objects have to be given again. A key of the recipe that differs from what the run was
    trained with is refused unless it is in `allow`.
    """
    refuse_copies("resume", folder)
    place = place_of(folder)
    before, recipe, root, functions, own = _recipe_of(
        place,
        changes,
        callbacks_strict,
        rewards=rewards,
        environment=environment,
        algorithm=algorithm,
        callbacks=callbacks,
    )
    refuse_resume(place, before, recipe, root, allow=tuple(allow), restart=restart)
    check_changed(recipe, root, functions)

    def work(given: UserFunctions) -> Run:
        _fit(recipe, root, note or _note(quiet))
        from stretto.runtime.session import resume as go_on

        shown = _shown(progress, quiet)
        finished = go_on(place, changes=own, allow=tuple(allow), restart=restart, progress=shown, given=given)
        return Run(finished.folder, rewards, environment, algorithm)

    with _served(functions) as given:
        return threads.outside_loops(work, given)


def evaluate(
    target: Target,
    *,
    rewards: Sequence[RewardLike] | None = None,
    environment: Environment | str | None = None,
    algorithm: Callable[..., Any] | str | None = None,
    changes: Changes = (),
    on: str | os.PathLike[str] | None = None,
    note: Note | None = None,
) -> Evaluation:
    """Evaluate a run's newest checkpoint, or a recipe's model before training, on held-out prompts.

    `on` is a file of JSON lines; then every row of it is asked instead, as the recipe's task words it.
    """
    told, file = note or _note(quiet=False), None if on is None else Path(on)
    if (place := run_folder(target)) is not None:
        before, recipe, root, functions, own = _recipe_of(
            place, changes, rewards=rewards, environment=environment, algorithm=algorithm
        )
        refuse_asking(before, recipe)
        check_changed(recipe, root, functions, training=False)
        refuse_nothing_asked(recipe, file)
        from stretto.runtime.questions import evaluate_run

        with _served(functions) as given:
            return threads.outside_loops(evaluate_run, place, changes=own, on=file, note=told, given=given)
    source = source_of(target)
    root = folder_of(source)
    functions, found = collect(rewards=rewards, environment=environment, algorithm=algorithm, root=root)
    with _served(functions) as given:
        opened = open_recipe(source, [found, *listed(changes)], deep=False, training=False, functions=functions)
        refuse_nothing_asked(opened, file)
        check_deeply(opened, root, training=False)
        from stretto.runtime.questions import evaluate_recipe

        return threads.outside_loops(evaluate_recipe, opened, root=root, on=file, note=told, given=given)


def sample(
    target: Target,
    prompts: str | Sequence[str | Sequence[Message]],
    *,
    n: int = 1,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    changes: Changes = (),
    note: Note | None = None,
) -> list[Answer]:
    """`n` answers to each prompt, a text or a list of messages: of a run's newest checkpoint, or of a recipe's model.

    Before a text comes the recipe's `task.system`. `temperature` 0 is greedy; what is left out is as in training. The
    same call gives the same answers; another `seed` gives others.
    """
    _refuse_numbers(n=n, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    own = [*listed(changes), *([] if max_new_tokens is None else [{"engine.max_new_tokens": max_new_tokens}])]

    async def question(parts: Any) -> list[Answer]:
        from stretto.runtime.answers import answers, prompts_of

        asked = prompts_of(prompts, system=parts.recipe.task.system)
        return await answers(parts, asked, attempts=n, temperature=temperature, seed=seed)

    return ask(target, question, changes=own, note=note or _note(quiet=False))


def serve(
    target: Target,
    *,
    port: int = 8000,
    key: str | None = None,
    changes: Changes = (),
    ready: Callable[[Address], object],
    note: Note | None = None,
) -> None:
    """Answers programs over HTTP until Ctrl-C: a run's newest checkpoint, or a recipe's model. `ready` is told where.

    It listens on 127.0.0.1, at `port` or at one that is free (0). Without a `key` there is a new one.
    """

    async def question(parts: Any) -> None:
        from stretto.runtime import serve as server

        await server.serve(parts, port=port, key=key, ready=ready)

    ask(target, question, changes=listed(changes), note=note or _note(quiet=False))


def plan(
    recipe: RecipeSource,
    *,
    cluster: str | None = None,
    strategy: str | None = None,
    changes: Changes = (),
    measure: bool = False,
    cells: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str] | None = None,
    baselines: bool = False,
    note: Note | None = None,
) -> Plans:
    """Where the models should live on a cluster such as `"8xH100"`, what fits, and what a step will take; best first.

    `cells` is a placement of your own to compare with, a file or what it would hold: a plan, or roles with devices and
    a mesh. `baselines` adds placements that others use. Only `measure`, which runs the best plans here and corrects the
    constants, loads PyTorch.
    """
    from stretto.api.planning import planned

    asked: dict[str, Any] = {
        "cluster": cluster,
        "strategy": strategy,
        "changes": changes,
        "measure": measure,
        "cells": cells,
    }
    told = note or _note(quiet=False)
    return threads.outside_loops(lambda: planned(recipe, **asked, baselines=baselines, note=told))


def check(
    recipe: RecipeSource,
    *,
    rewards: Sequence[RewardLike] | None = None,
    environment: Environment | str | None = None,
    algorithm: Callable[..., Any] | str | None = None,
    changes: Changes = (),
    deep: bool = False,
) -> list[Problem]:
    """Everything wrong with a recipe; an empty list if a run may begin. `deep` also asks tokenizer and prompts."""
    root = folder_of(recipe)
    try:
        functions, own = collect(rewards=rewards, environment=environment, algorithm=algorithm, root=root)
        changed = [own, *listed(changes)]
        _, problems = examine(recipe, changed, root=root, probes=probes(functions))
        if not problems:
            opened = open_recipe(recipe, changed, deep=False, functions=functions)
            if deep:
                check_deeply(opened, root)
    except RecipeError as error:
        return list(error.problems)
    return list(problems)


# Between them ---------------------------------------------------------------------------------------------------------


def refuse_copies(command: str, what: object) -> None:
    """Refuses to begin in one of several copies of this program that a launcher such as torchrun has started."""
    from stretto.api.torchrun import first_of

    shown = what if isinstance(what, str | os.PathLike) else "RECIPE"
    if not first_of(os.environ, command=f"{command} {shown}"):
        raise SystemExit(0)


@contextmanager
def _served(functions: UserFunctions) -> Iterator[UserFunctions]:
    """The functions, with a server for those that judge: made now, before anything heavy is loaded."""
    if not functions.rewards:
        yield functions
        return
    with ForkServer(functions.rewards) as server:
        yield replace(functions, server=server)


def _recipe_of(
    place: Path, changes: Changes, callbacks_strict: bool | None = None, **given: Any
) -> tuple[Recipe, Recipe, Path, UserFunctions, Changes]:
    """Return a run's stored recipe, the recipe with changes, its root, the functions, and the changed keys."""
    before, root = load_run_recipe(place)
    functions, own = collect(**given, root=root)
    own |= {} if callbacks_strict is None else {"run.callbacks_strict": callbacks_strict}
    changed = [own, *listed(changes)]
    return before, load_run_recipe(place, changed)[0], root, functions, changed


def _fit(recipe: Recipe, root: Path, note: Note) -> None:
    """Refuses a machine on which the run could not go well; says what of it would have no work, or is busy."""
    from stretto.checks.doctor import admit

    for remark in admit(recipe, root=root):
        note(remark)


def _shown(progress: Progress | None, quiet: bool) -> Progress | None:
    if not quiet or progress is not None:
        return progress
    from stretto.report.console import SilentProgress

    return SilentProgress()


def _note(quiet: bool) -> Note:
    """Standard error, or nobody."""

    def note(text: str) -> None:
        if not quiet and sys.stderr is not None:
            print(f"note: {text}", file=sys.stderr)

    return note


def _refuse_name(name: Any) -> None:
    """What no folder below runs/ can be called after."""
    if name is not None and not (isinstance(name, str) and name and name.isprintable() and Path(name).name == name):
        fix = "use letters, digits, - and _; to have the run elsewhere, give its folder"
        raise RecipeError.of("name", f"{name!r} is no name of a folder", fix)


def _refuse_numbers(**given: Any) -> None:
    """What `sample` cannot be asked for."""
    least = {"n": 1, "max_new_tokens": 1, "temperature": 0.0, "seed": None}
    problems = []
    for key, value in given.items():
        kinds = (int, float) if key == "temperature" else (int,)
        if value is None and key != "n":
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or value != value or abs(value) == float("inf"):
            problems.append(Problem(field=key, reason=f"{value!r} is not a number of its kind", fix="give another"))
        elif (bound := least[key]) is not None and value < bound:
            problems.append(Problem(field=key, reason=f"is {value}", fix=f"use {bound} or more"))
    if problems:
        raise RecipeError(*problems)
