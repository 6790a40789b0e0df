"""The largest row, an update, a publish and a save, once before the first step: what would run out of memory later.

Nothing of it leaves a trace in weights, optimizer or run folder. Where the largest row does not fit, the number of
tokens that does is found: by halving the difference on a device that trains alone, and by doubling in a cell of
several, whose processes wait for each other in vain once one of them has failed. A recipe that leaves its token budget
open goes on with what was found; one that names it is refused, with the number that fits and the part of memory that is
too large. `guards.rehearsal` says whether it is done.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import numpy as np

from stretto.errors import GuardError, RolloutError
from stretto.placement.devices import kind_of
from stretto.placement.plan import Cell
from stretto.runtime.base_copy import Note
from stretto.runtime.runtime import Runtime
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
    length = longest_conversation(parts)
    for cell in (each for each in parts.plan.cells if each.role == "train"):
        budget = parts.budgets[cell.devices[0]]
        wanted = min(max(1, budget // length), parts.recipe.batch.prompts * parts.recipe.batch.samples)
        search = largest_by_doubling if len(cell.devices) > 1 else largest_by_halving
        most = await search(_tried(parts, cell, length), wanted)
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


def longest_conversation(parts: Runtime) -> int:
    """Tokens of the longest conversation that the recipe can train on."""
    recipe = parts.recipe
    if recipe.environment.kind != "single_turn":
        return parts.context
    lengths = parts.renderer.lengths([prompt.messages for prompt in parts.prompts.prompts])
    longest = max((n for n in lengths if not isinstance(n, RolloutError)), default=0)
    return min(parts.context, longest + recipe.engine.max_new_tokens)


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


def _tried(parts: Runtime, cell: Cell, length: int) -> Fits:
    """Trains rows on a cell; each of its devices has one."""

    async def fits(count: int) -> bool:
        samples = made_up(parts, length, count * len(cell.devices))
        return await parts.worker_group.rehearsal.try_row(cell.name, samples, count * length)

    return fits


def made_up(parts: Runtime, length: int, count: int) -> list[Sample]:
    """Conversations of random tokens, which have nothing in common, as long as may be."""
    recipe, noise = parts.recipe, np.random.default_rng(parts.recipe.seed)
    vocabulary, said = parts.addresses.vocabulary, min(recipe.engine.max_new_tokens, length - 1)
    zeros, trained = np.zeros(said), np.arange(length) >= length - said
    needs = parts.algorithm.needs
    return [
        Sample(
            key=("rehearsal", 0, index, 0),
            conversation=Conversation(
                tokens=noise.integers(0, vocabulary, length),
                trained=trained,
                logprobs=np.zeros(length),
                stop="length",
                version=parts.version,
            ),
            advantage=zeros,
            leads=True,
            family_tokens=said,
            reference=zeros if "reference" in needs else None,
            values=zeros if "values" in needs else None,
            returns=zeros if "values" in needs else None,
            old=zeros if recipe.batch.updates > 1 else None,
        )
        for index in range(count)
    ]


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
