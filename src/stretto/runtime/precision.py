"""What a run computes in, and stores a frozen base in, where its recipe leaves that open.

It computes in bfloat16, unless its device is slow at that.

Many CPUs have no instructions for bfloat16. PyTorch then converts number by number, and a step takes ten times as long
as in float32. Whether that is so is measured, with one small product in both types. What is found is written into the
run's recipe, so that a resume computes as before wherever it runs. A model that is known to fit only in bfloat16 is
computed in it, slowly. `model.quantize: auto` keeps as many bits as a step has room for, by the planner's forecast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from stretto.checks.machine.base import MachineCheck
from stretto.checks.machine.devices import model_fits
from stretto.checks.machine.facts import look
from stretto.errors import RecipeError
from stretto.placement.build import hosts_of, uses_gpu
from stretto.planner.base_bits import choices, widest_base
from stretto.planner.remedies import with_values
from stretto.recipe.schema import Placement, Recipe
from stretto.runtime.base_copy import Note
from stretto.runtime.plans import cluster_of_run

ROWS, WIDTH, TIMES = 256, 576, 5
"""The product that is timed, and how often; the fastest counts. All of it takes a small part of a second."""

TOO_SLOW = 2.0
"""Times as long as in float32, beyond which halving the memory is not worth it."""


def resolve_precision(recipe: Recipe, root: Path, note: Note = lambda text: None) -> Recipe:
    """The recipe with a dtype and a storage of its base, chosen if they were left open; chosen again they stay."""
    return resolve_base(resolve_dtype(recipe, root, note), root, note)


def resolve_base(recipe: Recipe, root: Path, note: Note = lambda text: None) -> Recipe:
    """The recipe with a storage of its base. A RecipeError where none has room, or where that cannot be told."""
    if recipe.model.quantize != "auto":
        return recipe
    fix = "name none, int8 or nf4"
    cluster = cluster_of_run(recipe)
    try:
        kind = widest_base(recipe, root, cluster, choices(recipe, nf4=find_spec("bitsandbytes") is not None))
    except RecipeError as error:
        raise RecipeError.of("model.quantize", f"auto cannot tell what fits ({error.reasons})", fix) from error
    if kind is None:
        reason = f"auto finds no storage with which a step has room on {cluster}"
        raise RecipeError.of("model.quantize", reason, f"use a smaller model or other devices; to try it, {fix}")
    why = "a step has room" if kind == "none" else f"with more bits a step has no room on {cluster}"
    note(f"model.quantize: {kind}, because {why}")
    return with_values(recipe, "model", quantize=kind)


def resolve_dtype(recipe: Recipe, root: Path, note: Note = lambda text: None) -> Recipe:
    """The recipe with its dtype, chosen if it was left open; settled again it stays as it is.

    Says so where the device is slow at bfloat16, whether that is avoided or not.
    """
    dtype = recipe.model.dtype
    if dtype == "bfloat16" and (slow := bf16_slowdown(recipe.placement)):
        wide = computing_in(recipe, "float32")
        if "dtype" in recipe.model.model_fields_set:
            note(f"model.dtype: bfloat16, as the recipe says; {slow}")
        elif short := _short_of_memory(wide, recipe, root):
            note(f"model.dtype: bfloat16, although {slow}: in float32 {short}")
        else:
            note(f"model.dtype: float32, because {slow}")
            return wide
    return computing_in(recipe, dtype)


def computing_in(recipe: Recipe, dtype: str) -> Recipe:
    """The recipe as if it named this dtype."""
    return with_values(recipe, "model", dtype=dtype)


def bf16_slowdown(section: Placement) -> str | None:
    """Why its devices had better not compute in bfloat16; none if they may. GPUs elsewhere are taken to be able to."""
    if uses_gpu(section, visible=torch.cuda.is_available()):
        asked = hosts_of(section) == 1 and torch.cuda.is_available()
        able = not asked or torch.cuda.is_bf16_supported(including_emulation=False)
        return None if able else f"{torch.cuda.get_device_name()} has no arithmetic of bfloat16"
    times = times_slower()
    return f"this CPU multiplies float32 {times:.0f} times as fast as bfloat16" if times > TOO_SLOW else None


def _short_of_memory(wide: Recipe, narrow: Recipe, root: Path) -> str | None:
    """Why one recipe does not fit where the other does; none if it does.

    None also where that is not known before loading: with several devices, or a model that is not downloaded yet.
    """
    machine = look() if torch.cuda.is_available() else replace(look(), gpus=())
    large, small = (model_fits(MachineCheck(machine=machine, recipe=each, root=root)) for each in (wide, narrow))
    return large.text if large and small and small.ok and not large.ok else None


@cache
def times_slower() -> float:
    """How many times as long as in float32 this CPU multiplies in bfloat16. Asked once, so that a process agrees."""
    fast, slow = (_seconds(_product(dtype)) for dtype in (torch.float32, torch.bfloat16))
    return slow / fast


def _product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    rows, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
    return lambda: torch.nn.functional.linear(rows, weight)


def _seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return min(once() for _ in range(TIMES))
