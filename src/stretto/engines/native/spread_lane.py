"""A lane whose experts are spread over more ranks than share a matrix: several teams, each with requests of its own.

The ranks of a team share every matrix and decode the same requests in step, as those of any lane do. Experts lie with
the ranks of all teams, so a layer of them is asked by everybody at once: whenever one team computes a forward, all do,
each over tokens of its own. A team that has nothing to compute then takes part with a token that nobody reads. A round
ends for all teams when one of them has something to give back, or when its seconds are over anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stretto.engines.base import Completion
from stretto.engines.native.engine import PREFILL_TOKENS
from stretto.engines.native.lane import LaneEngine, LaneLinks
from stretto.models.attention import TreeLayout
from stretto.models.load import Policy
from stretto.models.segments import Segment


class SharedForwards:
    """The forwards of one team, at the same time as those of the others."""

    def __init__(self, policy: Policy, links: LaneLinks) -> None:
        self.policy, self.links = policy, links
        self.fills = False
        policy.network.get_decoder().register_forward_pre_hook(self._begins, with_kwargs=True)

    def _begins(self, decoder: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if not self.fills:
            self._together(keywords["input_ids"].shape[1])

    def _together(self, tokens: int) -> bool:
        """Tells everybody how many tokens this rank has; whether somebody has any."""
        told = self.links.numbers(tokens)
        alike = told[self.links.team.rank :: self.links.team.size]  # the rank of each team that has the same parts
        self.links.others.rows = [max(1, count) for count in alike]
        return any(told)

    def fill(self) -> None:
        """Takes part in those of others, as long as somebody computes one."""
        self.fills = True
        try:
            while self._together(0):
                nothing = torch.zeros(1, dtype=torch.long, device=self.policy.device)
                alone = [Segment(start=0, length=1, ancestors=())]
                self.policy.hidden(nothing, nothing, TreeLayout.of(alone, self.policy.device))
        finally:
            self.fills = False


class SpreadLaneEngine(LaneEngine):
    """Generates what its team was asked, beside the other teams."""

    def __init__(self, *parts: Any, **choices: Any) -> None:
        super().__init__(*parts, **choices)
        self.forwards = SharedForwards(self.policy, self.links)
        self.prefill_tokens = PREFILL_TOKENS // self.links.others.size  # experts here get the rows of all teams

    def _decode_until(self, end: float) -> list[Completion]:
        done: list[Completion] = []
        while self.links.any(bool(self.waiting or self.active)):
            if self.waiting or self.active:
                done += self._advance()
            self.forwards.fill()
            if self.links.any(bool(done) or time.monotonic() >= end):
                break
        return done
