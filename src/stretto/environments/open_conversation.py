"""A conversation of a trajectory while it grows; `chat` decides what belongs to which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stretto.engines.base import joined_kept
from stretto.environments.base import Reply, Tool
from stretto.types import Conversation, KeptTokens, Message, StopReason


@dataclass(slots=True, kw_only=True)
class OpenConversation:
    """A conversation while it grows."""

    messages: list[Message] = field(default_factory=list)
    """Every message as it was when it was said, the model's included."""
    opening: int = 0
    """How many of them it was opened with."""
    tools: Sequence[Tool] = ()
    """What the model was told that it may call."""
    replies: list[Reply] = field(default_factory=list)
    """The model's messages as the environment got them, one per call."""
    tokens: list[int] = field(default_factory=list)
    """Every token so far."""
    trained: list[bool] = field(default_factory=list)
    """Which of them were sampled here."""
    logprobs: list[float] = field(default_factory=list)
    """Their log-probabilities."""
    kept: list[KeptTokens | None] = field(default_factory=list)
    """What they were drawn from, call after call."""
    experts: NDArray[np.int16] | None = None
    """The experts that computed its tokens, where the engine tells."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    """(messages, tokens) after each call: where another conversation may branch off."""
    calls: list[tuple[int, int]] = field(default_factory=list)
    """(call of the trajectory, tokens sampled) of each."""
    parent: tuple[int, int] | None = None
    """(conversation, shared tokens) it branched from."""
    stop: StopReason = "stop"
    """Why the last call ended, or could not begin."""
    version: int = 0
    """Weights that sampled the last call."""

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Appends context, or sampled tokens with their log-probabilities."""
        self.tokens += tokens
        self.trained += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def rewind(self) -> None:
        """Takes back the context of a call that came to nothing."""
        end = self.turns[-1][1] if self.turns else 0
        del self.tokens[end:], self.trained[end:], self.logprobs[end:]

    def finished(self, places: Mapping[int, int]) -> Conversation:
        """The record of it; `places` says where conversations stand in the trajectory."""
        return Conversation(
            tokens=np.array(self.tokens, dtype=np.int64),
            trained=np.array(self.trained, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float64),
            stop=self.stop,
            version=self.version,
            parent=None if self.parent is None else (places[self.parent[0]], self.parent[1]),
            kept=joined_kept(self.kept),
            experts=self.experts,
            turns=tuple(self.calls),
        )
