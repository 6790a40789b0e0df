"""Memory: running out of it, in whatever words torch says it, keeping what the next step needs, and not looking through
all of it again and again."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class OutOfMemory(Exception):
    """The device has no memory left for what was tried."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns every way in which torch reports that memory is out into `OutOfMemory`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            raise OutOfMemory from error
        raise


KEEP = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 64 << 20),
    "M_ARENA_MAX": (-8, 1),
}
"""glibc's parameter -> its number in malloc.h and our value: blocks up to 1 GiB come from a heap that keeps 2 GiB. All
threads share that heap: one of a thread's own holds no block above 64 MiB."""

ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""The last of them for a process that is yet to start, whose threads may have a heap before `keep_memory` is called."""


def keep_memory() -> None:
    """Lets this process keep the memory of large tensors instead of asking the system for it again and again.

    By default glibc hands every block above some megabytes back when it is freed. The next tensor of that size gets new
    pages, which the kernel clears one by one: 700,000 of them in a step of a model of 135M parameters, a fifth of its
    seconds. Where there is no glibc nothing happens. A GPU's memory is kept by torch itself.

    A thread that has allocated before keeps the heap that it has: call this before a thread that is to work starts.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for number, value in KEEP.values():
            mallopt(number, value)


def give_back() -> None:
    """Gives the system back what this process keeps and nothing lies in, such as what loading has left: half a gigabyte
    for a model of 135M parameters from a GGUF file. From step to step it is better kept (`keep_memory`)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_gpu() -> None:
    """Gives other processes on a GPU what torch keeps there and nothing lies in, such as what this one has offloaded:
    they cannot take it otherwise."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def peak_gb() -> float:
    """Most memory used so far, in units of 2^30 bytes: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def recompute_activations(network: Any) -> None:
    """Lets a network make its activations again in the backward instead of keeping them."""
    # Nothing is drawn in a forward, so there is no random state to restore, nor one to ask a recorded step for.
    how = {"use_reentrant": False, "preserve_rng_state": False}
    if hasattr(network, "activation_checkpointing_enable"):  # its name in newer transformers, which warn of the old
        network.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def freeze_loaded() -> None:
    """Keeps Python's cyclic collector away from what is loaded by now; what is made from here on is collected as ever.

    A full collection walks every object that is alive: half a million modules, functions and records once PyTorch and
    transformers are loaded, a quarter of a second, every few steps, in the middle of whatever runs.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def loaded_objects_frozen() -> Iterator[None]:
    """The same, for as long as a run trains. A program that has done so itself is left as it is."""
    if gc.get_freeze_count():
        yield
        return
    freeze_loaded()
    try:
        yield
    finally:
        gc.unfreeze()
