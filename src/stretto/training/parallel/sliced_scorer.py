"""A frozen model in slices: a reward model, a critic or a teacher that the processes of a cell hold and ask together.

Its numbers are those of one process. Each process computes some of the rows, for which layer after layer is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from torch import nn
from transformers import PreTrainedModel

from stretto.training.parallel.fsdp import SlicedModel
from stretto.training.parallel.mesh import CellMesh
from stretto.training.rows import Numbers
from stretto.types import Conversation, Sample

T = TypeVar("T")


class FrozenModel(Protocol):
    """What can be cut: a `FrozenScorer` or a `Teacher`."""

    token_budget: int

    @property
    def decoder(self) -> PreTrainedModel:
        """What has its layers."""
        ...

    def modules(self) -> list[nn.Module]:
        """What it computes with."""
        ...

    def numbers(self, row: Sequence[Sample]) -> list[Numbers]:
        """What it says of a row's conversations."""
        ...


class GatheredCall(nn.Module):
    """Whatever is computed with some modules as the forward of one: what is gathered stays until its end."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, compute: Callable[[], T]) -> T:
        """What it comes to."""
        return compute()


class SlicedScorer(SlicedModel):
    """Such a model, which answers as the whole one does."""

    def __init__(self, model: FrozenModel, mesh: CellMesh) -> None:
        """Takes a frozen model that every process has loaded alike; what it had in full is freed."""
        self.model = model
        super().__init__(GatheredCall(model.modules()), model.decoder, mesh)

    def score(self, conversations: Sequence[Conversation]) -> list[Numbers]:
        """Its numbers for each conversation; all processes of the cell ask together."""
        return self.ask(conversations, budget=self.model.token_budget, numbers=self._numbers)

    def _numbers(self, row: Sequence[Sample]) -> list[Numbers]:
        told: list[Numbers] = self.rows(partial(self.model.numbers, row))
        return told
