"""Pairs of a better and a worse answer as training data, and what a reward model is worth on held-out ones.

A pair is one trajectory of two conversations, the better one first, each trained at its end, where the model is read.
What they have in common, the question and often more, is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.runtime.evaluate import Evaluation
from stretto.runtime.runtime import Runtime
from stretto.runtime.training_data import numbers_of, refuse_long, shown
from stretto.storage.pass_rates import wilson
from stretto.tasks.examples import MARGIN, chats_of
from stretto.types import Conversation, Prompt

BINS = 10
"""Bins of the calibration error, from a confidence of one half to one."""

DRAWS, SEED = 1000, 0
"""Bootstrap samples of the intervals of what has no formula for one, and their seed."""

Floats = NDArray[np.float64]


class ComparedPairs:
    """Learns which of two answers is better."""

    imitates = False

    async def conversations(self, parts: Runtime, prompt: Prompt) -> Sequence[Conversation]:
        """The better answer and the worse one."""
        found = []
        for *question, answer in chats_of(prompt):
            asked = parts.renderer.open(question)
            tokens = np.concatenate([asked, parts.renderer.answer(question, str(answer["content"]))])
            refuse_long(prompt, len(tokens), parts.context)
            trained = np.arange(len(tokens)) == len(tokens) - 1
            found.append(shown(tokens, trained, version=parts.version))
        return found

    def worth(self, prompt: Prompt) -> float:
        """The margin by which the better answer's score should be higher."""
        return float(prompt.tags.get(MARGIN, 0.0))

    async def evaluate(self, parts: Runtime, prompts: Sequence[Prompt]) -> Evaluation:
        """How often the better answer has the higher score, and whether differences of scores mean what they say."""
        talks = [talk for prompt in prompts for talk in await self.conversations(parts, prompt)]
        scores = np.array([float(numbers[0]) for numbers in await numbers_of(parts, talks)])
        return evaluation_of(scores[0::2], scores[1::2])


def evaluation_of(better: Floats, worse: Floats) -> Evaluation:
    """What the scores of pairs are worth; a pair whose scores are equal is half right."""
    difference = better - worse
    right = float((difference > 0).sum() + (difference == 0).sum() / 2)
    chance = 1 / (1 + np.exp(-np.clip(difference, -700, 700)))
    draws = np.random.default_rng(SEED).integers(0, len(chance), (DRAWS, len(chance)))
    measures = {"eval/loss": float(np.logaddexp(0, -difference).mean()), "eval/difference": float(difference.mean())}
    for name, measure in (("brier", brier), ("ece", calibration_error)):
        low, high = np.quantile([measure(chance[draw]) for draw in draws], [0.025, 0.975])
        measures |= {f"eval/{name}": measure(chance), f"eval/{name}_low": low, f"eval/{name}_high": high}
    return Evaluation(
        accuracy=right / max(1, len(difference)),
        interval=wilson(right, len(difference)),
        n=len(difference),
        asked=len(difference),
        unit="pairs",
        measures={name: float(number) for name, number in measures.items()},
    )


def brier(chance: Floats) -> float:
    """The mean squared error of the chances that the better answers were given."""
    return float(np.square(1 - chance).mean())


def calibration_error(chance: Floats) -> float:
    """By how much confidence differs from the share that is right, on average over bins of confidence (ECE)."""
    confidence = np.maximum(chance, 1 - chance)
    right = (np.sign(chance - 0.5) + 1) / 2
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    gaps = [abs(float((right - confidence)[bins == place].sum())) for place in range(BINS)]
    return sum(gaps) / len(chance)
