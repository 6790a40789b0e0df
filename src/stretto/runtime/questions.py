"""What a run's checkpoint, or the model of a recipe, answers to held-out prompts and to others. Nothing is trained."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from stretto import threads
from stretto.algorithms.catalog import find_facts
from stretto.checks.own_code import import_plugins
from stretto.recipe.describe import roles_of
from stretto.recipe.load import Changes
from stretto.recipe.schema import AlgorithmSection, ColumnsSource, JsonlSource, OwnAlgorithm, Recipe
from stretto.runtime.base_copy import Note
from stretto.runtime.build import build_runtime
from stretto.runtime.evaluate import Evaluation, evaluate
from stretto.runtime.fitting import refuse_nothing_held_out
from stretto.runtime.host_watch import HostWatch
from stretto.runtime.inputs import AS_TRAINED, refuse_changed
from stretto.runtime.moved import point_adapters
from stretto.runtime.plans import sampling_plan
from stretto.runtime.precision import resolve_precision
from stretto.runtime.reading import read_checkpoint
from stretto.runtime.recipe_changes import EVALUATION_KEYS, asking_record, refuse_nothing_asked
from stretto.runtime.recipe_file import load_run_recipe
from stretto.runtime.runtime import Runtime
from stretto.runtime.session import startup_deadline
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.runtime.value_table import run_values
from stretto.runtime.watch import LoopWatch, StageLimit, StageWatch
from stretto.storage.checkpoint import Checkpoints
from stretto.tasks.source import load_prompts
from stretto.types import Prompt
from stretto.workers.checkpoints import written_by

T = TypeVar("T")


def evaluate_run(
    folder: Path,
    *,
    changes: Changes = (),
    on: Path | None = None,
    note: Note = lambda text: None,
    given: UserFunctions = NONE_GIVEN,
) -> Evaluation:
    """Evaluate a run's newest checkpoint on its held-out prompts, or `on` every row of a file. The run may go on
    meanwhile."""
    recipe, root = load_run_recipe(folder, changes)
    return ask_run(folder, recipe, root, evaluation_of(recipe, root, on), note=note, given=given)


def evaluate_recipe(
    recipe: Recipe,
    *,
    root: Path,
    on: Path | None = None,
    note: Note = lambda text: None,
    given: UserFunctions = NONE_GIVEN,
) -> Evaluation:
    """Evaluate the model of a recipe before training, as `evaluate_run` does; a scratch model is warmed up for it."""
    return ask_recipe(recipe, root, evaluation_of(recipe, root, on), note=note, given=given)


def evaluation_of(recipe: Recipe, root: Path, on: Path | None) -> Callable[[Runtime], Awaitable[Evaluation]]:
    """The question that an evaluation is: the held-out prompts, or every row of the file `on`.

    Raises:
        RecipeError: there is nothing to ask, or no reward scores the answers.
    """
    refuse_nothing_asked(recipe, on)
    rows = None if on is None else rows_of(recipe, root, on)

    async def evaluated(parts: Runtime) -> Evaluation:
        if rows is None:
            refuse_nothing_held_out(parts.recipe, parts.heldout)
        asked = parts.heldout if rows is None else rows
        return await evaluate(parts, asked, pass_k=parts.recipe.evaluate.pass_k)

    return evaluated


def rows_of(recipe: Recipe, root: Path, file: Path) -> tuple[Prompt, ...]:
    """Every row of a file of JSON lines as a prompt of the recipe's task: same message, same columns, none held out."""
    facts = find_facts(recipe.algorithm.name)
    source = JsonlSource(path=str(file.resolve()), rows=facts.rows if facts else "prompts")
    if isinstance(there := recipe.task.source, ColumnsSource):
        source = source.model_copy(update={"columns": there.columns, "rows": there.rows, "ranking": there.ranking})
    return load_prompts(recipe.task.model_copy(update={"source": source}), root)


def ask_run(
    folder: Path,
    recipe: Recipe,
    root: Path,
    question: Callable[[Runtime], Awaitable[T]],
    *,
    note: Note = lambda text: None,
    given: UserFunctions = NONE_GIVEN,
    judged: bool = True,
) -> T:
    """What a run's newest checkpoint answers; `recipe` is the run's, changed in what only sampling and judging read.

    Without `judged`, no reward model is loaded.
    """
    folder = folder.absolute()
    before, _ = load_run_recipe(folder)
    allow = (*EVALUATION_KEYS, "algorithm.name")  # whose code is not run
    refuse_changed(folder, before, root, allow=allow, note=lambda text: None, remedy=AS_TRAINED)
    point_adapters(folder, before, root)

    def asked(latest: Path) -> T:
        return threads.run(_ask(question, recipe, root, folder, latest, given=given, judged=judged, note=note))

    return read_checkpoint(folder, recipe, asked, note=note)


def ask_recipe(
    recipe: Recipe,
    root: Path,
    question: Callable[[Runtime], Awaitable[T]],
    *,
    note: Note = lambda text: None,
    given: UserFunctions = NONE_GIVEN,
    judged: bool = True,
) -> T:
    """What the model of a recipe answers before training."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = resolve_precision(recipe, root, note)
        return threads.run(_ask(question, chosen, root, Path(folder), None, given=given, judged=judged, note=note))


async def _ask(
    question: Callable[[Runtime], Awaitable[T]],
    recipe: Recipe,
    root: Path,
    folder: Path,
    checkpoint: Path | None,
    *,
    given: UserFunctions,
    judged: bool,
    note: Note,
) -> T:
    import_plugins(recipe, root, training=False)
    stacks = folder if checkpoint else Path()  # a folder for the moment keeps none
    asked = without_own_algorithm(recipe)
    parts = await build_runtime(
        asked,
        plan=sampling_plan(asked) if judged else sampling_plan(asked).only({"generate"}),
        root=root,
        folder=folder,
        note=lambda text: None,
        # A run draws from the prompts that have one; its checkpoint knows which.
        values=None if checkpoint is None else run_values(recipe, root, folder),
        stacks=stacks,
        watch=startup_deadline(recipe, stacks),
        judged=judged,
        drafts=False,
        given=given,
    )
    try:
        if checkpoint is not None:
            record = asking_record(recipe)
            Checkpoints(checkpoint.parent, keep=1, best=None).restore(
                checkpoint, (record, *parts.stateful), written=written_by(roles_of(asked))
            )
        await parts.restored(checkpoint)
        with HostWatch() as host:
            beat = LoopWatch(turned=lambda: host.turned, note=note, deadline=recipe.environment.deadline)
            forever = {"question": StageLimit(seconds=math.inf, key="deadlines.generate")}
            watch = StageWatch(limits=forever, folder=stacks, last_words=parts.pool.kill, loop=beat)
            with watch.stage("question", 0, "nothing was finished before"):
                answered = await question(parts)
                if text := parts.renderer.unknown_warning():
                    note(text)
                return answered
    finally:
        await parts.close()


def without_own_algorithm(recipe: Recipe) -> Recipe:
    """The recipe with an algorithm of stretto's in the place of one of the user's, which nobody asks: its checkpoints
    have the same parts."""
    given, facts = recipe.algorithm, find_facts(recipe.algorithm.name)
    if not isinstance(given, OwnAlgorithm):
        return recipe
    rows = {"demonstrations": "sft", "pairs": "reward_model"}.get(facts.rows if facts else "prompts")
    name = rows or ("grpo" if recipe.roles.critic is None else "ppo")
    return recipe.model_copy(update={"algorithm": AlgorithmSection(name=name, kl=given.kl)})
