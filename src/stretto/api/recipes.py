"""From a path, a dict or a `Recipe` to a recipe in which nothing wrong was found: how all of them begin.

Hands `checks.recipe` what it must not import: how tasks are read and rewards judged. Loads torch for the second tier
only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from stretto import hub
from stretto.api.functions import refuse_several_devices
from stretto.checks.recipe import Lookups, check, checked_recipe
from stretto.errors import Problem, RecipeError
from stretto.models.source import locate
from stretto.placement.build import OPEN, named_by_cells, plan_of
from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import host_of
from stretto.placement.plan import Cell, Plan, partly_shared
from stretto.placement.strategies import find_strategy
from stretto.planner.model_shapes import shape_of_model
from stretto.planner.unmade import cut_moments
from stretto.planner.workload import adapted
from stretto.plugins import folders_of
from stretto.readings import numbers
from stretto.recipe.describe import data_sentence, roles_of
from stretto.recipe.load import Changes, RecipeSource, folder_of
from stretto.recipe.schema import (
    Adapter,
    GymSource,
    HubSource,
    ModelSection,
    OwnSource,
    Recipe,
    RewardPart,
    RoleModel,
    TaskSection,
    UpdateSection,
    VerifiersSource,
)
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.runtime.value_table import lacks_table, value_problems
from stretto.types import Prompt

AS_THEY_ARE = ("run.folder", "environment.turns", "algorithm.vstar.table")
"""Keys that a run's recipe may have: its folder exists, turns that nobody counts were not refused before, and its own
copy of the table of V* is read."""


def open_recipe(
    source: RecipeSource,
    changes: Changes = (),
    *,
    deep: bool,
    training: bool = True,
    functions: UserFunctions = NONE_GIVEN,
) -> Recipe:
    """The resolved recipe; raises a RecipeError with every problem of the first tier, or, if `deep`, of the second.

    `training` says whether what only training reads or writes must be as it needs that.
    """
    root = folder_of(source)
    recipe = checked_recipe(source, changes, root=root, probes=probes(functions), training=training)
    refuse_several_devices(functions, recipe)
    if deep:
        check_deeply(recipe, root, training=training)
    return recipe


def recipe_to_plan(source: RecipeSource, changes: Changes = ()) -> Recipe:
    """The resolved recipe for what runs nothing: what can be priced may be asked for, and no data is read."""
    return checked_recipe(source, changes, root=folder_of(source), probes=PROBES, planning=True)


def not_at_hand(recipe: Recipe, root: Path) -> list[str]:
    """What of a recipe's files the first tier could not look at: it would have to be downloaded, or the hub is not to
    be reached."""
    roles, source = recipe.roles, recipe.task.source
    others = [role.name for role in (roles.critic, roles.teacher, roles.reward_model) if role and role.name]
    models = [locate(name, root) for name in dict.fromkeys([recipe.model.name, *others])]
    found = [
        f"the model {each.name}, which is not on this machine" for each in models if each.on_hub and not each.config
    ]
    if isinstance(source, HubSource) and source.name in hub.UNANSWERED:
        found.append(f"the dataset {source.name}, because the hub cannot be reached")
    return found


def data_words(recipe: Recipe, root: Path, *, deep: bool) -> str:
    """Return the numbers of training and held-out prompts as text. Rows from a download, another process or user code
    are counted if `deep`."""
    from stretto.tasks.source import load_prompts, split_task

    source = recipe.task.source
    if not deep and isinstance(source, HubSource | GymSource | VerifiersSource | OwnSource):
        return "prompts were not counted; `stretto check --deep` counts them"
    return data_sentence(recipe, *map(len, split_task(recipe, load_prompts(recipe.task, root))))


def check_deeply(recipe: Recipe, root: Path, *, training: bool = True) -> None:
    """Raises a RecipeError with every problem of the second tier; `training` is as in `open_recipe`."""
    from stretto.checks.deep import deep_problems

    problems = deep_problems(recipe, root, training=training)
    if training and not problems:
        problems = value_problems(recipe, root)
    if problems:
        raise RecipeError(*problems)


def check_changed(recipe: Recipe, root: Path, functions: UserFunctions = NONE_GIVEN, *, training: bool = True) -> None:
    """Raises a RecipeError with every problem of a run's changed recipe. That its folder exists is as it should be;
    `training` is as in `open_recipe`."""
    found = check(recipe, root=root, probes=probes(functions), training=training)
    if problems := [problem for problem in found if problem.field not in AS_THEY_ARE]:
        raise RecipeError(*problems)
    refuse_several_devices(functions, recipe)


def probes(functions: UserFunctions) -> Lookups:
    """The answers of the real rooms, where these functions are there already."""
    if not functions.kinds:
        return PROBES
    return replace(PROBES, rewards=partial(_rewards, functions=functions.kinds), functions=functions.kinds)


def _task(task: TaskSection, root: Path, rows: int) -> tuple[Sequence[Prompt], Sequence[Problem], bool]:
    from stretto.tasks import source  # here and below: `plan` asks neither, and they take as long to load as a recipe

    beginning = source.peek(task, root, rows)
    return beginning.prompts, beginning.problems, beginning.complete


def _rewards(section: Sequence[RewardPart], root: Path, functions: Collection[str] = ()) -> Iterable[Problem]:
    from stretto.rewards import parts

    return parts.problems(section, folders_of(root), functions)


def _plan(recipe: Recipe, root: Path) -> Iterable[Problem]:
    section = recipe.placement
    try:
        if section.cluster in OPEN:
            named = named_by_cells(section) if section.cluster == "auto" else ()
            devices = tuple(sorted(named)) or ("localhost/gpu:0",)
        else:
            devices = tuple(parse_cluster(section.cluster).devices)
        roles, updates = roles_of(recipe), recipe.batch.updates_a_step
        plan = plan_of(section, roles=roles, devices=devices, engine=recipe.engine.kind, updates=updates)
    except RecipeError as error:
        return error.problems
    by_name = section.strategy != "auto" and section.cells is None
    if by_name and find_strategy(section.strategy).least_devices > len(devices):
        reason = f"{section.strategy} has no effect on one device"
        return [Problem(field="placement.strategy", reason=reason, fix="use auto, or name more in placement.cluster")]
    return [*_too_wide(recipe, plan), *_cut_moments(recipe, root, plan)]


def _cut_moments(recipe: Recipe, root: Path, plan: Plan) -> Iterable[Problem]:
    """Cells that train and cut blocks of an optimizer's moments, where the sizes of the model are known."""
    critic, model = recipe.roles.critic, recipe.model
    trained: dict[str, tuple[str, UpdateSection, ModelSection | RoleModel, Adapter | None]]
    trained = {"train": ("optimizer.name", recipe.optimizer, model, model.adapter)}
    if critic is not None and critic.optimizer is not None:
        # A critic like the model as it was before training has its sizes.
        own = critic if critic.name not in (None, "scratch") or critic.shape else model
        trained["fit"] = ("roles.critic.optimizer.name", critic.optimizer, own, critic.adapter)
    found: dict[Problem, None] = {}
    for cell in plan.cells:
        if cell.role not in trained or cell.mesh["tp"] == 1:
            continue
        field, optimizer, section, adapter = trained[cell.role]
        with suppress(RecipeError):  # what nobody knows the sizes of is refused where it trains
            shape = shape_of_model(section, root, field=field)
            assert shape is not None
            placed = adapted(shape, adapter, few_bits=model.in_few_bits)
            rank = adapter.rank if adapter else 0
            problem = cut_moments(placed, cell.mesh, optimizer=optimizer.name, rank=rank, field=field)
            found |= {} if problem is None else {problem: None}
    return found


def _shape(recipe: Recipe, root: Path) -> Iterable[Problem]:
    model, fix = recipe.model, "leave it out: what the model's files say counts"
    try:
        told = shape_of_model(model, root, field="model")
        files = locate(model.name, root)
        if files.gguf is None and files.config is None:
            return []
        found = shape_of_model(model.model_copy(update={"shape": None}), root, field="model")
    except RecipeError as error:
        return [problem for problem in error.problems if problem.field == "model.shape"]
    assert told is not None and found is not None
    keys = ("layers", "hidden", "heads", "ffn", "experts")
    other = [key for key in keys if getattr(told, key) != getattr(found, key)]
    numbers = ", ".join(f"{key} {getattr(told, key)} for {getattr(found, key)}" for key in other)
    reason = f"differs from the files of {model.name}: {numbers}"
    return [Problem(field="model.shape", reason=reason, fix=fix)] if other else []


def _tests(prompt: Prompt, column: str) -> str | None:
    from stretto.rewards import parts

    return parts.unreadable_tests(prompt, column)


def _too_wide(recipe: Recipe, plan: Plan) -> Iterable[Problem]:
    """What cells of several devices cannot do. Those that train share parameters, matrices and experts; those that
    generate share matrices; what is asked is cut by parameters alone, but a reference as the policy on its devices."""
    wide = [cell for cell in plan.cells if len(cell.devices) > 1]
    for cell in wide:
        trains = next((each for each in wide if each.role == "train" and each.devices == cell.devices), None)
        mine = set(cell.devices)
        if cell.role == "generate":
            sleepers = [each.name for each in plan.cells if each.sleeps and not mine.isdisjoint(each.devices)]
            yield from _lane_problems(recipe, cell, sleepers)
        elif cell.role == "train":
            yield from _not_trained(cell, wide)
            if getattr(recipe.algorithm, "top_k", None):
                reason = f"{cell.name}: the exact KL of a model in slices is not available yet"
                fix = "leave it out, or give each train cell one device"
                yield Problem(field="algorithm.top_k", reason=reason, fix=fix)
        elif cell.role == "reference" and trains is not None and recipe.roles.teacher is None:
            if cell.mesh != trains.mesh:
                reason = f"{cell.name} is cut with {trains.name}, and has another mesh"
                yield Problem(field="placement.cells", reason=reason, fix=f"give it the mesh of {trains.name}")
        elif cell.mesh["dp_shard"] < len(cell.devices) or cell.mesh["ep"] > 1:
            reason = f"{cell.name}: degrees other than dp_shard are not available yet"
            yield Problem(field="placement.cells", reason=reason, fix="leave the mesh out")


def _lane_problems(recipe: Recipe, cell: Cell, sleepers: Collection[str]) -> Iterable[Problem]:
    """Why the devices of a cell cannot generate together; `sleepers` are cells that sleep on one of them."""
    count, alone = len(cell.devices), "give each generate cell one device"
    if cell.engine == "vllm":
        yield from _vllm_lane_problems(cell, sleepers, alone)
        return
    if cell.engine != "native":
        reason = f"{cell.name}: the engine {cell.engine} on several devices together is not available yet"
        yield Problem(field="placement.cells", reason=reason, fix=f"{alone}, or use engine.kind: native")
        return
    if cell.mesh["pp"] > 1 or partly_shared(cell.mesh):
        reason = f"{cell.name}: devices that generate together share every matrix, or all experts between them"
        fix = f"say mesh: {{tp: {count}}}, or ep: {count} beside any tp if the model has experts; or {alone}"
        yield Problem(field="placement.cells", reason=reason, fix=fix)
    if getattr(recipe.engine, "graphs", False) is True:
        reason = f"has no effect in {cell.name}: steps of devices that generate together are not recorded"
        yield Problem(field="engine.graphs", reason=reason, fix=f"leave it out, or {alone}")


def _vllm_lane_problems(cell: Cell, sleepers: Collection[str], alone: str) -> Iterable[Problem]:
    """Why vLLM cannot generate on the devices of a cell together: its ranks share every matrix of one host's devices,
    and only the first of them is told when others need the memory."""
    native, count = f"{alone}, or use engine.kind: native", len(cell.devices)
    if cell.mesh["tp"] != count or cell.mesh["ep"] > 1:
        reason = f"{cell.name}: devices on which vLLM generates share every matrix"
        yield Problem(field="placement.cells", reason=reason, fix=f"say mesh: {{tp: {count}}}; or {native}")
    if len(hosts := {host_of(device) for device in cell.devices}) > 1:
        reason = f"{cell.name}: vLLM generates on devices of one host, and these are on {len(hosts)}"
        yield Problem(field="placement.cells", reason=reason, fix=native)
    if asleep := sorted(sleepers):
        reason = f"{cell.name}: vLLM on several devices together does not take turns with {', '.join(asleep)}, "
        reason += "which sleeps on them" if len(asleep) == 1 else "which sleep on them"
        yield Problem(field="placement.cells", reason=reason, fix=f"take sleeps out, or {native}")


def _not_trained(cell: Cell, wide: Sequence[Cell]) -> Iterable[Problem]:
    """What a cell that trains cannot cut, whatever the model."""
    if cell.mesh["pp"] > 1:
        reason = f"{cell.name}: pipelines (pp) are not available yet"
        yield Problem(field="placement.cells", reason=reason, fix="use dp_shard or tp in its place")
    if cell.mesh["ep"] > 1 and cell.mesh["ep"] % cell.mesh["tp"]:
        reason = f"{cell.name}: devices that share a matrix (tp {cell.mesh['tp']}) have experts of their own each, and "
        reason += f"ep {cell.mesh['ep']} is no multiple"
        yield Problem(field="placement.cells", reason=reason, fix="use a multiple of tp, or leave ep out")
    mine, others = set(cell.devices), [each for each in wide if each.role != "generate"]
    linked = next((each for each in others if mine & set(each.devices) and mine != set(each.devices)), None)
    if linked is not None and max(cell.mesh["tp"], cell.mesh["ep"]) > 1:
        reason = f"{cell.name} shares matrices or experts, and some of its devices with {linked.name}"
        fix = f"give {linked.name} all devices of {cell.name}, or none of them"
        yield Problem(field="placement.cells", reason=reason, fix=fix)


PROBES = Lookups(
    task=_task, rewards=_rewards, plan=_plan, numbers=numbers, tests=_tests, shape=_shape, table=lacks_table
)
"""The answers of the real rooms."""
