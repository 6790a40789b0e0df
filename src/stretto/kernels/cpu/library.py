"""The kernels in C of this folder, as one library for each type of states, made when a process first needs it.

As on a GPU, where kernels are compiled when they are first used. It takes two or three seconds and gcc, whose threads
are those of torch. Without, or where what it made does not give what torch gives, torch's operations compute the same.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from stretto.kernels.cpu.compiler import load
from stretto.kernels.trials import fault_of
from stretto.openmp import is_torchs

SAME = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""By how much kernels may differ from torch in their trial, by type of states."""

PLAIN = (Tensor, nn.Parameter)
"""What lies in memory as it is: no part of a tensor of several devices."""

POINTER, COUNT, REAL = ctypes.c_void_p, ctypes.c_long, ctypes.c_float

Kernel = Callable[..., int | None]
"""Those that can fail give whether they did."""

Made = TypeVar("Made")
Pairs = Iterable[tuple[Tensor, Tensor]]
"""What kernels gave, and what torch gave."""


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for states of this type; none if this machine cannot have them."""
    if dtype not in SAME:
        return None
    found = load(bf16=dtype == torch.bfloat16)
    # Threads of its own would be in the way of torch's.
    return None if isinstance(found, str) or not is_torchs(found) else found


def kernels_in(dtype: torch.dtype, arguments: Mapping[str, tuple[type, ...]]) -> dict[str, Kernel] | None:
    """The kernels of these names, which take these arguments."""
    found = library(dtype)
    if found is None:
        return None
    kernels = {name: getattr(found, name) for name in arguments}
    for name, kernel in kernels.items():
        kernel.argtypes = arguments[name]
    return kernels


def readable(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """True if kernels for this type can read all of these: plain tensors in the memory of this machine."""
    return all(type(each) in PLAIN and each.dtype == dtype and each.device.type == "cpu" for each in tensors)


def confirmed(
    dtype: torch.dtype,
    arguments: Mapping[str, tuple[type, ...]],
    make: Callable[[Mapping[str, Kernel]], Made | None],
    trial: Callable[[Made], Pairs],
) -> Made | None:
    """What is made of the kernels that take these arguments, if its trial confirms it; none if this machine cannot have
    them."""
    found = kernels_in(dtype, arguments)
    made = None if found is None else make(found)
    return made if made is not None and agree(lambda: trial(made), dtype) else None


def agree(trial: Callable[[], Pairs], dtype: torch.dtype) -> bool:
    """Whether what kernels give in a trial, the first of each pair, is what torch gives."""
    with torch.inference_mode(False):
        return fault_of(lambda: max(_difference(*pair) for pair in trial()), SAME[dtype]) is None


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest, as a share of numbers above 1; infinite where one is no number, which no maximum would show."""
    apart = (one.float() - other.float()).abs() / (1 + other.float().abs())
    return float(apart.nan_to_num(nan=math.inf).max())


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers to try kernels with: the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)
