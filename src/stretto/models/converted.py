"""What becomes of the large tensors that loading makes.

What a model's files have as it is needed is mapped, not read: it takes no memory of the process. Anything else loading
has to make: weights in another type, all experts of a layer in one tensor, a base in few bits. Whoever keeps such
tensors elsewhere (`keeping`) is given each as soon as it is made, so that one of them is in memory at a time and not a
model. Where nobody does, loading is what it is in transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import core_model_loading

Keep = Callable[[Tensor], Tensor]
"""Takes a tensor and returns one with the same bits, which may lie somewhere else."""

Module = TypeVar("Module", bound=nn.Module)

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""With it transformers makes a tensor when it is its turn; its threads would make all of them ahead."""

_keeper: ContextVar[Keep | None] = ContextVar("keeper", default=None)


@contextmanager
def keeping(keep: Keep) -> Iterator[None]:
    """Whatever is loaded in here, `keep` is given, tensor by tensor; one model at a time, as transformers loads."""
    token, stock, before = _keeper.set(keep), core_model_loading.set_param_for_module, os.environ.get(ONE_BY_ONE)
    core_model_loading.set_param_for_module = partial(_set, stock, keep)
    os.environ[ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        _keeper.reset(token)
        core_model_loading.set_param_for_module = stock
        os.environ.pop(ONE_BY_ONE)
        if before is not None:
            os.environ[ONE_BY_ONE] = before


def settle(module: Module, dtype: torch.dtype | None = None) -> Module:
    """Converts the floating-point parameters of a module to `dtype`, one at a time, and hands each to the keeper.

    Buffers keep their type. Rotary frequencies in bf16 have 8 bits: an error of the angle that grows with the position.
    """
    keep = _keeper.get()
    for weight in module.parameters():
        narrow = weight.detach()
        if dtype is not None and narrow.is_floating_point():
            narrow = narrow.to(dtype)
        weight.data = narrow if keep is None else keep(narrow)
    return module


def _set(stock: Callable[..., None], keep: Keep, network: Any, name: str, made: Any, *rest: Any, **more: Any) -> None:
    """What transformers does with a weight that it has read or made."""
    stock(network, name, keep(made) if type(made) is Tensor else made, *rest, **more)
