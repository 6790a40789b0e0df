"""A lane whose experts are spread over more ranks than share a matrix: several teams, each with requests of its own.

The ranks of a team share every matrix and decode the same requests in step, as those of any lane do. Experts lie with
the ranks of all teams, so a layer of them is asked by everybody at once: whenever one team computes a forward, all do,
each over tokens of its own. A team that has nothing to compute then takes part with a token that nobody reads. A round
ends for all teams when one of them has something to give back, or when its seconds are over anywhere.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from stretto.engines.base import Completion
from stretto.engines.native.lane import LaneEngine, LaneLink
from stretto.models.attention import TreeLayout
from stretto.models.load import Policy
from stretto.models.segments import Segment


class SharedForwards:
    """The forwards of one team, at the same time as those of the others."""

    def __init__(self, policy: Policy, everybody: LaneLink) -> None:
        self.policy, self.everybody = policy, everybody
        self.fills = False
        policy.network.get_decoder().register_forward_pre_hook(self._begins)

    def _begins(self, *ignored: Any) -> None:
        if not self.fills:
            self.everybody.any(True)

    def fill(self) -> None:
        """Takes part in those of others, as long as somebody computes one."""
        self.fills = True
        try:
            while self.everybody.any(False):
                nothing = torch.zeros(1, dtype=torch.long, device=self.policy.device)
                alone = [Segment(start=0, length=1, ancestors=())]
                self.policy.hidden(nothing, nothing, TreeLayout.of(alone, self.policy.device))
        finally:
            self.fills = False


class SpreadLaneEngine(LaneEngine):
    """Generates what its team was asked, beside the other teams."""

    def __init__(self, *parts: Any, **choices: Any) -> None:
        super().__init__(*parts, **choices)
        self.forwards = SharedForwards(self.policy, self.links.everybody)

    def _decode_until(self, end: float) -> list[Completion]:
        everybody, done = self.links.everybody, list[Completion]()
        while everybody.any(bool(self.waiting or self.active)):
            if self.waiting or self.active:
                done += self._advance()
            self.forwards.fill()
            if everybody.any(bool(done) or time.monotonic() >= end):
                break
        return done
