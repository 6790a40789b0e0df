"""What is measured on several cells: plans in turn, one plan alone, one cell beside two, and whether all agree.

Plans take turns step by step on the same workers, so that a slow moment of the machine meets all of them. Only memory
and starting are measured with workers that serve one plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto import __version__, threads
from stretto.bench.cluster_steps import DEVICES, ClusterStep, Launch, SharedLauncher, SharedWorkers, launched, said_in
from stretto.bench.forced_lengths import Said, told
from stretto.bench.jobs import Job, JobResult
from stretto.bench.ours import RATE
from stretto.bench.prepare import PreparedPrompt, read_prompts

MOVING = 1e-3
"""Learning rate where weights must move before gradients are compared: a fresh adapter equals the reference."""

Taken = TypeVar("Taken")


def in_turn(job: Job, *, launch: Launch = launched) -> JobResult:
    """Steps of every plan in turn, over the same prompts; the first round does not count."""
    rounds = read_prompts(job)

    async def steps(worker_groups: SharedWorkers) -> dict[str, list[ClusterStep]]:
        taken: dict[str, list[ClusterStep]] = {name: [] for name in job.plans}
        for number, asked in enumerate(rounds):
            for name in turned(job.plans, number):
                await worker_groups.ready(name, asked, {})
                taken[name].append(await worker_groups.step(name))
        return taken

    taken, _ = threads.run(together(job, steps, launch))
    return times(job, {name: all_of[1:] for name, all_of in taken.items()})


def cells_in_turn(job: Job, *, launch: Launch = launched) -> JobResult:
    """A step of one cell, of two apart, and of two together: with as much work for each (weak) and in all (strong)."""
    rounds = read_prompts(job)
    pairs = list(zip(rounds[::2], rounds[1::2], strict=True))
    several = [name for name in job.plans if name not in ("one", "other")]
    kinds = ["one", "apart", *(f"{name} {kind}" for name in several for kind in ("weak", "strong"))]

    async def step(
        worker_groups: SharedWorkers, kind: str, mine: Sequence[PreparedPrompt], theirs: Sequence[PreparedPrompt]
    ) -> ClusterStep:
        if kind == "apart":
            await worker_groups.ready("one", mine, {})
            await worker_groups.ready("other", theirs, {})
            one, other = await asyncio.gather(worker_groups.step("one"), worker_groups.step("other"))
            return replace(one, seconds=(one.seconds + other.seconds) / 2)
        name, _, size = kind.partition(" ")
        await worker_groups.ready(name, [*mine, *theirs] if size == "weak" else mine, {})
        return await worker_groups.step(name)

    async def steps(worker_groups: SharedWorkers) -> dict[str, list[ClusterStep]]:
        taken: dict[str, list[ClusterStep]] = {kind: [] for kind in kinds}
        for number, (mine, theirs) in enumerate(pairs):
            for kind in turned(kinds, number):
                taken[kind].append(await step(worker_groups, kind, mine, theirs))
        return taken

    taken, _ = threads.run(together(job, steps, launch))
    return times(job, {kind: all_of[1:] for kind, all_of in taken.items()})


def turned(names: Sequence[str], number: int) -> list[str]:
    """The names from another one on each time, so that none always comes first."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def times(job: Job, taken: Mapping[str, Sequence[ClusterStep]]) -> JobResult:
    """What the steps of each plan took."""
    first = next(iter(taken.values()))
    return JobResult(
        name=f"stretto {__version__}",
        seconds=tuple(did.seconds for did in first),
        generated=sum(each.conversations[0].sampled for each in first[0].trajectories),
        facts={
            "plans": {
                name: {
                    "seconds": [did.seconds for did in all_of],
                    "idle": [did.idle for did in all_of],
                    "tail": [did.tail for did in all_of],
                    "stages": [dict(did.stages) for did in all_of],
                }
                for name, all_of in taken.items()
            }
        },
    )


async def together(
    job: Job, work: Callable[[SharedWorkers], Awaitable[Taken]], launch: Launch, *, rate: float = RATE
) -> tuple[Taken, dict[str, float]]:
    """What some work came to with workers that all plans share, and what starting each plan's workers took."""
    shared = SharedLauncher(launch(DEVICES))
    worker_groups = SharedWorkers(job, shared, rate=rate)
    try:
        await worker_groups.assemble(job.plans)
        return await work(worker_groups), worker_groups.started
    finally:
        await worker_groups.close()
        await shared.end()


def alone(job: Job, *, launch: Launch = launched) -> JobResult:
    """One plan with workers of its own: what starting them takes, and what they come to need in two steps."""
    (name,) = job.plans
    rounds = read_prompts(job)[:2]

    async def steps() -> tuple[list[ClusterStep], dict[str, Any]]:
        worker_groups = SharedWorkers(job, launch(DEVICES))
        try:
            await worker_groups.assemble([name])
            taken = []
            for asked in rounds:
                await worker_groups.ready(name, asked, {})
                taken.append(await worker_groups.step(name))
            worker_group = worker_groups.parts[name].worker_group
            gained = {device: await told(worker_group.worker(device, 60)).gained() for device in worker_group.members}
            facts = {"started": worker_groups.started[name], "memory": gained, "expected": worker_groups.expected(name)}
            return taken, facts
        finally:
            await worker_groups.close()

    taken, facts = threads.run(steps())
    return JobResult(name=name, seconds=tuple(did.seconds for did in taken[1:]), facts=facts)


def agree(job: Job, *, launch: Launch = launched) -> JobResult:
    """Do plans come to the same? Each takes `steps` steps from the same weights, then one over answers of the first."""
    rounds = read_prompts(job)
    start, asked = rounds[0], rounds[1:]

    async def work(worker_groups: SharedWorkers) -> dict[str, Any]:
        base = job.plans[0]
        await worker_groups.ready(base, start, {})
        await worker_groups.step(base)  # a fresh adapter equals the reference; from here on it does not
        await worker_groups.parts[base].worker_group.save(worker_groups.start)
        fresh: dict[str, list[ClusterStep]] = {}
        for name in job.plans:
            await worker_groups.ready(name, asked[0], {})
            fresh[name] = [await worker_groups.step(name)]
            for later in asked[1 : job.steps]:
                await worker_groups.about(name, later, {})
                fresh[name].append(await worker_groups.step(name))
        said = said_in(fresh[base][0], asked[0])
        # No more than two at a time: of four models each is a gigabyte and more.
        first: NDArray[np.floating[Any]] = np.zeros(0)
        apart: dict[str, float] = {}
        for name in job.plans:
            await worker_groups.ready(name, asked[0], said, shows=True)
            await worker_groups.step(name)
            gradient = await worker_groups.gradient(name)
            if name == base:
                first = gradient
            else:
                apart[f"{base}, {name}"] = difference(first, gradient)
        drawn = {name: said_in(taken[0], asked[0]) for name, taken in fresh.items()}
        return {
            "differences": apart,
            "answers": len(said),
            "other_answers": {name: sum(others(said, mine)) for name, mine in drawn.items()},
            "rewards": {name: [did.reward for did in taken] for name, taken in fresh.items()},
        }

    facts, _ = threads.run(together(job, work, launch, rate=MOVING))
    return JobResult(name=f"stretto {__version__}", facts=facts)


def others(said: Mapping[int, Said], mine: Mapping[int, Said]) -> list[bool]:
    """Where the tokens of answers differ."""
    return [not np.array_equal(said[key][0], mine[key][0]) for key in said]


def difference(one: NDArray[np.floating[Any]], other: NDArray[np.floating[Any]]) -> float:
    """The largest difference of two gradients, relative to the largest number of the first."""
    return float(np.abs(one - other).max() / np.abs(one).max())
