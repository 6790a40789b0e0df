"""Whether a kernel does on this machine what plain operations do: tried once on small numbers, and said if not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def works(what: str, trial: Callable[[], float], allowed: float) -> bool:
    """Whether a kernel is used, tried now; said if not."""
    fault = fault_of(trial, allowed)
    if fault is not None:
        warnings.warn(f"{what}: computed as it comes, in more kernels: {fault}", stacklevel=3)
    return fault is None


def fault_of(trial: Callable[[], float], allowed: float) -> str | None:
    """Why a kernel is not to be used, or none: `trial` returns the largest relative difference from the plain way.

    A trial, because what a kernel refuses differs between versions, GPUs and types, and a machine may have no compiler.
    """
    # This may run inside a forward whose activations are recomputed: the trial's own must not be.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # compilers recommend shorter formats for fp32
                difference = trial()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers raise anything
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            return (str(root).strip() or type(root).__name__).splitlines()[0]
    return None if difference <= allowed else f"its result is off by {difference:.2g}"


def largest_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest relative difference between what was expected, the first of each pair, and what was found, by norms
    in fp64; infinite where one has no number, which a maximum would pass over."""
    apart = [float((found.double() - expected.double()).norm() / expected.double().norm()) for expected, found in pairs]
    return math.inf if any(map(math.isnan, apart)) else max(apart)
