"""The seam between whoever wants tokens and whoever generates them.

An engine serves requests by continuous batching. It knows nothing of prompts, groups or rewards: a request is token ids
in, token ids and their log-probabilities out. The sampling noise is a function of the request's key and the position
alone, so the same request draws the same tokens whatever else shares the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.types import ANY_EXPERT, KeptTokens, Receipt, StopReason, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the model."""

    key: int
    """64 bits that name the noise and the request; see `noise_key`."""
    tokens: NDArray[np.int64]
    """The context."""
    max_new_tokens: int
    """Most tokens to sample."""
    stop: frozenset[int]
    """Token ids that end the answer; the one that ended it is part of it."""
    temperature: float
    """0 is greedy; log-probabilities are those of the distribution at this temperature (at 1 when greedy)."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the answer; the tokens of the one that ended it are part of it."""
    begun: int = 0
    """How many of the last tokens of the context were sampled under this key already, on a cell that it has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a request became."""

    key: int
    """The request's key."""
    tokens: NDArray[np.int64]
    """The sampled tokens, the ending one included."""
    logprobs: NDArray[np.float64]
    """Log-probability of each of them."""
    stop: StopReason
    """Why it ended."""
    version: int
    """Version of the weights that sampled it."""
    kept: KeptTokens | None = None
    """What each token was drawn from, where that was not the whole vocabulary; `logprobs` are of that."""
    experts: NDArray[np.int16] | None = None
    """(tokens of the context and of the answer, routers, K) the experts that computed them, -1 where none did; none
    where nobody asked for them."""


class Engine(Protocol):
    """Generates. Submit requests, step until they are complete. Nothing of one round outlives it."""

    @property
    def version(self) -> int:
        """Version of the weights it samples from."""
        ...

    @property
    def kv_tokens(self) -> int:
        """How many tokens of context its caches hold."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; they are admitted in this order."""
        ...

    def step(self, budget_seconds: float) -> list[Completion]:
        """Generates until something completes or the budget is used; an empty list means neither is left to do."""
        ...

    def abort(self, keys: Sequence[int]) -> list[Completion]:
        """Takes requests out and returns what they have so far, with stop "abort"."""
        ...

    def receive(self, weights: Weights) -> Receipt:
        """Takes over published weights and says what it holds."""
        ...

    def holds(self) -> Receipt:
        """Which weights it samples from, read now and not remembered."""
        ...

    def checksums(self, names: Collection[str]) -> dict[str, str] | None:
        """Checksums of what its products read of these parameters: the tensors, or copies in another order, computed
        where they are. A copy that is not its parameter is told even if nobody asks. None if it multiplies nothing,
        which only an engine may say that shares its tensors."""
        ...

    def sleep(self, keep: bool) -> None:
        """Frees the memory of the cache where nothing is under way, and of the weights too unless `keep`."""
        ...

    def wake(self) -> None:
        """Undoes `sleep`."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


def noise_key(*, seed: int, visit: int, prompt: str, attempt: int, context: NDArray[np.int64], occurrence: int) -> int:
    """64 bits from everything that may tell two calls apart; never from where or when they run.

    `occurrence` counts calls with this very context within one trajectory. The position of a token is added by the
    sampler.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{seed}|{visit}|{attempt}|{occurrence}|{len(prompt)}|{prompt}|".encode())
    digest.update(np.ascontiguousarray(context, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest(), "little")


def joined_kept(parts: Sequence[KeptTokens | None]) -> KeptTokens | None:
    """What the tokens of several completions were drawn from, or none where one of them does not say."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return KeptTokens(
        counts=np.concatenate([part.counts for part in known]), ids=np.concatenate([part.ids for part in known])
    )


def earlier_first(first: NDArray[np.int16] | None, then: NDArray[np.int16] | None) -> NDArray[np.int16] | None:
    """The choices for a conversation that has grown: for tokens of which both say something, those that were made when
    the tokens were sampled."""
    if first is None or then is None:
        return None
    found = then.copy()
    known = first != ANY_EXPERT
    found[: len(first)][known] = first[known]
    return found
