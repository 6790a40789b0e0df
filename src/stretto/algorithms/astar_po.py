"""A*PO: regress beta2 times the log-ratio to the reference on how much better an answer was than V* of its prompt.

    loss = 1/trajectories * sum over trajectories of (beta2 * D + V* - R)^2,   D = sum over tokens of lp - lp_ref

V* comes from the reference's answers, sampled once before training, so one answer per prompt is enough here. There is
no critic, no clipping, no normalization; and because the optimum satisfies the equation for every answer, whoever
sampled it, neither an importance weight nor a further KL term. Brantley et al. 2025, eq. 4 and algorithm 1.

An answer of several conversations is one equation: what the others contribute to D stands, as a constant, in each
one's goal, which gives every conversation exactly its part of the gradient. Each then has the error of the whole, so
the value of the loss, which is reported, counts it once per trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms.base import Algorithm, LoggedTerm, Streams, Term, TokenStreams, keep
from stretto.algorithms.correction import sum_per_answer
from stretto.algorithms.credit import conversation_samples, judged
from stretto.algorithms.optimal import value_of
from stretto.recipe.schema import AstarPo
from stretto.types import Group, Sample, Trajectory


def regression_targets(groups: Sequence[Group], streams: Streams, *, beta2: float) -> tuple[Sample, ...]:
    """Every token with its conversation's goal for beta2 * D: R - V*, less what the other conversations have."""
    return tuple(
        sample
        for trajectory, reward in judged(groups)
        for sample in _goals(trajectory, reward.value - value_of(trajectory, streams), streams, beta2)
    )


def _goals(trajectory: Trajectory, gap: float, streams: Streams, beta2: float) -> list[Sample]:
    samples = conversation_samples(trajectory, gap, streams)
    ratios = [_log_ratio(sample) for sample in samples]
    elsewhere = [beta2 * (sum(ratios) - ratio) for ratio in ratios]
    return [replace(s, advantage=s.advantage - share) for s, share in zip(samples, elsewhere, strict=True)]


def _log_ratio(sample: Sample) -> float:
    """Of the whole conversation, with the engine's log-probabilities as the policy's."""
    sampled = sample.conversation.logprobs[sample.conversation.trained]
    return float(np.sum(sampled - sample.reference)) if sample.reference is not None else 0.0


def residual(logprobs: Tensor, rows: TokenStreams, *, beta2: float) -> Tensor:
    """(C) beta2 * D of every conversation."""
    if rows.reference is None:
        raise ValueError("A*PO was built but no reference log-probabilities were provided")
    return beta2 * per_conversation(sum_per_answer(logprobs - rows.reference, rows), rows)


def goal(logprobs: Tensor, rows: TokenStreams) -> Tensor:
    """(C) what beta2 * D of every conversation should be."""
    return per_conversation(rows.advantage, rows)


def per_conversation(values: Tensor, rows: TokenStreams) -> Tensor:
    """(N) -> (C): numbers that are equal within a conversation, once for each."""
    return values[rows.lengths.cumsum(0) - 1]


def siblings(rows: TokenStreams) -> Tensor:
    """(C) how many conversations each one's trajectory has."""
    return torch.ones_like(rows.lengths) if rows.siblings is None else rows.siblings


def squared_error(logprobs: Tensor, rows: TokenStreams, *, beta2: float) -> Tensor:
    """(C) the regression's error: with the gradient of each conversation's part of D, and a value that is shared out
    among the conversations of a trajectory."""
    error = (residual(logprobs, rows, beta2=beta2) - goal(logprobs, rows)) ** 2
    return error - error.detach() * (1 - 1 / siblings(rows).to(error.dtype))


def whole_residual(logprobs: Tensor, rows: TokenStreams, *, beta2: float) -> Tensor:
    """(C) numbers whose sum over the conversations of a trajectory is as many times its beta2 * D."""
    return residual(logprobs, rows, beta2=beta2) * siblings(rows)


def whole_gap(logprobs: Tensor, rows: TokenStreams, *, beta2: float) -> Tensor:
    """(C) numbers whose sum over the conversations of a trajectory is as many times its R - V*.

    What a goal lacks of it is what the other conversations have; each puts back its own as often as there are others.
    """
    mine = residual(rows.engine, rows, beta2=beta2)
    return goal(logprobs, rows) + mine * (siblings(rows) - 1)


def build(section: AstarPo) -> Algorithm:
    """A*PO with the recipe's numbers."""
    beta2 = section.vstar.beta2
    watch = {
        "astar/residual": LoggedTerm(numbers=partial(whole_residual, beta2=beta2), per="conversations"),
        "astar/gap": LoggedTerm(numbers=partial(whole_gap, beta2=beta2), per="conversations"),
    }
    loss = partial(squared_error, beta2=beta2)
    return Algorithm(
        name="astar_po",
        scope="sample",
        needs=frozenset({"reference", "vstar"}),
        min_samples=1,
        terms=(Term(name="regression", denominator="trajectories", loss=loss, watch=watch),),
        advantage=partial(regression_targets, beta2=beta2),
        drop=keep,
    )
