"""Per-token losses, minimised, as functions of (log-probabilities, rows); every result may be summed in any order.

`old` is the trainer's log-probability at the weights that sampled. While weights have not moved since, that is the
detached log-probability of this very forward: the ratio is exactly 1, clipping cannot act, and no extra pass is
needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from stretto.algorithms.base import Denominator, Rows, Term, TermFunction
from stretto.algorithms.catalog import CATALOG
from stretto.algorithms.kl import ESTIMATORS
from stretto.config.schema import AlgorithmSection, Correction

FARTHEST = 20.0
"""Log-ratios are cut here so that one wild token cannot overflow; it is far outside any clip range."""


def sampling_logprobs(logprobs: Tensor, rows: Rows) -> Tensor:
    """The trainer's log-probabilities at the sampling weights, without gradient."""
    return logprobs.detach() if rows.old is None else rows.old


def log_ratio(logprobs: Tensor, rows: Rows) -> Tensor:
    """How much likelier a token has become since it was sampled, in the trainer's own eyes."""
    return (logprobs - sampling_logprobs(logprobs, rows)).clamp(-FARTHEST, FARTHEST)


def correction_weight(logprobs: Tensor, rows: Rows, *, correction: Correction) -> Tensor:
    """Truncated importance weight of trainer against engine per token, without gradient; 1 where correction is off."""
    if correction.kind == "none":
        return torch.ones_like(logprobs)
    log_weight = (sampling_logprobs(logprobs, rows) - rows.engine).clamp(max=FARTHEST)
    return log_weight.exp().clamp(max=correction.cap)


def clipped_surrogate(logprobs: Tensor, rows: Rows, *, clip: tuple[float, float], correction: Correction) -> Tensor:
    """-min(rho A, clip(rho) A), weighted by the correction. Schulman et al. 2017, eq. 7."""
    ratio = log_ratio(logprobs, rows).exp()
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    gain = torch.minimum(ratio * rows.advantage, clipped * rows.advantage)
    return -gain * correction_weight(logprobs, rows, correction=correction)


def kl_penalty(logprobs: Tensor, rows: Rows, *, coef: float, estimator: str) -> Tensor:
    """The pull towards the reference as a loss."""
    if rows.reference is None:
        raise ValueError("a KL term was built but no reference log-probabilities were provided")
    return coef * ESTIMATORS[estimator](logprobs, rows.reference)


def negative_log_likelihood(logprobs: Tensor, rows: Rows) -> Tensor:
    """Supervised learning is the same trainer with this term."""
    return -logprobs


def token(rows: Rows) -> Tensor:
    """Scale of a mean over tokens: every token counts the same."""
    return torch.ones_like(rows.advantage)


def answer(rows: Rows) -> Tensor:
    """Scale of a mean over answers of the mean over tokens: a token counts 1/length of its conversation."""
    return 1 / rows.lengths.to(rows.advantage.dtype)[rows.conversation]


SCALES = {"token": token, "answer": answer}
"""By name, so that a term stays a partial of module functions and can be sent to another process."""


def scaled(logprobs: Tensor, rows: Rows, *, loss: TermFunction, scale: str) -> Tensor:
    """A per-token loss times what its token counts."""
    return loss(logprobs, rows) * SCALES[scale](rows)


def clipped_share(logprobs: Tensor, rows: Rows, *, clip: tuple[float, float]) -> Tensor:
    """1 where the clip range holds a token back: the ratio has left it in the direction its advantage asked for."""
    ratio = log_ratio(logprobs, rows).exp()
    above = (ratio > 1 + clip[1]) & (rows.advantage > 0)
    below = (ratio < 1 - clip[0]) & (rows.advantage < 0)
    return (above | below).to(logprobs.dtype)


def truncated_share(logprobs: Tensor, rows: Rows, *, correction: Correction) -> Tensor:
    """1 where the correction's weight was truncated; nowhere if there is no correction."""
    if correction.kind == "none":
        return torch.zeros_like(logprobs)
    return ((sampling_logprobs(logprobs, rows) - rows.engine).exp() > correction.cap).to(logprobs.dtype)


def policy_terms(section: AlgorithmSection, *, denominator: Denominator, scale: str) -> tuple[Term, ...]:
    """The clipped surrogate and, where the recipe asks for it, the KL term beside it, averaged alike."""
    clip = section.clip or CATALOG[section.name].clip or (0.2, 0.2)
    surrogate = partial(clipped_surrogate, clip=clip, correction=section.correction)
    watch: Mapping[str, TermFunction] = {
        "clip/share": partial(clipped_share, clip=clip),
        "correction/share": partial(truncated_share, correction=section.correction),
    }
    policy = Term(
        name="policy", denominator=denominator, loss=partial(scaled, loss=surrogate, scale=scale), watch=watch
    )
    if not (section.kl.coef > 0 and section.kl.where == "loss"):
        return (policy,)
    penalty = partial(kl_penalty, coef=section.kl.coef, estimator=section.kl.estimator)
    return (policy, Term(name="kl", denominator=denominator, loss=partial(scaled, loss=penalty, scale=scale), watch={}))
