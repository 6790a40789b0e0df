"""The sequences that an engine is decoding, as columns: one row each, all on the device.

A step works on whole columns, so nothing in Python grows with the batch; what was sampled leaves the device when a
sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.engines.base import Request
from stretto.engines.native.sampling import signed


@dataclass(slots=True, kw_only=True)
class DecodeBatch:
    """The active sequences, one row each; row i lives in slot i of the cache."""

    keys: Tensor
    """Noise keys."""
    lengths: Tensor
    """Tokens in the cache before those whose states are in `hidden`."""
    bases: Tensor
    """How many of them are a shared prefix."""
    prefixes: Tensor
    """Which one; -1 for none."""
    sampled: Tensor
    """Tokens sampled so far."""
    begun: Tensor
    """Tokens sampled under the same key before, elsewhere; the noise goes on from there."""
    limits: Tensor
    """Most tokens to sample."""
    temperatures: Tensor
    """Sampling temperatures."""
    newest: Tensor
    """The tokens sampled last."""
    stops: Tensor
    """(n, k) ids that end a sequence, padded with -1."""
    tokens: Tensor
    """(n, most) what was sampled."""
    logprobs: Tensor
    """(n, most) its log-probabilities."""
    hidden: Tensor
    """(n, w, W) states that predict the next token, and those after the drafts if these are right."""
    drafts: Tensor
    """(n, w-1) the drafts; -1 where there is none."""

    @property
    def positions(self) -> Tensor:
        """Which token of its answer each row samples next."""
        return self.sampled + self.begun

    def extend(self, tokens: Tensor, logprobs: Tensor, said: Tensor) -> None:
        """Each row goes on with the first `said` of its (n, w) new tokens."""
        if tokens.shape[1] == 1:  # as always without drafts, where each has said one
            self.tokens.scatter_(1, self.sampled[:, None], tokens)
            self.logprobs.scatter_(1, self.sampled[:, None], logprobs)
            self.newest = tokens[:, 0]
        else:
            along = torch.arange(tokens.shape[1], device=tokens.device)
            rows, columns = (along < said[:, None]).nonzero(as_tuple=True)
            self.tokens[rows, self.sampled[rows] + columns] = tokens[rows, columns]
            self.logprobs[rows, self.sampled[rows] + columns] = logprobs[rows, columns]
            self.newest = tokens.gather(1, said[:, None] - 1)[:, 0]
        self.sampled, self.lengths = self.sampled + said, self.lengths + said

    def take(self, rows: Tensor) -> None:
        """Keeps these rows, in this order."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[rows])

    def add(self, other: DecodeBatch) -> None:
        """Appends rows; what has a width of its own gets the larger one."""
        for field in fields(self):
            mine, new = getattr(self, field.name), getattr(other, field.name)
            if mine.dim() > 1:
                width, around = max(mine.shape[1], new.shape[1]), (0, 0) * (mine.dim() - 2)
                mine, new = (pad(t, (*around, 0, width - t.shape[1]), value=-1) for t in (mine, new))
            setattr(self, field.name, torch.cat([mine, new]))


def entering(requests: Sequence[Request], hidden: Tensor, prefixes: Sequence[int]) -> DecodeBatch:
    """Rows for requests whose contexts are in the cache; `hidden` (n, W) are the states of their last tokens."""
    device, most = hidden.device, max(request.max_new_tokens for request in requests)
    width = max(len(request.stop) for request in requests)
    stops = [sorted(request.stop) + [-1] * (width - len(request.stop)) for request in requests]

    def column(values: Iterable[float], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    return DecodeBatch(
        keys=column(signed(request.key) for request in requests),
        lengths=column(len(request.tokens) - 1 for request in requests),
        bases=column(len(r.tokens) if prefix >= 0 else 0 for r, prefix in zip(requests, prefixes, strict=True)),
        prefixes=column(prefixes),
        sampled=column(0 for _ in requests),
        begun=column(request.begun for request in requests),
        limits=column(request.max_new_tokens for request in requests),
        temperatures=column((request.temperature for request in requests), torch.float64),
        newest=column(-1 for _ in requests),
        stops=torch.tensor(stops, dtype=torch.long, device=device).reshape(len(requests), width),
        tokens=torch.zeros(len(requests), most, dtype=torch.long, device=device),
        logprobs=torch.zeros(len(requests), most, dtype=torch.float64, device=device),
        hidden=hidden[:, None],
        drafts=torch.zeros(len(requests), 0, dtype=torch.long, device=device),
    )
