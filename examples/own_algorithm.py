"""An algorithm of one's own, used without touching stretto: an entry in the catalog and a function `build`.

    .venv/bin/python examples/own_algorithm.py [key=value ...]

It trains the recipe in own_reward/ with the algorithm `centred`, which is explained in docs/concepts/algorithms.md.
To make an algorithm part of stretto, put the same code into src/stretto/algorithms/ and the entry into catalog.py;
only then do `stretto check`, `stretto resume` and the others know its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.catalog import CATALOG, CLIPPED, AlgorithmFacts
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
from stretto.api.recipes import open_recipe
from stretto.errors import StrettoError
from stretto.recipe.load import folder_of
from stretto.recipe.schema import AlgorithmSection
from stretto.runtime import session

RECIPE = Path(__file__).parent / "own_reward" / "letters.yaml"


def centred(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each reward less the mean of its group; not divided by the deviation."""
    return rewards - rewards.mean()


def build(section: AlgorithmSection) -> Algorithm:
    """Centred rewards; every token of the step counts the same."""
    return Algorithm(
        name="centred",
        scope="group",
        needs=needed_streams(section),
        min_samples=2,
        terms=policy_terms(section, denominator="tokens", scale="token"),
        advantage=partial(credit_by_group, advantages=centred, kl=section.kl),
        drop=keep,
    )


FACTS = AlgorithmFacts(
    name="centred",
    module=__name__,
    summary="Rewards less the mean of their group, mean over all tokens of the step.",
    scope="group",
    min_samples=2,
    clip=(0.2, 0.2),
    advantage="A = R - mean(R of the group)",
    surrogate=CLIPPED,
    average="1/tokens * sum over tokens",
)


def main(changes: Sequence[str] = ()) -> None:
    """Registers the algorithm for this process and trains with it."""
    CATALOG[FACTS.name] = FACTS
    recipe = open_recipe(RECIPE, ["algorithm.name=centred", *changes], deep=True)
    session.start(recipe, name="own-algorithm", root=folder_of(RECIPE))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except StrettoError as error:
        sys.exit(str(error))
