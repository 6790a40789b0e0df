"""Importance weights of the trainer's against the engine's probabilities, truncated, without gradient.

The engine that samples and the trainer that learns never compute quite the same numbers. What is weighted is each
token, or each conversation by the product or the geometric mean of its tokens' ratios. A product grows with length:
above a thousand tokens it truncates nearly every answer, which is why `token` is the default.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.algorithms.base import TokenStreams
from stretto.recipe.schema import Correction

FARTHEST = 20.0
"""Log-ratios are cut here so that one wild token cannot overflow; it is far outside any clip range."""


def sampling_logprobs(logprobs: Tensor, rows: TokenStreams) -> Tensor:
    """The trainer's log-probabilities at the sampling weights, without gradient."""
    return logprobs.detach() if rows.old is None else rows.old


def sum_per_answer(values: Tensor, rows: TokenStreams) -> Tensor:
    """(N) -> (N): every token gets the sum over its conversation, always added up in the same order, unlike `index_add`
    on a GPU: a resumed run would differ in the last bit."""
    return torch.segment_reduce(values, "sum", lengths=rows.lengths)[rows.conversation]


def mean_per_answer(values: Tensor, rows: TokenStreams) -> Tensor:
    """(N) -> (N): every token gets the mean over its conversation."""
    return sum_per_answer(values, rows) / rows.lengths.to(values.dtype)[rows.conversation]


def untruncated_weight(logprobs: Tensor, rows: TokenStreams, *, correction: Correction) -> Tensor:
    """(N) the weight before truncation."""
    log_weight = sampling_logprobs(logprobs, rows) - rows.engine
    if correction.kind == "sequence":
        log_weight = sum_per_answer(log_weight, rows)
    elif correction.kind == "geometric":
        log_weight = mean_per_answer(log_weight, rows)
    return log_weight.clamp(max=FARTHEST).exp()


def correction_weight(logprobs: Tensor, rows: TokenStreams, *, correction: Correction) -> Tensor:
    """(N) the weight of every token; 1 where correction is off."""
    if correction.kind == "none":
        return torch.ones_like(logprobs)
    return untruncated_weight(logprobs, rows, correction=correction).clamp(max=correction.cap)


def truncated_share(logprobs: Tensor, rows: TokenStreams, *, correction: Correction) -> Tensor:
    """(N) 1 where the weight was truncated."""
    if correction.kind == "none":
        return torch.zeros_like(logprobs)
    return (untruncated_weight(logprobs, rows, correction=correction) > correction.cap).to(logprobs.dtype)
