"""A teacher: a frozen language model that is asked what it thinks of the tokens that the policy sampled.

It says the log-probability of each of them, at the temperature that was sampled with; where the exact loss wants more,
it also says which tokens it thinks the likeliest there. Nothing is trained here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from stretto.errors import TrainingError
from stretto.models.candidates import likeliest
from stretto.models.load import Policy
from stretto.models.logprob_head import accum_dtype, logprobs_of
from stretto.models.memory import memory_errors
from stretto.training.packing import pack
from stretto.training.rows import halved, map_microbatches
from stretto.types import Conversation, Sample


class Teacher:
    """One such model."""

    def __init__(
        self, model: Policy, *, temperature: float, token_budget: int, candidates: int | None, vocabulary: int
    ) -> None:
        """`candidates` is how many tokens it names at each place, of the `vocabulary` that the policy has."""
        self.model, self.temperature, self.token_budget = model, temperature, token_budget
        self.candidates, self.vocabulary = candidates, vocabulary

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights."""
        return self.model.network.parameters()

    @property
    def decoder(self) -> PreTrainedModel:
        """What has its layers."""
        return self.model.network

    def modules(self) -> list[nn.Module]:
        """What it computes with."""
        return [self.model.network]

    @torch.no_grad()
    def score(self, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """(N) log-probabilities of each conversation's trained tokens; with candidates a row each, which has that
        number first and then what `Sample.candidates` holds."""
        return map_microbatches(conversations, budget=self.token_budget, numbers=self.numbers, smaller=self._halves)

    def numbers(self, row: Sequence[Sample]) -> list[NDArray[np.float64]]:
        """Those of a row's conversations."""
        model, head = self.model, self.model.head()
        with memory_errors():
            batch = pack(row, device=model.device, dtype=accum_dtype(model.dtype))
            states = model.hidden(batch.tokens, batch.positions, batch.layout)[batch.sources]
            told, _ = logprobs_of(states, head, batch.targets, temperature=self.temperature, kept=batch.kept)
            if self.candidates is not None:
                numbers, ids = likeliest(
                    states, head, count=self.candidates, temperature=self.temperature, vocabulary=self.vocabulary
                )
                told = torch.cat([told[:, None], numbers, ids.to(told.dtype)], dim=-1)
        return np.split(told.double().cpu().numpy(), np.cumsum(batch.rows.lengths.cpu().numpy())[:-1])

    def _halves(self, row: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        if (cut := halved(row, share=not self.model.apart)) is None:
            raise TrainingError(
                "the device has too little memory to ask the teacher about a single conversation; use a smaller one"
            )
        parts, tokens = cut
        self.token_budget = max(1, min(self.token_budget, tokens))
        return parts
