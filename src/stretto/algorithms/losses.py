"""Per-token losses, minimized, as functions of (log-probabilities, rows); every result may be summed in any order.

`old` is the trainer's log-probability at the weights that sampled. While weights have not moved since, that is the
detached log-probability of this very forward: the ratio is exactly 1, clipping cannot act, and no extra pass is
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from stretto.algorithms.base import Denominator, LoggedTerm, Term, TermFunction, TokenStreams
from stretto.algorithms.catalog import estimator_of, facts_of
from stretto.algorithms.correction import (
    FARTHEST,
    correction_weight,
    mean_per_answer,
    sampling_logprobs,
    truncated_share,
)
from stretto.algorithms.kl import ESTIMATORS
from stretto.recipe.schema import AlgorithmSection, ClippedAlgorithm, Correction

Surrogate = Callable[..., Tensor]
"""(log-probabilities, rows, clip, correction) -> (N) the policy's loss per token."""

ClipShare = Callable[..., Tensor]
"""(log-probabilities, rows, clip) -> (N) 1 where clipping holds a token back."""


def log_ratio(logprobs: Tensor, rows: TokenStreams) -> Tensor:
    """How much likelier a token has become since it was sampled, in the trainer's own eyes."""
    return (logprobs - sampling_logprobs(logprobs, rows)).clamp(-FARTHEST, FARTHEST)


def clipped_gain(ratio: Tensor, rows: TokenStreams, *, clip: tuple[float, float]) -> Tensor:
    """min(ratio A, clip(ratio) A), whatever the ratio is of.

    Said by cases: what the gradient of `clamp` is at its very bounds differs between versions of PyTorch.
    """
    bound = ratio.detach().clamp(1 - clip[0], 1 + clip[1])
    return torch.where(_held_back(ratio, rows, clip), bound, ratio) * rows.advantage


def clipped_surrogate(
    logprobs: Tensor, rows: TokenStreams, *, clip: tuple[float, float], correction: Correction
) -> Tensor:
    """-min(rho A, clip(rho) A), weighted by the correction. Schulman et al. 2017, eq. 7."""
    ratio = log_ratio(logprobs, rows).exp()
    return -clipped_gain(ratio, rows, clip=clip) * correction_weight(logprobs, rows, correction=correction)


def sequence_surrogate(
    logprobs: Tensor, rows: TokenStreams, *, clip: tuple[float, float], correction: Correction
) -> Tensor:
    """The clipped surrogate of the conversation's ratio, exp(mean log rho), given to each of its tokens.

    Every token carries the value of its conversation's ratio and the gradient of its own log-probability, so a mean
    over tokens is the conversation's surrogate. Zheng et al. 2025 (GSPO), eq. 5 and 14.
    """
    sequence = mean_per_answer(log_ratio(logprobs, rows), rows).exp().detach()
    ratio = sequence * (logprobs - logprobs.detach()).exp()
    return -clipped_gain(ratio, rows, clip=clip) * correction_weight(logprobs, rows, correction=correction)


def clipped_weight(
    logprobs: Tensor, rows: TokenStreams, *, clip: tuple[float, float], correction: Correction
) -> Tensor:
    """-clip(rho) A log pi with the clipped ratio as a fixed weight: no token's gradient is ever cut off (CISPO).

    The range is [1 - low, 1 + high] as for the others; a low of 1 means no lower bound. MiniMax 2025, eq. 4.
    """
    weight = log_ratio(logprobs, rows).exp().detach().clamp(1 - clip[0], 1 + clip[1])
    return -weight * rows.advantage * logprobs * correction_weight(logprobs, rows, correction=correction)


def kl_penalty(logprobs: Tensor, rows: TokenStreams, *, coef: float, estimator: str) -> Tensor:
    """The pull towards the reference as a loss."""
    if rows.reference is None:
        raise ValueError("a KL term was built but no reference log-probabilities were provided")
    return coef * ESTIMATORS[estimator](logprobs, rows.reference)


def negative_log_likelihood(logprobs: Tensor, rows: TokenStreams) -> Tensor:
    """Supervised learning is the same trainer with this term."""
    return -logprobs


def token(rows: TokenStreams) -> Tensor:
    """Scale of a mean over tokens: every token counts the same."""
    return torch.ones_like(rows.advantage)


def answer(rows: TokenStreams) -> Tensor:
    """Scale of a mean over answers of the mean over tokens: a token counts 1/length of its conversation."""
    return 1 / rows.lengths.to(rows.advantage.dtype)[rows.conversation]


def trajectory(rows: TokenStreams) -> Tensor:
    """Scale of a mean over trajectories of the mean over tokens, whatever conversations they stand in."""
    tokens = rows.lengths if rows.family_tokens is None else rows.family_tokens
    return 1 / tokens.to(rows.advantage.dtype)[rows.conversation]


SCALES = {"token": token, "answer": answer, "trajectory": trajectory}
"""By name, so that a term stays a partial of module functions and can be sent to another process."""


def scaled(logprobs: Tensor, rows: TokenStreams, *, loss: TermFunction, scale: str, factor: float = 1.0) -> Tensor:
    """A per-token loss times what its token counts."""
    return loss(logprobs, rows) * SCALES[scale](rows) * factor


def clipped_share(logprobs: Tensor, rows: TokenStreams, *, clip: tuple[float, float]) -> Tensor:
    """1 where the clip range holds a token back: its ratio has left it in the direction its advantage asked for."""
    return _held_back(log_ratio(logprobs, rows).exp(), rows, clip).to(logprobs.dtype)


def clipped_sequence_share(logprobs: Tensor, rows: TokenStreams, *, clip: tuple[float, float]) -> Tensor:
    """The same of the conversation's ratio."""
    return _held_back(mean_per_answer(log_ratio(logprobs, rows), rows).exp(), rows, clip).to(logprobs.dtype)


def _held_back(ratio: Tensor, rows: TokenStreams, clip: tuple[float, float]) -> Tensor:
    above = (ratio > 1 + clip[1]) & (rows.advantage > 0)
    below = (ratio < 1 - clip[0]) & (rows.advantage < 0)
    return above | below


def policy_terms(
    section: AlgorithmSection,
    *,
    denominator: Denominator,
    scale: str,
    factor: float = 1.0,
    surrogate: Surrogate = clipped_surrogate,
    clipped: ClipShare | None = clipped_share,
    watched: Mapping[str, LoggedTerm] | None = None,
) -> tuple[Term, ...]:
    """A surrogate and, where the recipe asks for it, the KL term beside it, averaged alike.

    `clipped` is none for a surrogate that does not clip; `watched` are further numbers to report.
    """
    clip = (
        (section.clip if isinstance(section, ClippedAlgorithm) else None) or facts_of(section.name).clip or (0.2, 0.2)
    )
    average = partial(scaled, scale=scale, factor=factor)
    watch = {"correction/share": LoggedTerm(numbers=partial(truncated_share, correction=section.correction))}
    if clipped is not None:
        watch["clip/share"] = LoggedTerm(numbers=partial(clipped, clip=clip))
    watch |= watched or {}
    loss = partial(average, loss=partial(surrogate, clip=clip, correction=section.correction))
    policy = Term(name="policy", denominator=denominator, loss=loss, watch=watch, credited=True)
    if not (section.kl.coef > 0 and section.kl.where == "loss"):
        return (policy,)
    penalty = partial(kl_penalty, coef=section.kl.coef, estimator=estimator_of(section.kl.estimator, "loss"))
    return (policy, Term(name="kl", denominator=denominator, loss=partial(average, loss=penalty), watch={}))
