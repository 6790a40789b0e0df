"""The largest row, an update, a publish and a save, once before the first step: what would run out of memory later.

Nothing of it leaves a trace in weights, optimizer or run folder. Where the largest row does not fit, the number of
tokens that does is found: by halving the difference on a device that trains alone, and by doubling in a cell of
several, whose processes wait for each other in vain once one of them has failed. A recipe that leaves its token budget
open goes on with what was found; one that names it is refused, with the number that fits and the part of memory that is
too large. Where nobody knows how long conversations become (`rehearsed_rows`), a run goes on and says what may not fit.
`guards.rehearsal` says whether it is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.errors import GuardError
from stretto.placement.devices import kind_of
from stretto.placement.plan import Cell
from stretto.recipe.schema import Recipe
from stretto.runtime.base_copy import Note
from stretto.runtime.rehearsed_rows import LargestRow, Talks, largest_row
from stretto.runtime.runtime import Runtime
from stretto.scheduler.records import UPDATE
from stretto.types import Conversation, Sample

Fits = Callable[[int], Awaitable[bool]]
"""Whether so many conversations in a row can be trained."""


async def rehearse_if_asked(parts: Runtime, note: Note) -> None:
    """Left open, only where running out of memory is certain to be noticed, and a second is little: on GPUs."""
    asked = parts.recipe.guards.rehearsal
    if asked is True or (asked == "auto" and any(kind_of(each).has_own_memory for each in parts.plan.devices)):
        await rehearse(parts, note)


async def rehearse(parts: Runtime, note: Note) -> None:
    """Raises a GuardError with what is too large and what fits, or tells what it took."""
    begun, group, notes = time.monotonic(), parts.worker_group, list[str]()
    row = await largest_row(parts)
    batch = parts.recipe.batch
    for cell in (each for each in parts.plan.cells if each.role in UPDATE):
        budget = parts.budgets[cell.devices[0]]
        asked = max(1, budget // row.tokens)
        wanted = row.wanted(budget, batch.prompts * batch.samples)
        if len(cell.devices) > 1:  # a failure at what may never come could not be told from one that matters
            wanted = min(wanted, asked)
        search = largest_by_doubling if len(cell.devices) > 1 else largest_by_halving
        most = await search(_tried(parts, cell, row), wanted)
        if most < min(wanted, asked):
            told = await _too_large(parts, cell, length=row.tokens, most=most, wanted=wanted)
            if most == 0 or batch.token_budget != "auto":
                raise GuardError(told)
            await group.rehearsal.limit(cell.name, most * row.tokens)
            notes.append(told)
        elif most < wanted:
            notes.append(
                f"memory: conversations of up to {most * row.tokens} tokens fit {', '.join(cell.devices)}; one that "
                "its environment makes longer may end the run"
            )
    await group.rehearsal.update()
    await parts.fetch()
    group.files.forget()
    peaks = await parts.memory()
    measured = ", ".join(f"{device} {peak:.3g} GB" for device, peak in peaks.items())
    note(f"rehearsal: {time.monotonic() - begun:.1f} s, at most {measured}{''.join(f'; {each}' for each in notes)}")


async def largest_by_halving(fits: Fits, wanted: int) -> int:
    """The largest number up to `wanted` that fits; 0 if none does."""
    if await fits(wanted):
        return wanted
    low, high = 0, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await fits(middle) else (low, middle)
    return low


async def largest_by_doubling(fits: Fits, wanted: int) -> int:
    """The largest number that fits of 1, 2, 4 and so on up to `wanted`; nothing is tried after a failure."""
    most, trial = 0, 1
    while most < wanted:
        if not await fits(min(trial, wanted)):
            break
        most, trial = min(trial, wanted), 2 * trial
    return most


def _tried(parts: Runtime, cell: Cell, row: LargestRow) -> Fits:
    """Trains rows on a cell; each of its devices has one."""

    batch = parts.recipe.batch
    answers = batch.prompts * batch.samples // batch.updates_a_step

    async def fits(count: int) -> bool:
        samples = made_up(parts, row.trajectories(count) * cell.row_ranks)
        again = count * cell.row_ranks < answers  # a step has more than one row
        return await parts.worker_group.rehearsal.try_row(cell.name, samples, count * row.tokens, again=again)

    return fits


def made_up(parts: Runtime, trajectories: Sequence[Talks]) -> list[Sample]:
    """Trajectories of random tokens, which have nothing in common."""
    noise = np.random.default_rng(parts.recipe.seed)
    return [
        _sample(parts, trained, noise, key=("rehearsal", 0, index, place))
        for index, talks in enumerate(trajectories)
        for place, trained in enumerate(talks)
    ]


def _sample(
    parts: Runtime, trained: NDArray[np.bool_], noise: np.random.Generator, *, key: tuple[str, int, int, int]
) -> Sample:
    """A conversation with everything that a loss may ask for."""
    recipe, needs, vocabulary = parts.recipe, parts.algorithm.needs, parts.addresses.vocabulary
    zeros, length = np.zeros(int(trained.sum())), len(trained)
    named = min(getattr(recipe.algorithm, "top_k", None) or 0, vocabulary - 1)
    return Sample(
        key=key,
        conversation=Conversation(
            tokens=noise.integers(0, vocabulary, length),
            trained=trained,
            logprobs=np.zeros(length),
            stop="length",
            version=parts.version,
        ),
        advantage=zeros,
        leads=key[3] == 0,
        family_tokens=len(zeros),
        reference=zeros if "reference" in needs else None,
        values=zeros if "values" in needs else None,
        returns=zeros if "values" in needs else None,
        candidates=_candidates(len(zeros), named) if named else None,
        old=zeros if recipe.batch.updates_a_step > 1 else None,
    )


def _candidates(places: int, named: int) -> NDArray[np.float64]:
    """What a teacher might say at each place of so many tokens: that they and the rest are equally likely."""
    return np.tile([*np.full(named + 1, -math.log(named + 1)), *range(named)], (places, 1))


async def _too_large(parts: Runtime, cell: Cell, *, length: int, most: int, wanted: int) -> str:
    """What does not fit, beside what, and what to do."""
    rehearsal, recipe = parts.worker_group.rehearsal, parts.recipe
    held, room = await rehearsal.held(cell.name), await rehearsal.device_gb(cell.name)
    beside = ", ".join(f"{name} {size:.3g} GB" for name, size in held.items())
    row = f"memory: a row of {wanted * length} tokens does not fit {', '.join(cell.devices)} beside {beside}"
    # One device that may recompute has tried that by itself.
    open_ = recipe.optimizer.checkpointing is False or (
        recipe.optimizer.checkpointing == "auto" and len(cell.devices) > 1
    )
    again = ", or optimizer.checkpointing: true" if open_ else ""
    if most:
        return (
            f"{row}; its activations are too large, and {most * length} tokens fit\n"
            f"    fix: batch.token_budget: {most * length}{again}"
        )
    lower = "lower engine.max_new_tokens"
    if getattr(recipe.environment, "turns", None):
        lower += " or environment.turns"
    row = f"{row}, nor does a single conversation of {length}"
    largest = max(held, key=lambda name: held[name])
    if held[largest] < room - sum(held.values()):
        return f"{row}; its activations are too large\n    fix: {lower}{again}, or a smaller model"
    fixes = smaller(largest, recipe, cell.role)
    return f"{row}; of what stays the largest part is {largest}\n    fix: {fixes}; or {lower}"


def smaller(part: str, recipe: Recipe, role: str) -> str:
    """What makes a part of what stays smaller, of what a recipe does not do already."""
    critic = recipe.roles.critic if role == "fit" else None
    adapter, where = (recipe.model.adapter, "model") if critic is None else (critic.adapter, "roles.critic")
    optimizer = recipe.optimizer if critic is None else critic.optimizer
    fixes = []
    if part == "optimizer" and optimizer is not None and optimizer.name != "adamw8bit":
        fixes.append(f"{'' if critic is None else 'roles.critic.'}optimizer.name: adamw8bit")
    if part == "weights" and critic is None and recipe.model.quantize in ("none", "int8", "fp8"):
        fixes.append("model.quantize: nf4" + (" with an adapter" if adapter is None else ""))
    if part != "weights":
        fixes.append(f"{where}.adapter" if adapter is None else f"a lower {where}.adapter.rank")
    return ", or ".join([*fixes, "a smaller model"])
