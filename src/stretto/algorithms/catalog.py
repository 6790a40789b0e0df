"""What is known of every algorithm without loading torch: for checks, plans and the objective in words.

The records with the mathematics are built by `stretto.algorithms.base.build`, which finds them through `module` here.
Adding an algorithm is a file beside this one and an entry below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What checks and plans must know of an algorithm."""

    name: str
    """Name in recipes."""
    module: str
    """Module that defines `build(section) -> Algorithm`."""
    summary: str
    """One sentence on what it is."""
    scope: Literal["sample", "group", "batch"]
    """How much must be scored before credit can be given."""
    min_samples: int
    """Fewest samples per prompt that it is defined for."""
    clip: tuple[float, float] | None
    """Default clip range, or none if it does not clip."""
    advantage: str
    """The advantage as a formula."""
    surrogate: str
    """What is summed over tokens, with {low} and {high} for the clip range."""
    average: str
    """The denominator as a prefix of the formula."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Extra streams it always needs."""
    drops: bool = False
    """True if it leaves out groups that teach nothing, and samples again for others (`batch.max_rounds`)."""


CLIPPED = "min(rho*A, clip(rho, 1-{low:g}, 1+{high:g})*A)"
"""The clipped surrogate that PPO introduced."""

CATALOG: dict[str, Facts] = {
    facts.name: facts
    for facts in (
        Facts(
            name="reinforce",
            module="stretto.algorithms.reinforce",
            summary="Williams' estimator: the reward itself is the advantage.",
            scope="sample",
            min_samples=1,
            clip=(0.2, 0.2),
            advantage="A = R",
            surrogate=CLIPPED,
            average="1/trajectories * sum over tokens",
        ),
        Facts(
            name="rloo",
            module="stretto.algorithms.rloo",
            summary="REINFORCE with the mean of the other samples of the group as baseline.",
            scope="group",
            min_samples=2,
            clip=(0.2, 0.2),
            advantage="A = R - mean(R of the others in the group)",
            surrogate=CLIPPED,
            average="1/trajectories * sum over tokens",
        ),
        Facts(
            name="grpo",
            module="stretto.algorithms.grpo",
            summary="Group-normalised rewards, mean over the tokens of an answer, then over answers.",
            scope="group",
            min_samples=2,
            clip=(0.2, 0.2),
            advantage="A = (R - mean(R of the group)) / (std(R of the group) + 1e-4)",
            surrogate=CLIPPED,
            average="1/conversations * sum over conversations of 1/length * sum over tokens",
        ),
    )
}
"""Every algorithm that can be named in a recipe."""

PLANNED = ("dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "ppo", "astar_po", "astar_po_course")
"""Names the recipe format reserves for algorithms that are not available yet."""
