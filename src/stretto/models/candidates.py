"""Log-probabilities of several given tokens at each place, and which tokens a model thinks the likeliest there.

What a loss over more than the sampled token needs. The logits of a chunk of rows exist at a time, and are made again in
the backward, so that memory does not grow with the vocabulary. N places, W hidden size, V vocabulary, K tokens at each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stretto.models.logprob_head import CHUNK_NUMBERS, Head, chunk_logits, chunks


def candidate_logprobs(hidden: Tensor, head: Head, ids: Tensor, *, temperature: float) -> Tensor:
    """(N, W), (N, K) -> (N, K + 1): of each of the tokens, and of all others together; (N, V) where there are none."""

    def part(states: Tensor, chosen: Tensor) -> Tensor:
        return with_rest(chunk_logits(states, head, temperature), chosen)

    parts = chunks(len(hidden), len(head.weight), CHUNK_NUMBERS)
    told = [checkpoint(part, hidden[rows], ids[rows], use_reentrant=False, preserve_rng_state=False) for rows in parts]
    return torch.cat(told)


def with_rest(logits: Tensor, ids: Tensor) -> Tensor:
    """(N, V), (N, K) -> (N, K + 1) log-probabilities as above, from logits; no difference of close numbers is taken."""
    found = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    if ids.shape[1] == logits.shape[1]:
        return found
    others = logits.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([found, others - logits.logsumexp(-1, keepdim=True)], dim=-1)


@torch.no_grad()
def likeliest(hidden: Tensor, head: Head, *, count: int, temperature: float, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(N, W) -> the `count` likeliest of the first `vocabulary` tokens at each place, all if these are fewer: their
    log-probabilities, as above, and their ids (N, K)."""
    told, found = list[Tensor](), list[Tensor]()
    for rows in chunks(len(hidden), len(head.weight), CHUNK_NUMBERS):
        logits = chunk_logits(hidden[rows], head, temperature)[:, :vocabulary]
        ids = logits.topk(min(count, logits.shape[1]), dim=-1).indices
        told.append(with_rest(logits, ids))
        found.append(ids)
    return torch.cat(told), torch.cat(found)
