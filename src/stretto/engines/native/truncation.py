"""Top-p and top-k: drawing from a few tokens, and saying from which.

The distribution that is left is normalised anew, and log-probabilities are of that. Whoever trains on the answer has to
normalise over the very same ids: computed again from logits that differ by rounding, another token may be among them.
So the ids travel with the sample. Noise is keyed as ever: a function of (request key, position, token id).

B sequences, V vocabulary, K most tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engines.native.sampling import gumbel
from stretto.models.logprob_head import CACHED_NUMBERS, accum_dtype, chunks

MOST_KEPT = 1024
"""Tokens kept at most where only top-p is asked for: a flat distribution would keep most of a large vocabulary."""
NOBODY = -1
"""Stands in place of an id that is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """From how much of the distribution is drawn."""

    top_p: float = 1.0
    """The most likely tokens that together have at least this probability."""
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
        shares = (values - logits.logsumexp(-1, keepdim=True)).double().exp()
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
