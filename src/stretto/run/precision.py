"""What a run computes in where its recipe leaves that open: bfloat16, unless its device is slow at that.

Many CPUs have no instructions for bfloat16. PyTorch then converts number by number, and a step takes ten times as long
as in float32. Whether that is so is measured, with one small product in both types. What is found is written into the
run's recipe, so that a resume computes as before wherever it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from stretto.config.schema import Recipe
from stretto.placement.choose import uses_gpu
from stretto.run.base import Note

ROWS, WIDTH, TIMES = 256, 576, 5
"""The product that is timed, and how often; the fastest counts. All of it takes a twentieth of a second at most."""

TOO_SLOW = 2.0
"""Times as long as in float32, beyond which halving the memory is not worth it."""


def settled(recipe: Recipe, note: Note = lambda text: None) -> Recipe:
    """The recipe with its dtype, chosen if it was left open; settled again it stays as it is.

    Says so where the device is slow at bfloat16, whether that is avoided or not.
    """
    given, slow = "dtype" in recipe.model.model_fields_set, None
    if recipe.model.dtype == "bfloat16":
        slow = slowness(uses_gpu(recipe.placement, visible=torch.cuda.is_available()))
    if slow and given:
        note(f"model.dtype: bfloat16, as the recipe says; {slow}")
    elif slow:
        note(f"model.dtype: float32, because {slow}")
    dtype = "float32" if slow and not given else recipe.model.dtype
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def slowness(gpu: bool) -> str | None:
    """Why the device had better not compute in bfloat16; none if it may. GPUs elsewhere are taken to be able to."""
    if gpu:
        able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        return None if able else f"{torch.cuda.get_device_name()} has no arithmetic of bfloat16"
    times = times_slower()
    return f"this CPU multiplies float32 {times:.0f} times as fast as bfloat16" if times > TOO_SLOW else None


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
