"""Functions of tensors, recorded when a size is met again and replayed from then on; on a GPU as CUDA graphs.

Who asks says which sizes are alike, and under which stamp (addresses, mostly) a recording still holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.models.memory import OutOfMemory, memory_errors

MOST_SIZES = 256
"""Sizes that are remembered, those met last: a round meets about a hundred, and each may take megabytes of the GPU."""

Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]


class Tape(Protocol):
    """Something that was recorded: a function of tensors, with everything else in it as it was then."""

    def __init__(self, function: Function, inputs: Sequence[Tensor], shared: dict[str, Any]) -> None:
        """Records; `shared` is what all tapes of a set have in common, theirs to fill."""

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """What the function gives for tensors of the same sizes; the caller's own."""
        ...


class Graph:
    """A CUDA graph."""

    def __init__(self, function: Function, inputs: Sequence[Tensor], shared: dict[str, Any]) -> None:
        if not shared:
            # One pool for all: no two replay at the same time, and what one leaves behind is copied before the next.
            shared |= {"stream": torch.cuda.Stream(), "pool": torch.cuda.graph_pool_handle()}
        self.inputs = [tensor.clone() for tensor in inputs]
        self.graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads (a watchdog, a tokenizer) may use the device meanwhile.
            with torch.cuda.graph(self.graph, **shared, capture_error_mode="thread_local"):
                self.outputs = function(*self.inputs)
        except RuntimeError as error:
            # Where the end of a failed capture fails too, torch leaves its own stream current, and hides the reason.
            torch.cuda.set_stream(before)
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Copies in, replays, copies out."""
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


class Recordings:
    """Tapes by size."""

    def __init__(self, tape: type[Tape] | None) -> None:
        self.tape = tape
        self.made: dict[Hashable, Tape | None] = {}  # those that were met last come last
        self.shared: dict[str, Any] = {}
        self.stamp: Hashable = None
        self.short = False

    def valid_for(self, stamp: Hashable) -> None:
        """Forgets everything if it was recorded under another stamp."""
        if stamp != self.stamp:
            self.forget()
            self.stamp = stamp

    def forget(self) -> None:
        """Forgets everything."""
        self.made.clear()
        self.shared.clear()

    def rest(self) -> None:
        """A round is over: what was too large to be recorded in it may find memory in the next."""
        self.short = False

    def run(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> Outputs:
        """What the function gives, computed or replayed; the second time a key is met, it is recorded first."""
        met, tape = key in self.made, self.made.pop(key, None)
        if met and tape is None and self.tape is not None and not self.short:
            tape = self._recorded(self.tape, function, inputs)
        self.made[key] = tape
        if len(self.made) > MOST_SIZES:
            del self.made[next(iter(self.made))]
        return function(*inputs) if tape is None else tape(inputs)

    def _recorded(self, tape: type[Tape], function: Function, inputs: Sequence[Tensor]) -> Tape | None:
        """A new tape; none if there is no memory for it, or something in the function waits for the device."""
        try:
            with memory_errors():
                return tape(function, inputs, self.shared)
        except OutOfMemory:
            self.short = True
            warnings.warn("too little memory to record decode steps; some rounds are slower", stacklevel=3)
        except RuntimeError as error:
            self.tape = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"decode steps are not recorded, and so slower: {reason}", stacklevel=3)
        self.forget()
        return None
