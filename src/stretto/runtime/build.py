"""Builds what a run works with: reads the prompts, starts the workers, connects the parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stretto.algorithms.base import build
from stretto.engines.queue import SLICE
from stretto.environments import adapted
from stretto.environments import resolve as resolve_environment
from stretto.environments.addresses import Addresses
from stretto.environments.base import Environment
from stretto.environments.hosts import EnvironmentHosts
from stretto.environments.render import Renderer
from stretto.models.source import locate
from stretto.placement.build import OPEN
from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import DeviceKind, kind_of
from stretto.placement.plan import Plan, meetings
from stretto.plugins import folders_of
from stretto.recipe.schema import OwnEnvironmentSection, Recipe
from stretto.rewards.combine import Rewards
from stretto.rewards.rehearsal import rehearse
from stretto.runtime.base_copy import Note, prepare_base
from stretto.runtime.cpu_threads import program_count, reward_worker_count, threads_of
from stretto.runtime.download import fetch_models
from stretto.runtime.fitting import fitting, refuse_none, refuse_nothing_held_out
from stretto.runtime.inputs import threads_before
from stretto.runtime.kl_control import KlController
from stretto.runtime.plans import sliced_cells, whitens_gradients
from stretto.runtime.runtime import Runtime
from stretto.runtime.stale_batch import BatchBuffer
from stretto.runtime.teacher_prompt import shared_context, teacher_prompt
from stretto.runtime.training_data import training_data
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.sandbox.pool import Pool
from stretto.scheduler.length_predictor import LengthPredictor
from stretto.scheduler.records import UPDATE
from stretto.scheduler.speed_estimator import SpeedEstimator
from stretto.tasks.source import PromptSource, load_prompts, split_task
from stretto.types import Prompt
from stretto.workers.deadlines import call_deadlines
from stretto.workers.launchers.inprocess import Launcher, launcher_for, worker_of
from stretto.workers.models import EngineFactory
from stretto.workers.worker_group import WorkerGroup
from stretto.workers.worker_spec import LaneSpec, WorkerSpec, torch_device

EXAMPLES = 3
"""Prompts that rewards are tried with before anything is loaded."""


async def build_runtime(
    recipe: Recipe,
    *,
    plan: Plan,
    root: Path,
    folder: Path | None,
    note: Note,
    values: Mapping[str, float] | None = None,
    launcher: Launcher | None = None,
    make_engine: EngineFactory | None = None,
    stacks: Path | None = None,
    given: UserFunctions = NONE_GIVEN,
    watch: AbstractContextManager[None] | None = None,
    judged: bool = True,
    drafts: bool = True,
) -> Runtime:
    """Starts the workers and connects the parts. `folder` is the run's. Without a launcher, one device is served by a
    thread of this process, with `make_engine`'s engine if there is one, and several by processes of their own.

    `stacks` is where it is written down who stands where when a deadline passes, by default `folder`. `watch` has the
    deadline of loading, which begins when the rewards have been imported and tried, if anything is to be `judged`, and
    the models are on this host.
    Without `drafts` nothing is put into the folder of a run that may be under way.
    """
    task = load_task(recipe, root, values)
    # Who only asks must not touch the draft of a run.
    trains = drafts and any(cell.role == "train" for cell in plan.cells)
    draft = folder / ".model.draft" if folder and trains else None
    start = recipe.deadlines.start
    workers, programs = reward_worker_count(recipe), program_count(recipe)
    pool = Pool(workers=workers, programs=programs, paths=folders_of(root), start_deadline=start, server=given.server)
    hosts = None
    try:
        rewards = Rewards(recipe.rewards, pool)
        if judged:
            await rehearse(rewards, task.examples if recipe.environment.kind == "single_turn" else ())
        fetch_models(recipe, root, note)  # has no deadline; a function that fails is told before
        with watch or nullcontext():
            hosts = await start_hosts(recipe, root)
            return await _assemble(
                recipe, plan, root, folder, note, launcher, make_engine, given,
                task=task, pool=pool, rewards=rewards, stacks=stacks or folder, hosts=hosts, draft=draft,
            )  # fmt: skip
    except BaseException:
        if hosts is not None:
            await hosts.close()
        await pool.close()
        raise


async def _assemble(
    recipe: Recipe,
    plan: Plan,
    root: Path,
    folder: Path | None,
    note: Note,
    launcher: Launcher | None,
    make_engine: EngineFactory | None,
    given: UserFunctions,
    *,
    task: PromptTask,
    pool: Pool,
    rewards: Rewards,
    stacks: Path | None,
    hosts: EnvironmentHosts | None,
    draft: Path | None,
) -> Runtime:
    by = time.monotonic() + recipe.deadlines.start
    files, lone = locate(recipe.model.name, root), len(plan.devices) == 1
    device = torch_device(plan.devices[0]) if lone else torch.device("cpu")
    environment = hosts or environment_of(recipe, root, given)
    shows = recipe.model.scratch is not None and bool(recipe.model.scratch.demonstration)
    shown = environment_of(recipe, root, given) if hosts and shows else environment
    base = prepare_base(
        recipe, files=files, folder=folder, device=device, prompts=task.training, environment=shown, note=note,
        trains=draft is not None,
    )  # fmt: skip
    budgets = budgets_of(plan, recipe)
    threads = threads_of(recipe, plan, note, before=threads_before(folder))
    assign = partial(_assignment, recipe, plan, root=root, base=base, budgets=budgets, threads=threads, logs=stacks)
    make, left = partial(worker_of, make_engine=make_engine) if lone else worker_of, by - time.monotonic()
    launcher = launcher or launcher_for(plan.devices, seconds=left, make=make, kinds=kinds_of(recipe))
    worker_group = WorkerGroup(plan, launcher, assign, patience=call_deadlines(recipe), folder=stacks, draft=draft,
                               nccl=recipe.placement.nccl, note=note)  # fmt: skip
    try:
        await worker_group.start(by=by)
        tokenizer, context, named = await worker_group.worker(plan.holders[0], recipe.deadlines.start).model_limits()
        renderer = Renderer(tokenizer, stop=named, arguments=recipe.task.template)
        renderer.stop_at_turns(note)
        generating = [cell.devices[0] for cell in plan.cells if cell.role == "generate"]
        rooms = await worker_group.all(generating, lambda each: each.kv_tokens(), seconds=recipe.deadlines.start)
        shared = shared_context(recipe, root, context)
        task = without_long(recipe, task, tokenizer, shared, note)
        return Runtime(
            **connect(recipe, task, plan, root, environment=environment, renderer=renderer, given=given),
            context=context,
            teacher_prompt=teacher_prompt(recipe, tokenizer, stop=renderer.stop, context=shared),
            pool=pool,
            rewards=rewards,
            hosts=hosts,
            base=base,
            worker_group=worker_group,
            threads=threads,
            budgets=budgets,
            rooms=dict(zip(generating, rooms, strict=True)),
            speed=SpeedEstimator(round_seconds=SLICE),
        )
    except BaseException:
        await worker_group.close()
        raise


def _assignment(
    recipe: Recipe,
    plan: Plan,
    device: str,
    start_by: float,
    *,
    root: Path,
    base: Path | None,
    budgets: Mapping[str, int],
    threads: Mapping[str, int],
    logs: Path | None,
) -> WorkerSpec:
    """What the worker of a device is told to be."""
    mine = [cell for cell in plan.cells if device in cell.devices]
    sliced = sliced_cells(recipe, plan)
    return WorkerSpec(
        recipe=recipe,
        root=root,
        folders=folders_of(root),
        base=base,
        device=device,
        start_by=start_by,
        roles=frozenset(cell.role for cell in mine),
        token_budget=budgets[device],
        threads=threads.get(device, None if len(plan.devices) == 1 else 1),
        slices={cell.role: cell.devices for cell in sliced if device in cell.devices},
        meeting=next((meeting for meeting in meetings(sliced) if device in meeting.devices), None),
        mesh=next((cell.mesh for cell in mine if cell.role == "train"), {}),
        lane=lane_of(plan, device),
        memory_share=plan.memory_share_on(device),
        recomputes=plan.recomputes_on(device),
        sharers={role: plan.sharers(role) for role in UPDATE},
        whitens=whitens_gradients(recipe, plan, build(recipe.algorithm, folders_of(root))),
        sleeps=plan.sleeps_on(device),
        logs=logs.resolve() if logs else None,
    )


def lane_of(plan: Plan, device: str) -> LaneSpec | None:
    """The place of a device in a cell of several that generates, if it has one."""
    for cell in plan.cells:
        if cell.role == "generate" and device in cell.devices and len(cell.devices) > 1:
            rank, size = cell.devices.index(device), len(cell.devices)
            team, spreads = cell.mesh["tp"], cell.mesh["ep"] > 1
            return LaneSpec(cell=cell.name, rank=rank, size=size, team=team, spreads=spreads, devices=cell.devices)
    return None


def kinds_of(recipe: Recipe) -> dict[str, str]:
    """What the recipe's cluster calls each device; nothing where it leaves that to this host."""
    told = recipe.placement.cluster
    if told in OPEN:
        return {}
    return {name: device.name for name, device in parse_cluster(told).devices.items()}


def budgets_of(plan: Plan, recipe: Recipe) -> dict[str, int]:
    """Most tokens in a forward of each device: what the plan says of its cells, or the usual number. Devices that have
    slices of a model divide its rows alike, so of theirs it is the least."""
    found = {}
    for device in plan.devices:
        told = [cell.token_budget for cell in plan.cells if device in cell.devices and cell.token_budget]
        found[device] = max(told, default=token_budget(recipe, kind_of(device)))
    for meeting in meetings(sliced_cells(recipe, plan)):
        found |= dict.fromkeys(meeting.devices, min(found[device] for device in meeting.devices))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """What is asked, and what is known of it before."""

    training: tuple[Prompt, ...]
    """Prompts to train on."""
    heldout: tuple[Prompt, ...]
    """Prompts never to train on."""
    values: Mapping[str, float] | None
    """Prompt id -> V*, if the algorithm reads it."""

    @property
    def examples(self) -> tuple[Prompt, ...]:
        """A few prompts to try rewards with; those that have a reference answer first."""
        return tuple(sorted(self.training[:EXAMPLES], key=lambda prompt: prompt.reference is None))


def load_task(recipe: Recipe, root: Path, values: Mapping[str, float] | None) -> PromptTask:
    """The prompts of a recipe."""
    training, heldout = split_task(recipe, load_prompts(recipe.task, root))
    return PromptTask(training=tuple(training), heldout=tuple(heldout), values=values)


def without_long(
    recipe: Recipe, task: PromptTask, tokenizer: PreTrainedTokenizerBase, context: int, note: Note
) -> PromptTask:
    """The task without the prompts that the recipe drops; how many these are is told."""
    training, heldout = (fitting(recipe, each, tokenizer, context) for each in (task.training, task.heldout))
    refuse_none(recipe, training)
    if recipe.evaluate.every and task.heldout:
        refuse_nothing_held_out(recipe, heldout)
    every, left = len(task.training) + len(task.heldout), len(training) + len(heldout)
    if left < every:
        note(f"{every - left} of {every} prompts are too long and are dropped (task.drop_longer_than)")
    return replace(task, training=training, heldout=heldout)


def connect(
    recipe: Recipe,
    task: PromptTask,
    plan: Plan,
    root: Path,
    *,
    environment: Environment,
    renderer: Renderer,
    given: UserFunctions = NONE_GIVEN,
) -> dict[str, Any]:
    """The fields of `Runtime` that need neither a worker nor the processes that judge."""
    folders, values = folders_of(root), task.values
    algorithm = build(recipe.algorithm, folders)
    known = [prompt for prompt in task.training if values is None or prompt.id in values]
    prompts = PromptSource(known, seed=recipe.seed)
    return {
        "recipe": recipe,
        "plan": plan,
        "algorithm": algorithm,
        "whitens": whitens_gradients(recipe, plan, algorithm),
        "environment": environment,
        "addresses": Addresses(vocabulary=len(renderer.tokenizer)),
        "data": training_data(recipe.algorithm.name),
        "prompts": prompts,
        "ahead": BatchBuffer(prompts, keeps=plan.staleness > 0),
        "heldout": task.heldout[: recipe.evaluate.limit],
        "renderer": renderer,
        "lengths": LengthPredictor(longest=recipe.engine.max_new_tokens),
        "values": values or {},
        "kl": KlController(recipe.algorithm, folders) if recipe.algorithm.kl.adaptive else None,
    }


def environment_of(recipe: Recipe, root: Path, given: UserFunctions = NONE_GIVEN) -> Environment:
    """The environment as it runs in this process."""
    section = recipe.environment
    if isinstance(section, OwnEnvironmentSection) and (own := given.environments.get(section.kind)):
        return adapted(own, turns=section.turns)
    return resolve_environment(section, folders_of(root))


async def start_hosts(recipe: Recipe, root: Path) -> EnvironmentHosts | None:
    """The processes of the environment, if it has any, before anything heavy is loaded."""
    section = recipe.environment
    if not isinstance(section, OwnEnvironmentSection) or not section.processes:
        return None
    start = recipe.deadlines.start
    hosts = EnvironmentHosts(
        section.kind, number=section.processes, folders=folders_of(root), start_deadline=start, turns=section.turns
    )
    await hosts.start()
    return hosts


def token_budget(recipe: Recipe, kind: DeviceKind) -> int:
    """Tokens in a micro-batch on a device of this kind."""
    budget = recipe.batch.token_budget
    return kind.micro_batch if budget == "auto" else budget
