"""The coefficient of a KL in the reward that moves until the KL is what the recipe asks for. Ziegler et al. 2019.

After a step it grows by up to a fifth of the step's share of the horizon where the KL was above the target, and
shrinks where it was below. So it holds for the next step, changes nothing of the present one, and lets groups stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.algorithms.base import Algorithm, build
from stretto.algorithms.catalog import ADAPTS
from stretto.recipe.schema import AlgorithmSection


class KlController:
    """The coefficient of a run, and the algorithm that credits with it."""

    name = "kl"

    def __init__(self, section: AlgorithmSection, folders: Sequence[str] = ()) -> None:
        assert section.kl.adaptive is not None  # without it nothing moves
        self.section, self.folders, self.adaptive = section, folders, section.kl.adaptive
        self.coef = section.kl.coef
        self.built: tuple[float, Algorithm] | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The recipe's, with the coefficient as it is now."""
        if self.built is None or self.built[0] != self.coef:
            kl = self.section.kl.model_copy(update={"coef": self.coef})
            self.built = self.coef, build(self.section.model_copy(update={"kl": kl}), self.folders)
        return self.built[1]

    def observe(self, kl: float, trajectories: int) -> None:
        """Moves the coefficient after a step whose tokens had this KL on average."""
        off = max(-ADAPTS, min(ADAPTS, kl / self.adaptive.target - 1))
        self.coef *= 1 + off * trajectories / self.adaptive.horizon

    def state(self) -> Mapping[str, Any]:
        """The coefficient."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self.coef = state["coef"]
