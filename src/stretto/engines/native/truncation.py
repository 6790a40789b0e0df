"""Top-p and top-k: drawing from a few tokens, and saying from which.

The distribution that is left is normalized anew, and log-probabilities are of that. Whoever trains on the answer has to
normalize over the very same ids: computed again from logits that differ by rounding, another token may be among them.
So the ids travel with the sample. Noise is keyed as ever: a function of (request key, position, token id).

B sequences, V vocabulary, K most tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.base import Request
from stretto.engines.native.sampling import gumbel
from stretto.models.logprob_head import CACHED_NUMBERS, accum_dtype, chunks
from stretto.types import KeptTokens

MOST_KEPT = 1024
"""Tokens kept at most where only top-p is asked for: a flat distribution would keep most of a large vocabulary."""
NOBODY = -1
"""Stands in place of an id that is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """From how much of the distribution is drawn."""

    top_p: float = 1.0
    """The most likely tokens that together have at least this probability, among those that `top_k` leaves."""
    top_k: int | None = None
    """So many of the most likely tokens, at most."""

    @property
    def active(self) -> bool:
        """False where all tokens may be drawn."""
        return self.top_p < 1.0 or self.top_k is not None

    def kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(B, V) logits at the sampling temperature -> (B, K) ids, likely ones first, and their logits; NOBODY and -inf
        where fewer are kept."""
        most = min(self.top_k or MOST_KEPT, logits.shape[-1])
        values, ids = logits.topk(most)
        if self.top_p == 1.0:  # shares that rounding adds up to 1 too early would cut what top-k leaves
            return ids, values
        among = logits if self.top_k is None else values
        # Of equal logits every share is exact, so that none is kept beyond `top_p` because of a logarithm's rounding.
        highest = values[..., :1]
        shares = (values - highest).exp().double() / (among - highest).exp().sum(-1, keepdim=True).double()
        others = shares.cumsum(-1) - shares >= self.top_p  # those before it are enough
        return ids.masked_fill(others, NOBODY), values.masked_fill(others, float("-inf"))

    def draw(
        self,
        raw: Tensor,
        *,
        keys: Tensor,
        positions: Tensor,
        temperatures: Tensor,
        finish: Callable[[Tensor], Tensor] = Tensor.clone,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, V) products with a head -> (B) tokens, (B) their log-probabilities and (B, K) the ids drawn from.

        A temperature of 0 is greedy; its log-probabilities are those at temperature 1.
        """
        greedy = temperatures == 0
        heat = temperatures.masked_fill(greedy, 1.0)[:, None].to(accum_dtype(raw.dtype))
        parts = chunks(len(raw), raw.shape[1], CACHED_NUMBERS[raw.device.type])
        found = [self.kept(finish(raw[part]).div_(heat[part])) for part in parts]
        ids, values = torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])
        noise = gumbel(keys, positions, ids.clamp(min=0), level=1)
        place = (values.double() + noise).argmax(-1).masked_fill(greedy, 0)[:, None]
        logprobs = values.gather(1, place)[:, 0] - values.logsumexp(-1)
        return ids.gather(1, place)[:, 0], logprobs.double(), ids


class KeptSets:
    """The ids that each token of the answers in progress was drawn from."""

    def __init__(self) -> None:
        self.rows: dict[int, list[NDArray[np.int32]]] = {}

    def note(self, requests: Sequence[Request], ids: Tensor, said: Sequence[int]) -> None:
        """Notes (n, w, K) ids of the first `said` tokens of each row."""
        table = ids.cpu().numpy()
        for row, (request, count) in enumerate(zip(requests, said, strict=True)):
            new = [each[each != NOBODY].astype(np.int32) for each in table[row, :count]]
            self.rows.setdefault(request.key, []).extend(new)

    def take(self, key: int) -> KeptTokens:
        """Those of an answer that has ended."""
        rows = self.rows.pop(key, [])
        counts = np.array([len(row) for row in rows], dtype=np.int32)
        return KeptTokens(counts=counts, ids=np.concatenate([np.zeros(0, np.int32), *rows]))
