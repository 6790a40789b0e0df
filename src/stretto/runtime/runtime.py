"""The parts of a run on several cells: the scheduler decides, a crew of workers does it.

The loop gets the same records as from one device, and a checkpoint holds the same parts, so a run may go on under
another plan. What is random or counted (prompts, verdicts, credit) happens here, in one place; what takes a model
happens there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stretto.engines.queue import SLICE
from stretto.environments.hosts import EnvironmentHosts
from stretto.errors import CheckpointError, StrettoError
from stretto.models.source import locate
from stretto.placement.build import OPEN
from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import kind_of
from stretto.placement.plan import Plan
from stretto.plugins import folders_of
from stretto.recipe.schema import Recipe
from stretto.runtime.base_copy import Note, prepare_base
from stretto.runtime.parts import RuntimeBase, connect, load_task, start_hosts, token_budget
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.scheduler.speed_estimator import SpeedEstimator
from stretto.storage.manifest import STATE
from stretto.types import Stateful
from stretto.workers.deadlines import CallDeadlines
from stretto.workers.launchers.inprocess import Launcher, ThreadLauncher, processes, worker_of
from stretto.workers.models import EngineFactory
from stretto.workers.worker_group import WorkerGroup
from stretto.workers.worker_spec import WorkerSpec, torch_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime(RuntimeBase):
    """The model in workers."""

    crew: WorkerGroup
    """They."""
    budgets: Mapping[str, int]
    """Device -> most tokens in a piece."""
    rooms: Mapping[str, int]
    """Device that generates -> tokens that the cache of its engine holds."""
    pace: SpeedEstimator
    """How fast the workers are."""

    @property
    def version(self) -> int:
        """Of the weights that everybody holds."""
        return self.crew.version

    @property
    def stateful(self) -> tuple[Stateful, ...]:
        """Prompts and lengths; what the workers hold is written and read by them."""
        return (self.prompts, self.lengths, self.ahead)

    async def fetch(self) -> None:
        """State and model of a worker that trains."""
        if self.crew.applying:
            raise CheckpointError("a step's updates were under way, and the workers may hold different weights")
        if draft := self.crew.files.draft:
            await self.crew.files.save(draft, base=self.base)

    async def restored(self, checkpoint: Path | None = None) -> None:
        """Everybody reads what a checkpoint holds of theirs."""
        if checkpoint is not None:
            await self.crew.restore(checkpoint / STATE)

    async def memory(self) -> dict[str, float]:
        """Of each worker; nothing if one has died, because a run that is over does not fail for it."""
        try:
            return await self.crew.memory()
        except StrettoError:
            return {}

    def write_model(self, folder: Path) -> None:
        """The files that workers have written, those of their state among them."""
        draft = self.crew.files.draft
        assert draft is not None
        for path in draft.iterdir():
            shutil.move(path, folder / path.name)
        draft.rmdir()

    async def close(self) -> None:
        """The workers too."""
        self.crew.files.forget()
        await self.crew.close()
        await RuntimeBase.close(self)


async def assemble_crew(
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
) -> Runtime:
    """Starts the workers and connects the parts. `folder` is the run's. Without a launcher, one device is served by a
    thread of this process, with `make_engine`'s engine if there is one, and several by processes of their own.

    `stacks` is where it is written down who stands where when a deadline passes, by default `folder`.
    """
    hosts = None if recipe.environment.kind in given.environments else await start_hosts(recipe, root)
    try:
        return await _assemble(
            recipe, plan, root, folder, note, values, launcher, make_engine, given,
            stacks=stacks or folder, hosts=hosts,
        )  # fmt: skip
    except BaseException:
        if hosts is not None:
            await hosts.close()
        raise


async def _assemble(
    recipe: Recipe,
    plan: Plan,
    root: Path,
    folder: Path | None,
    note: Note,
    values: Mapping[str, float] | None,
    launcher: Launcher | None,
    make_engine: EngineFactory | None,
    given: UserFunctions,
    *,
    stacks: Path | None,
    hosts: EnvironmentHosts | None,
) -> Runtime:
    begun = time.monotonic()
    task, files = load_task(recipe, root, values), locate(recipe.model.name, root)
    lone, plan_trains = len(plan.devices) == 1, any(cell.role == "train" for cell in plan.cells)
    device = torch_device(plan.devices[0]) if lone else torch.device("cpu")
    base = prepare_base(recipe, files=files, folder=folder, device=device, prompts=task.training, note=note)
    budgets = {device: _budget(plan, device, recipe) for device in plan.devices}
    assign = partial(_assignment, recipe, plan, root=root, base=base, budgets=budgets)
    left = begun + recipe.deadlines.start - time.monotonic()
    if launcher is None and lone:
        launcher = ThreadLauncher(partial(worker_of, make_engine=make_engine))
    launcher = launcher or processes(plan.devices, seconds=left, make=worker_of, kinds=kinds_of(recipe))
    # Who only asks must not touch the draft of a run.
    draft = folder / ".model.draft" if folder and plan_trains else None
    crew = WorkerGroup(plan, launcher, assign, patience=patience_of(recipe), folder=stacks, draft=draft)
    try:
        await crew.start(by=begun + recipe.deadlines.start)
        tokenizer, context, stop = await crew.worker(crew.holders[0], recipe.deadlines.start).facts()
        generating = [cell.devices[0] for cell in plan.cells if cell.role == "generate"]
        rooms = await crew.all(generating, lambda each: each.room(), seconds=recipe.deadlines.start)
    except BaseException:
        await crew.close()
        raise
    return Runtime(
        **connect(recipe, task, plan, root, tokenizer=tokenizer, stop=stop, given=given, hosts=hosts),
        base=base,
        context=context,
        crew=crew,
        budgets=budgets,
        rooms=dict(zip(generating, rooms, strict=True)),
        pace=SpeedEstimator(round_seconds=SLICE),
    )


def _assignment(
    recipe: Recipe, plan: Plan, device: str, *, root: Path, base: Path | None, budgets: Mapping[str, int]
) -> WorkerSpec:
    """What the worker of a device is told to be. Several on one host have a thread each; one has them all."""
    mine = [cell for cell in plan.cells if device in cell.devices]
    return WorkerSpec(
        recipe=recipe,
        root=root,
        folders=folders_of(root),
        base=base,
        device=device,
        roles=frozenset(cell.role for cell in mine),
        token_budget=budgets[device],
        threads=None if len(plan.devices) == 1 else 1,
        mates=max((len(cell.devices) for cell in mine if cell.role == "train"), default=1),
        sharers=plan.sharers,
        sleeps=plan.sleeps_on(device),
    )


def kinds_of(recipe: Recipe) -> dict[str, str]:
    """What the recipe's cluster calls each device; nothing where it leaves that to this host."""
    told = recipe.placement.cluster
    if told in OPEN:
        return {}
    return {name: device.name for name, device in parse_cluster(told).devices.items()}


def _budget(plan: Plan, device: str, recipe: Recipe) -> int:
    """Most tokens in a forward of a device: what the plan says of its cells, or the usual number."""
    told = [cell.token_budget for cell in plan.cells if device in cell.devices and cell.token_budget]
    return max(told, default=token_budget(recipe, kind_of(device)))


def patience_of(recipe: Recipe) -> CallDeadlines:
    """How long calls of workers may take."""
    given = recipe.deadlines
    return CallDeadlines(start=given.start, generate=given.generate, train=given.train, publish=given.publish)
