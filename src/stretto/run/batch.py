"""What a step learns from, as the loop and its reports see it, wherever and whenever it was sampled."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.rewards.score import Scored
from stretto.types import Group, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step learns from."""

    scored: Scored
    """Every trajectory of every round, judged or failed."""
    accepted: tuple[Group, ...]
    """The groups to train on, in launch order."""
    samples: tuple[Sample, ...]
    """Their conversations with their credit."""
    launched: int
    """How many groups were asked for."""
    rounds: int
    """How many rounds it took."""
