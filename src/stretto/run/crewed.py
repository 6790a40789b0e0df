"""The parts of a run on several cells: the scheduler decides, a crew of workers does it.

The loop gets the same records as from one device, and a checkpoint holds the same parts, so a run may go on under
another plan. What is random or counted (prompts, verdicts, credit) happens here, in one place; what takes a model
happens there.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.config.locate import ModelFiles, locate
from stretto.config.schema import Recipe
from stretto.errors import CellLost, CheckpointError, DeadlineError, StrettoError
from stretto.execution.assignment import Assignment
from stretto.execution.crew import Crew
from stretto.execution.lane import SLICE
from stretto.execution.member import Launcher, processes, worker_of
from stretto.execution.patience import Patience
from stretto.placement.choose import OPEN
from stretto.placement.cluster import parse_cluster
from stretto.placement.plan import Plan
from stretto.rollout.collect import Launch, Outside, run_trajectory
from stretto.run.ahead import Waiting
from stretto.run.base import Note, prepare_base
from stretto.run.batch import Batch
from stretto.run.clock import Clock
from stretto.run.hands import Hands
from stretto.run.parts import Parts, connect, load_task, token_budget
from stretto.step.drive import Driver, Notes
from stretto.step.pace import Pace
from stretto.step.state import Step
from stretto.step.work import Launch as Asked
from stretto.step.work import Speeds, Terms
from stretto.train import gguf_reading
from stretto.train.model import describe
from stretto.types import Conversation, Stateful, Trajectory

NAMES = ("trainer", "optimizer", "engine")
"""Parts of a checkpoint that live in the workers."""


@dataclass(slots=True)
class Away:
    """One of them; its state is the one that was fetched last, or waits to be sent."""

    name: str
    """As on one device."""
    held: dict[str, Mapping[str, Any]]
    """States by name, shared by all."""

    def state(self) -> Mapping[str, Any]:
        """As it was fetched."""
        return self.held[self.name]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Kept until it is sent."""
        self.held[self.name] = state


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewParts(Parts):
    """The model in workers."""

    crew: Crew
    """They."""
    budgets: Mapping[str, int]
    """Device -> most tokens in a piece."""
    rooms: Mapping[str, int]
    """Device that generates -> tokens that the cache of its engine holds."""
    pace: Pace
    """How fast the workers are."""
    draft: Path | None
    """Where a worker writes the model before a checkpoint takes it over; none without a run folder."""
    held: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """What was fetched from the workers, or waits to be sent to them."""

    @property
    def version(self) -> int:
        """Of the weights that everybody holds."""
        return self.crew.version

    @property
    def stateful(self) -> tuple[Stateful, ...]:
        """Prompts, lengths, and what the workers hold."""
        return (self.prompts, self.lengths, self.ahead, *(Away(name, self.held) for name in NAMES))

    async def collect(
        self, launches: Sequence[Launch], *, temperature: float, seed: int | None = None
    ) -> list[Trajectory]:
        """On every generate cell, the attempts at a prompt together."""
        lanes = list(self.crew.lanes.values())
        prompts = {key: lanes[index % len(lanes)] for index, key in enumerate(dict.fromkeys(map(_asked, launches)))}
        sampling, deadline = self.sampling(temperature=temperature, seed=seed), self.recipe.deadlines.generate
        found: dict[int, Trajectory] = {}

        async def run(index: int) -> None:
            found[index] = await run_trajectory(
                launches[index],
                model=prompts[_asked(launches[index])],
                environment=self.environment,
                renderer=self.renderer,
                sampling=sampling,
                outside=Outside(self.recipe.environment.deadline, waiting=set()),
            )

        async def missing() -> None:
            """All that are not there yet; those on other cells go on when one dies."""
            runs = [run(index) for index in range(len(launches)) if index not in found]
            errors = [error for error in await asyncio.gather(*runs, return_exceptions=True) if error is not None]
            if errors:
                raise next((error for error in errors if not isinstance(error, CellLost)), errors[0])

        try:
            async with asyncio.timeout(deadline) as limit:
                await self.crew.mend.surviving(missing)
                return [found[index] for index in range(len(launches))]
        except TimeoutError as error:
            if not limit.expired():
                raise
            told = await self.crew.witness("generate")
            raise DeadlineError(
                f"generate: {len(launches)} trajectories were not finished within {deadline:g} s\n{told}"
                "    fix: raise deadlines.generate or lower the batch"
            ) from error

    async def measure(self, role: str, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """On every cell of the role."""
        return await self.crew.mend.surviving(partial(self.crew.score_everywhere, role, conversations))

    async def settle(self) -> None:
        """Every engine."""
        await self.crew.mend.surviving(self.crew.settle)

    async def fetch(self) -> None:
        """State and model of a worker that trains."""
        if self.crew.applying:
            raise CheckpointError("a step's updates were under way, and the workers may hold different weights")
        self.held.update(await self.crew.state())
        if self.draft is not None:
            shutil.rmtree(self.draft, ignore_errors=True)
            await self.crew.save(self.draft, base=self.base)

    async def restored(self) -> None:
        """Sends what was restored to everybody."""
        if self.held:
            await self.crew.restore(dict(self.held))

    async def memory(self) -> dict[str, float]:
        """Of each worker; nothing if one has died, because a run that is over does not fail for it."""
        try:
            return await self.crew.memory()
        except StrettoError:
            return {}

    def write_model(self, folder: Path) -> None:
        """The files that a worker has written."""
        assert self.draft is not None
        shutil.copytree(self.draft, folder, dirs_exist_ok=True)
        shutil.rmtree(self.draft)

    async def close(self) -> None:
        """The workers too."""
        if self.draft is not None:
            shutil.rmtree(self.draft, ignore_errors=True)
        await self.crew.close()
        await Parts.close(self)


def _asked(launch: Launch) -> tuple[str, int]:
    return launch.prompt.id, launch.visit


async def assemble_crew(
    recipe: Recipe,
    *,
    plan: Plan,
    root: Path,
    folder: Path | None,
    note: Note,
    values: Mapping[str, float] | None = None,
    launcher: Launcher | None = None,
    stacks: Path | None = None,
) -> CrewParts:
    """Starts the workers and connects the parts. `folder` is the run's; without a launcher, workers are processes.

    `stacks` is where it is written down who stands where when a deadline passes, by default `folder`.
    """
    begun = time.monotonic()
    task, files = load_task(recipe, root, values), locate(recipe.model.name, root)
    cpu = torch.device("cpu")
    base = prepare_base(recipe, files=files, folder=folder, device=cpu, prompts=task.training, note=note)
    where = files if base is None else ModelFiles(kind="folder", name=recipe.model.name, folder=base, file=None)
    _, tokenizer = describe(where)
    gguf_reading.forget()  # nothing is loaded here
    mates = {device: len(cell.devices) for cell in plan.cells if cell.role == "train" for device in cell.devices}
    budgets = {device: _budget(plan, device, recipe) for device in plan.devices}

    def assign(device: str) -> Assignment:
        return Assignment(
            recipe=recipe,
            root=root,
            base=base,
            device=device,
            roles=frozenset(cell.role for cell in plan.cells if device in cell.devices),
            token_budget=budgets[device],
            threads=1,
            mates=mates.get(device, 1),
            sharers=plan.sharers,
            sleeps=plan.sleeps_on(device),
        )

    left = begun + recipe.deadlines.start - time.monotonic()
    launcher = launcher or processes(plan.devices, seconds=left, make=worker_of, kinds=kinds_of(recipe))
    crew = Crew(plan, launcher, assign, patience=patience_of(recipe), folder=stacks or folder)
    try:
        await crew.start(by=begun + recipe.deadlines.start)
        context, stop = await crew.call(crew.holders[0], "facts", seconds=recipe.deadlines.start)
        generating = [cell.devices[0] for cell in plan.cells if cell.role == "generate"]
        rooms = await crew.all(generating, "room", seconds=recipe.deadlines.start)
    except BaseException:
        await crew.close()
        raise
    return CrewParts(
        **connect(recipe, task, plan, root, tokenizer=tokenizer, stop=stop),
        base=base,
        context=context,
        crew=crew,
        budgets=budgets,
        rooms=dict(zip(generating, rooms, strict=True)),
        pace=Pace(round_seconds=SLICE),
        draft=folder / ".model.draft" if folder and mates else None,  # who only asks must not touch that of a run
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
    return max(told, default=token_budget(recipe, "cpu" if "/cpu:" in device else "cuda"))


def patience_of(recipe: Recipe) -> Patience:
    """How long calls of workers may take."""
    given = recipe.deadlines
    return Patience(start=given.start, generate=given.generate, train=given.train, publish=given.publish)


def slots_of(tokens: int, drawn: Sequence[Asked], *, longest: int) -> int:
    """Trajectories that a cache of so many tokens is sure to hold at once: a group's prompt stands there once.

    What a cell is given beyond that would wait in its engine, where no cell that is done sooner could take it over.
    """
    most = max((asked.prompt_tokens / asked.samples for asked in drawn), default=0.0)
    return max(1, int(tokens / (longest + most)))


def terms_of(parts: CrewParts, speeds: Speeds, drawn: Sequence[Asked]) -> Terms:
    """What holds for a step that begins with these prompts."""
    recipe, algorithm, cells = parts.recipe, parts.algorithm, parts.plan.cells
    divides = recipe.batch.updates > 1
    roles = [cell.role for cell in cells if cell.role != "generate"]
    stages = dict.fromkeys([*roles, "old"] if divides else roles)
    return Terms(
        groups=recipe.batch.prompts,
        drops=algorithm.drops,
        barrier=algorithm.scope == "batch",
        stages=tuple(stages),
        slots={
            cell.name: slots_of(parts.rooms[cell.devices[0]], drawn, longest=recipe.engine.max_new_tokens)
            for cell in cells
            if cell.role == "generate"
        },
        # The devices of a cell share the rows of a piece.
        budgets={
            cell.name: (cell.token_budget or parts.budgets[cell.devices[0]]) * len(cell.devices)
            for cell in cells
            if cell.role != "generate"
        },
        longest=recipe.engine.max_new_tokens,
        divides=divides,
        speeds=speeds,
    )


async def take_step(
    parts: CrewParts, clock: Clock, *, step: int, noted: Callable[[Notes], object] | None = None
) -> tuple[Batch, list[dict[str, float]]]:
    """One step: what it learned from, and the numbers of its updates. `noted` is given what the scheduler was told.

    Where samplers may lag behind, a step trains on what the one before has made, and makes what the next one trains
    on. The first fills the pipe before, and the last makes nothing.
    """
    lags, ends, waiting = parts.plan.staleness > 0, step == parts.recipe.run.steps, parts.ahead.waiting
    if lags and waiting is None:
        cursor = parts.prompts.state()
        _, filled = await turn(parts, clock, step=step)
        waiting = Waiting(batch=filled, cursor=cursor)
    cursor = parts.prompts.state()
    carried = waiting.batch if waiting else None
    hands, made = await turn(parts, clock, step=step, carried=carried, launches=not (lags and ends), noted=noted)
    parts.ahead.waiting = Waiting(batch=made, cursor=cursor) if lags and not ends else None
    parts.crew.applying = False
    return hands.learned(made), hands.reports


async def turn(
    parts: CrewParts,
    clock: Clock,
    *,
    step: int,
    carried: Batch | None = None,
    launches: bool = True,
    noted: Callable[[Notes], object] | None = None,
) -> tuple[Hands, Batch]:
    """What the scheduler calls a step, from the first launch to the update; returns what it made, too."""
    batch = parts.recipe.batch
    hands = Hands(parts, parts.crew, parts.lengths, pace=parts.pace, clock=clock, step=step, carried=carried)
    drawn = hands.draw(math.ceil(batch.prompts * batch.oversample)) if launches else []
    terms = terms_of(parts, parts.pace.speeds(), drawn)
    if parts.plan.staleness and carried:  # what fills the pipe is trained on by the weights that sampled it
        terms = replace(terms, stages=(*terms.stages, "old"))
    state = Step(parts.plan, terms, spread=parts.lengths.spread)
    await parts.crew.mend.surviving(parts.crew.begin)
    notes = await Driver(state, hands, now=time.monotonic).run(drawn, hands.carry())
    if noted is not None:
        noted(notes)
    await parts.settle()
    parts.lengths.stepped()
    parts.pace.stepped()
    return hands, hands.made(state.accepted)
