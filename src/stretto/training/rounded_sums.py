"""Gradients added up over devices in bfloat16: half the bytes of float32, for links slower than the arithmetic.

Each device rounds what it has accumulated and sends a part of it to every other, adds up the part that is its own in
the wide type, rounds that, and sends it to all. What the two roundings take it keeps for the next update (error
feedback; Seide et al. 2014, Karimireddy et al. 2019): over some updates only the last errors are left. Everybody gets
the same bits. Off unless a recipe asks (`optimizer.reduce`), because a plain sum is exact. What is kept is not part of
a checkpoint: a resume, and a process that replaces another, begin without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad


class Exchange(Protocol):
    """Those who add up."""

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def exchange(self, rows: Tensor) -> Tensor:
        """Row i is what member i has sent to this one; row i of `rows` goes to member i."""
        ...


class Rounded(NamedTuple):
    """What rounding took of one tensor."""

    own: Tensor
    """Of what this device has accumulated."""
    part: Tensor
    """Of the sum of the part that it adds up."""


class RoundedSums:
    """One device's end."""

    def __init__(self, *, feedback: bool = True) -> None:
        """Without `feedback` what rounding takes is lost."""
        self.feedback = feedback
        # Tensor by tensor, in the order in which they are added up: of the last update, and of the one under way.
        self.left: list[Rounded] = []
        self.next: list[Rounded] = []

    def over(self, group: Exchange) -> Callable[[Tensor], None]:
        """Adds up the tensors of one update, always the same ones in the same order; they may be asked for again, as
        nothing is kept until the update is made."""
        self.next, places = [], itertools.count()

        def add(tensor: Tensor) -> None:
            place = next(places)
            left = self.left[place] if place < len(self.left) else None
            tensor.copy_(self._sum(tensor if left is None else tensor + left.own, left, group).view_as(tensor))

        return add

    def updated(self, applied: bool) -> None:
        """The update was made, or skipped, and its gradients with it."""
        if applied:
            self.left = self.next
        self.next = []

    def _sum(self, tensor: Tensor, left: Rounded | None, group: Exchange) -> Tensor:
        """The rounded sum of everybody's tensor, flat."""
        narrow = tensor.to(torch.bfloat16)
        rows = pad(narrow.flatten(), (0, -tensor.numel() % group.size)).view(group.size, -1)
        part = exchanged(rows, group).to(tensor.dtype).sum(0)
        if left is not None:
            part += left.part
        short = part.to(torch.bfloat16)
        if self.feedback:
            self.next.append(Rounded(tensor - narrow, part - short))
        return exchanged(short.expand_as(rows), group).flatten()[: tensor.numel()]


def exchanged(rows: Tensor, group: Exchange) -> Tensor:
    """As bytes: not everything that carries tensors knows the type."""
    return group.exchange(rows.contiguous().view(torch.uint8)).view(rows.dtype)
