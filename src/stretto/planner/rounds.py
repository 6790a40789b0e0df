"""The rounds of dynamic sampling as a forecast draws them: which groups a step launches, drops and launches again.

Whether a group is kept is drawn from the seed, by its place in launch order. When it is judged changes nothing, so the
rounds of a step are the same under every plan.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from stretto.scheduler.batch_rules import RoundRule

ASSUMED_ACCEPTANCE = 0.5
"""Share of the groups that are kept, where neither the recipe nor a run says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRounds:
    """What a step launches."""

    sizes: tuple[int, ...]
    """Groups of each round."""
    kept: tuple[bool, ...]
    """Whether each group counts, in launch order."""
    trained: tuple[int, ...]
    """The groups that are trained on: the first that count."""


def draw_rounds(rule: RoundRule, acceptance: float | None, *, seed: int) -> DrawnRounds:
    """The rounds of one step in which each group is kept with this probability; without one, every group is."""
    chance = random.Random(f"verdicts of {seed}")
    sizes: list[int] = []
    kept: list[bool] = []
    launch = rule.first
    while launch:
        kept += [acceptance is None or chance.random() < acceptance for _ in range(launch)]
        sizes.append(launch)
        launch = rule.again(max(0, rule.groups - sum(kept)), rounds=len(sizes))
    trained = [index for index, counts in enumerate(kept) if counts][: rule.groups]
    return DrawnRounds(sizes=tuple(sizes), kept=tuple(kept), trained=tuple(trained))
