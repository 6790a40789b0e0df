"""The largest row, an update, a publish and a save, once before the first step: what would run out of memory later.

Nothing of it leaves a trace in weights, optimizer or run folder. Where the largest row does not fit, the number of
tokens that does is found: by halving the difference on a device that trains alone, and by doubling in a cell of
several, whose processes wait for each other in vain once one of them has failed. A recipe that leaves its token budget
open goes on with what was found; one that names it is refused, with the number that fits and the part of memory that is
too large. `guards.rehearsal` says whether it is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.environments.rows import row_tokens
from stretto.errors import GuardError, RolloutError
from stretto.placement.devices import kind_of
from stretto.placement.plan import Cell
from stretto.runtime.base_copy import Note
from stretto.runtime.runtime import Runtime
from stretto.runtime.training_data import TrainingData
from stretto.scheduler.records import UPDATE
from stretto.tasks.examples import chats_of
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
    begun, group, found = time.monotonic(), parts.worker_group, ""
    talks = await largest_trajectory(parts)
    length = sum(map(len, talks))
    for cell in (each for each in parts.plan.cells if each.role in UPDATE):
        budget = parts.budgets[cell.devices[0]]
        wanted = min(max(1, budget // length), parts.recipe.batch.prompts * parts.recipe.batch.samples)
        search = largest_by_doubling if len(cell.devices) > 1 else largest_by_halving
        most = await search(_tried(parts, cell, talks), wanted)
        if most < wanted:
            told = _too_large(cell, await group.rehearsal.held(cell.name), length=length, most=most, wanted=wanted)
            if most == 0 or parts.recipe.batch.token_budget != "auto":
                raise GuardError(told)
            await group.rehearsal.limit(cell.name, most * length)
            found = f"; {told}"
    await group.rehearsal.update()
    await parts.fetch()
    group.files.forget()
    peaks = await parts.memory()
    measured = ", ".join(f"{device} {peak:.3g} GB" for device, peak in peaks.items())
    note(f"rehearsal: {time.monotonic() - begun:.1f} s, at most {measured}{found}")


Talks = Sequence[NDArray[np.bool_]]
"""Of each conversation of a trajectory that must lie in one row: which of its tokens are trained."""


async def largest_trajectory(parts: Runtime) -> Talks:
    """The longest that the recipe can train on."""
    recipe, context = parts.recipe, parts.context
    longest, said = context, recipe.engine.max_new_tokens
    if recipe.environment.kind != "single_turn":
        said = said if parts.data is None else context
    elif parts.data is not None:
        return await _longest_row(parts, parts.data)
    else:
        lengths = parts.renderer.lengths([prompt.messages for prompt in parts.prompts.prompts])
        longest = min(context, said + max((n for n in lengths if not isinstance(n, RolloutError)), default=0))
    return [np.arange(longest) >= max(1, longest - said)]


async def _longest_row(parts: Runtime, data: TrainingData) -> Talks:
    """That of the rows of the task."""
    prompts = parts.prompts.prompts
    lengths = list(row_tokens(parts.renderer, [chats_of(prompt) for prompt in prompts], most=0))
    told = [0 if isinstance(length, RolloutError) else length for length in lengths]
    talks = [talk.trained for talk in await data.conversations(parts, prompts[int(np.argmax(told))])]
    return talks if parts.algorithm.whole else [max(talks, key=len)]


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


def _tried(parts: Runtime, cell: Cell, talks: Talks) -> Fits:
    """Trains rows on a cell; each of its devices has one."""

    async def fits(count: int) -> bool:
        samples = made_up(parts, talks, count * cell.row_ranks)
        return await parts.worker_group.rehearsal.try_row(cell.name, samples, count * sum(map(len, talks)))

    return fits


def made_up(parts: Runtime, talks: Talks, count: int) -> list[Sample]:
    """So many trajectories of random tokens, which have nothing in common, as long as may be."""
    noise = np.random.default_rng(parts.recipe.seed)
    return [
        _sample(parts, trained, noise, key=("rehearsal", 0, index, place))
        for index in range(count)
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


def _too_large(cell: Cell, held: dict[str, float], *, length: int, most: int, wanted: int) -> str:
    """What does not fit, beside what, and what to do."""
    beside = ", ".join(f"{name} {size:.3g} GB" for name, size in held.items())
    row = f"memory: a row of {wanted * length} tokens does not fit {', '.join(cell.devices)} beside {beside}"
    if most:
        return (
            f"{row}; its activations are too large, and {most * length} tokens fit\n"
            f"    fix: batch.token_budget: {most * length}, or optimizer.checkpointing: true"
        )
    largest = max(held, key=lambda name: held[name])
    lower = {"weights": "model.quantize: nf4 with an adapter, or a smaller model", "gradients": "model.adapter"}
    lower["optimizer"] = "optimizer.name: adamw8bit, or model.adapter"
    return (
        f"{row}, nor does a single conversation of {length}; of what stays the largest part is {largest}\n"
        f"    fix: {lower[largest]}; or lower engine.max_new_tokens"
    )
