"""What processes that hold parts of one model tell each other in the middle of it, forwards and backwards.

Without gradients, and where a process is alone, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class Ranks:
    """Processes that compute something together, and which of them this one is.

    Those that reach each other in another way than by torch's groups have a kind of their own.
    """

    rank: int = 0
    """This process."""
    size: int = 1
    """How many."""
    group: Any = None
    """Torch's process group; none where a process is alone."""

    def add(self, tensor: Tensor) -> None:
        """Makes a tensor the sum of everybody's."""
        dist.all_reduce(tensor, group=self.group)

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """Everybody's rows, of which all have equally many."""
        found = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(found, rows, group=self.group)
        return found

    def rows_of_each(self, rows: Tensor) -> list[int]:
        """How many rows everybody has."""
        counts = torch.zeros(self.size, dtype=torch.int64, device=rows.device)
        counts[self.rank] = len(rows)
        self.add(counts)
        found: list[int] = counts.tolist()
        return found


ALONE = Ranks()
"""No others."""


def add_up(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Makes a tensor the sum of everybody's."""
    if ranks.size > 1:
        ranks.add(tensor)
    return tensor


def gathered(rows: Tensor, ranks: Ranks, counts: Sequence[int]) -> Tensor:
    """Everybody's rows, of which process i has `counts[i]`, one below the other."""
    own = pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(counts) - len(rows))).contiguous()
    return torch.cat([each[:count] for each, count in zip(ranks.gather(own), counts, strict=True)])


def own_rows(everything: Tensor, ranks: Ranks, counts: Sequence[int]) -> Tensor:
    """This process's rows of everybody's."""
    return everything.split(list(counts))[ranks.rank]


class _Enter(torch.autograd.Function):
    """Forwards as it is, backwards the sum."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return add_up(gradients[0].clone(memory_format=torch.contiguous_format), ctx.ranks), None


class _Leave(torch.autograd.Function):
    """Forwards the sum, backwards as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        return add_up(part.clone(memory_format=torch.contiguous_format), ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherRows(torch.autograd.Function):
    """Forwards everybody's rows; backwards the sum of what everybody says about this process's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, counts: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        return gathered(rows, ranks, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        everything = add_up(gradients[0].clone(memory_format=torch.contiguous_format), ctx.ranks)
        return own_rows(everything, ctx.ranks, ctx.counts), None, None


class _KeepRows(torch.autograd.Function):
    """Forwards this process's rows of the sum; backwards everybody's rows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, counts: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        everything = add_up(part.clone(memory_format=torch.contiguous_format), ranks)
        return own_rows(everything, ranks, counts).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradients[0], ctx.ranks, ctx.counts), None, None


class _WithGradient(torch.autograd.Function):
    """Forwards the first as it is, backwards zeros for the others."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(each) for each in ctx.saved_tensors)


def with_gradient(output: Tensor, others: Sequence[Tensor]) -> Tensor:
    """An output that does not depend on others, and still has their backward take part, in which everybody meets."""
    result: Tensor = _WithGradient.apply(output, *others) if others else output
    return result


def enter(states: Tensor, ranks: Ranks) -> Tensor:
    """States that everybody has, on their way into what is cut."""
    if ranks.size == 1:
        return states
    result: Tensor = _Enter.apply(states, ranks)
    return result


def leave(part: Tensor, ranks: Ranks) -> Tensor:
    """The sum of what everybody has computed a part of."""
    if ranks.size == 1:
        return part
    if not part.requires_grad:
        return add_up(part.contiguous(), ranks)
    result: Tensor = _Leave.apply(part, ranks)
    return result


def rows_of_each(rows: Tensor, ranks: Ranks) -> list[int]:
    """How many rows everybody has."""
    return [len(rows)] if ranks.size == 1 else ranks.rows_of_each(rows)


def gather_rows(rows: Tensor, ranks: Ranks, counts: Sequence[int]) -> Tensor:
    """Everybody's rows."""
    if ranks.size == 1:
        return rows
    result: Tensor = _GatherRows.apply(rows, ranks, counts)
    return result


def keep_rows(part: Tensor, ranks: Ranks, counts: Sequence[int]) -> Tensor:
    """This process's rows of the sum of what everybody has computed a part of."""
    if ranks.size == 1:
        return part
    result: Tensor = _KeepRows.apply(part, ranks, counts)
    return result
