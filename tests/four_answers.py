"""Four answers of 3, 2, 4 and 1 tokens that the tests of losses compute by hand.

`OLD` are the trainer's log-probabilities when it sampled, `NEW` those of this forward, `ENGINE` those the engine gave.
"""

import torch

from stretto.algorithms.base import TokenStreams
from stretto.recipe.schema import Correction

LENGTHS = [3, 2, 4, 1]
OLD = [-0.5, -1.0, -0.2, -1.5, -0.7, -0.3, -0.9, -2.0, -0.1, -1.6]
NEW = [-0.2, -1.1, -0.25, -2.2, -0.6, -0.3, -0.5, -2.6, -0.1, -0.1]
REFERENCE = [-0.6, -1.0, -0.3, -1.4, -0.8, -0.3, -1.0, -1.9, -0.2, -0.5]
ENGINE = [-0.6, -0.9, -0.2, -1.5, -0.9, -0.4, -0.8, -2.0, -0.1, -2.6]

DEVIATION = (0.6875 / 3) ** 0.5 + 1e-6
A, B, C = 0.625 / DEVIATION, -0.375 / DEVIATION, 0.125 / DEVIATION
"""Advantages of rewards 1, 0, 0.5, 0: A for the first answer, C for the third, B for the second and fourth."""

UNCORRECTED = Correction(kind="none")


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def rows(**changes):
    streams = {
        "advantage": numbers([A] * 3 + [B] * 2 + [C] * 4 + [B]),
        "engine": numbers(ENGINE),
        "conversation": torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)),
        "lengths": torch.tensor(LENGTHS),
        "old": numbers(OLD),
        "reference": numbers(REFERENCE),
    }
    return TokenStreams(**(streams | changes))
