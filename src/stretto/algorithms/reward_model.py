"""A reward model's objective: of two answers to one question, the better one gets the higher score.

A pair is a trajectory of two conversations, the better one first, each with one trained token: where it is read. What
the trainer calls log-probabilities are their scores. The loss is Bradley and Terry's, -log sigmoid(s+ - s- - margin)
(Ouyang et al. 2022, eq. 1; the margin is Touvron et al. 2023, eq. 2), a mean over pairs; the squared sum of a pair's
scores (Eisenstein et al. 2023) holds scores around 0, which differences alone leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from stretto.algorithms.base import Algorithm, LoggedTerm, Streams, Term, TokenStreams, keep
from stretto.algorithms.credit import conversation_samples, judged
from stretto.recipe.schema import PairwiseRanking
from stretto.types import Group, Sample


def paired(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(2P) numbers of conversations -> (P) those of the better ones, (P) of the worse ones."""
    better, worse = numbers.view(-1, 2).unbind(1)
    return better, worse


def bradley_terry(scores: Tensor, rows: TokenStreams) -> Tensor:
    """(P) -log sigmoid(s+ - s- - margin); the margin is the credit of a pair's conversations."""
    (better, worse), (margin, _) = paired(scores), paired(rows.advantage)
    return softplus(margin - (better - worse))


def off_centre(scores: Tensor, rows: TokenStreams, *, coef: float) -> Tensor:
    """(P) the squared sum of a pair's scores."""
    better, worse = paired(scores)
    return coef * (better + worse).square()


def right(scores: Tensor, rows: TokenStreams) -> Tensor:
    """(P) 1 where the better answer has the higher score, half where both have the same."""
    better, worse = paired(scores)
    return (1 + torch.sign(better - worse)) / 2


def difference(scores: Tensor, rows: TokenStreams) -> Tensor:
    """(P) how much higher the better answer's score is."""
    better, worse = paired(scores)
    return better - worse


def credit(groups: Sequence[Group], streams: Streams) -> tuple[Sample, ...]:
    """Both conversations of a pair, each with the margin, which stands in the place of the reward."""
    return tuple(
        sample
        for trajectory, reward in judged(groups)
        for sample in conversation_samples(trajectory, reward.value, streams)
    )


def build(section: PairwiseRanking) -> Algorithm:
    """The objective with the recipe's numbers."""
    watch = {
        "pairs/accuracy": LoggedTerm(numbers=right, per="trajectories"),
        "pairs/difference": LoggedTerm(numbers=difference, per="trajectories"),
    }
    terms = [Term(name="ranking", denominator="trajectories", loss=bradley_terry, watch=watch)]
    if section.centring:
        centered = partial(off_centre, coef=section.centring)
        terms.append(Term(name="centring", denominator="trajectories", loss=centered, watch={}))
    return Algorithm(
        name="reward_model",
        scope="sample",
        needs=frozenset(),
        min_samples=1,
        terms=tuple(terms),
        advantage=credit,
        drop=keep,
        whole=True,
    )
