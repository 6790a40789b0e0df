"""Functions of tensors, recorded when a size is first met and replayed from then on; on a GPU as CUDA graphs.

Who asks says which sizes are alike, and under which stamp (addresses, mostly) a recording still holds. The first answer
is the recording's, too: a run that was resumed meets sizes for the first time that it had recorded before, and no
library promises the last bit to be the same in both ways.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.models.memory import OutOfMemory, memory_errors

MOST_SIZES = 256
"""Sizes that are remembered, those met last: a round meets about a hundred, and each may take megabytes of the GPU."""

ALLOWED = {torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""What the numbers of a replay may differ by from the same function computed, relative to their norm, where products
are made in another order; a recording of the wrong memory is off by about 1."""

EXACT = 1e-3
"""The same for wider types."""

FLIPPED = 0.25
"""How many of the tokens that are drawn may be others, because two were equally likely."""

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
            shared |= {"stream": capture_stream(torch.cuda.current_device()), "pool": torch.cuda.graph_pool_handle()}
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


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The one that captures take place on: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


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
        """What the function gives, replayed; the first time a key is met, it is recorded before."""
        tape, found = self.made.pop(key, None), None
        if tape is not None:
            found = tape(inputs)
        elif self.tape is not None and not self.short:
            tape, found = self._recorded(self.tape, function, inputs)
        self.made[key] = tape
        if len(self.made) > MOST_SIZES:
            del self.made[next(iter(self.made))]
        return function(*inputs) if found is None else found

    def _recorded(
        self, tape: type[Tape], function: Function, inputs: Sequence[Tensor]
    ) -> tuple[Tape | None, Outputs | None]:
        """A new tape and what it gives, which has been compared; none if there is no memory for it, something in the
        function waits for the device, or the numbers are others."""
        try:
            with memory_errors():
                expected = function(*inputs)  # it also prepares what may not begin within a capture
                made = tape(function, inputs, self.shared)
                found = made(inputs)
                wrong = difference(found, expected)
            if not wrong:
                return made, found
            raise RuntimeError(f"what is replayed is not what is computed: {wrong}")
        except OutOfMemory:
            self.short = True
            warnings.warn("too little memory to record decode steps; some rounds are slower", stacklevel=3)
        except RuntimeError as error:
            self.tape = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"decode steps are not recorded, and so slower: {reason}", stacklevel=3)
        self.forget()
        return None, None


def difference(found: Outputs, expected: Outputs) -> str:
    """What of a replay differs by more than rounding explains, or nothing. Where other tokens were drawn, numbers that
    stand beside them are not compared; numbers that are not finite tell nothing."""
    pairs = list(zip(found, expected, strict=True))
    equal = [one == other for one, other in pairs if not one.is_floating_point()]
    for same in equal:
        if (others := 1.0 - float(same.double().mean())) > FLIPPED:
            return f"{others:.0%} of the tokens are others"
    for one, other in pairs:
        if not one.is_floating_point():
            continue
        alike = next((same for same in equal if same.shape == one.shape), torch.ones_like(one, dtype=torch.bool))
        mine, theirs = (torch.where(alike, each, 0).double() for each in (one, other))
        off, size = float((mine - theirs).norm()), float(theirs.norm())
        if math.isfinite(size) and not off <= ALLOWED.get(one.dtype, EXACT) * size:
            return f"numbers differ by {off / size if size else off:.2g}"
    return ""
