"""The records that travel through a step, in the order in which they are made.

    prompts -> collect -> score -> credit -> pack -> accumulate -> apply -> publish
    Prompt     Trajectory  Group    Sample    (packing.MicroBatch)           Weights

All are frozen: a stage makes a new record, it never edits the previous one. Nothing here imports torch; token arrays
are numpy. The packed tensors of a micro-batch live in `stretto.training.packing`, the only record that needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # everything imports this file, and many commands have no arrays
    import numpy as np
    from numpy.typing import NDArray

Message = Mapping[str, Any]
"""A chat message: at least `role` and `content`, as every chat template expects."""

StopReason = Literal["stop", "length", "abort"]
"""Why a conversation's last call ended: an end-of-turn token or a stop text, the token limit or the end of the context,
an abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One thing to ask the model, as a task yields it."""

    id: str
    """Names the prompt for ever: sampling noise, the held-out split and V* tables are keyed by it."""
    messages: tuple[Message, ...]
    """The chat that opens the first conversation."""
    reference: str | None = None
    """The reference answer that rewards compare with, if the task has one."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """The task's own columns, for rewards and environments; JSON-able."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The token ids that top-p or top-k left to draw from, at each sampled token: one after another.

    Example: two tokens, drawn from {7, 9} and from {3}: counts [2, 1], ids [7, 9, 3].
    """

    counts: NDArray[np.int32]
    """How many ids each sampled token was drawn from."""
    ids: NDArray[np.int32]
    """The ids, those of the first token first."""


ANY_EXPERT = -1
"""Stands where nobody has said which expert computed a token; a router chooses by itself there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One growing context and what the model said in it. Token ids are the truth; text is never encoded again.

    Example: the prompt [5, 6] answered by [7, 2], where 2 ends the turn, is tokens [5, 6, 7, 2],
    trained [F, F, T, T], logprobs [0, 0, -0.3, -0.1], stop "stop".
    """

    tokens: NDArray[np.int64]
    """Every token id in order: prompt, model turns, and what came between them."""
    trained: NDArray[np.bool_]
    """True where the token was sampled in a call of this conversation (the end-of-turn token included)."""
    logprobs: NDArray[np.float64]
    """The engine's log-probability of each sampled token at the sampling temperature; 0 where `trained` is False."""
    stop: StopReason
    """Why the last call ended."""
    version: int
    """The version of the weights that sampled it."""
    parent: tuple[int, int] | None = None
    """(index of the conversation in the trajectory it branched from, shared leading tokens), or none."""
    kept: KeptTokens | None = None
    """What the trained tokens were drawn from, where that was not the whole vocabulary; `logprobs`, and those that the
    trainer computes, are of that."""
    experts: NDArray[np.int16] | None = None
    """(tokens, routers, K) the experts that computed each token where it was sampled, -1 where nobody says; none where
    the engine does not tell."""
    turns: tuple[tuple[int, int], ...] = ()
    """(index of the call in the trajectory, tokens sampled in it) of every call, in order: together, the trained
    tokens. Empty where nobody asked in turns, as in a demonstration."""

    @property
    def sampled(self) -> int:
        """How many of its tokens were sampled."""
        return len(self.trained.nonzero()[0])  # a third of the time of `sum`, which is asked for every answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an environment observed. Numbers only: the verdict belongs to rewards."""

    answer: str
    """The text that rewards judge."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Numbers the environment noticed (turns, tool calls, game score)."""
    turn_rewards: tuple[float, ...] | None = None
    """What each call of the model was worth by itself, in the order of the calls; none if only the whole is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one prompt: every conversation the environment held, and how it ended."""

    prompt: Prompt
    """What was asked."""
    visit: int
    """How often this prompt had been drawn before in the run."""
    attempt: int
    """Index in the group; a retry keeps it."""
    conversations: tuple[Conversation, ...]
    """One for single- and multi-turn environments, several for multi-conversation ones."""
    outcome: Outcome | None
    """What the environment observed; none if it failed."""
    failure: str | None = None
    """Why there is no verdict (ours or the environment's fault, never the model's), or none."""
    rewritten: int = 0
    """How often a call could not continue what the model had said, because the chat template would have rewritten it or
    the environment gave other words back."""
    full: int = 0
    """How often a call that continued a conversation found no room left in the context, and so nothing was sampled."""


FULL_MARKS = 1 - 1e-9
"""Outcomes are shares of the full marks; partial credit is not a right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The verdict on one trajectory."""

    value: float
    """What the algorithm learns from: the weighted parts after shaping."""
    outcome: float
    """Before shaping; what `drop` and accuracy read."""
    parts: Mapping[str, float]
    """Every named part that applies to the answer, unweighted; none where nobody judges."""
    costly: tuple[str, ...] = ()
    """The parts whose scorer gave 0 because judging this answer would have cost too much time or memory."""

    @property
    def judged(self) -> bool:
        """False where the recipe has no rewards, so that `value` and `outcome` say nothing."""
        return bool(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All scored attempts at one prompt; `trajectories` and `rewards` stand in the same order."""

    prompt: Prompt
    """What was asked."""
    trajectories: tuple[Trajectory, ...]
    """The attempts that have a verdict, by attempt."""
    rewards: tuple[Reward, ...]
    """Their verdicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation with what each of its trained tokens is credited with.

    The streams are aligned with the trained tokens in order: as long as `conversation.trained.sum()`.
    """

    key: tuple[str, int, int, int]
    """(prompt id, visit, attempt, conversation index): orders and shuffles samples without a random state."""
    conversation: Conversation
    """The tokens to train."""
    advantage: NDArray[np.float64]
    """Credit per trained token."""
    leads: bool
    """True for the first conversation of its trajectory in which something was sampled, so that trajectories can be
    counted by summing."""
    siblings: int = 1
    """Conversations of its trajectory in which something was sampled, this one included."""
    family_tokens: int = 0
    """Trained tokens of all conversations of its trajectory; 0 where nobody counted."""
    reference: NDArray[np.float64] | None = None
    """Reference log-probabilities, if the algorithm needs them."""
    old: NDArray[np.float64] | None = None
    """The trainer's log-probabilities at the sampling weights, if a step makes several updates."""
    values: NDArray[np.float64] | None = None
    """The critic's values, if the algorithm needs them."""
    returns: NDArray[np.float64] | None = None
    """What the critic should have said, if the algorithm has one."""
    candidates: NDArray[np.float64] | None = None
    """A row per trained token: log-probabilities of a teacher's K likeliest tokens there and of all others together
    (none where there are none), then the K ids."""


TrainedLogprobs = Mapping[tuple[str, int, int, int], "NDArray[np.float32]"]
"""Sample's key -> the trainer's log-probabilities of its trained tokens, at the weights that sampled them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A published version of the trained parameters."""

    version: int
    """Rises by one with every step."""
    manifest: Mapping[str, str]
    """Parameter name -> checksum of the trainer's tensor; empty where trainer and engine share memory."""
    where: str
    """How an engine gets them: "shared" means it reads the very tensors that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """An engine's answer to new weights, in its own words, so that a publish can be proved."""

    version: int
    """The version it now samples from."""
    manifest: Mapping[str, str]
    """Parameter name -> checksum of the engine's own tensor; empty if shared."""
    shared: bool
    """True if it reads the trainer's tensors, so that there is nothing to prove."""
    lost: float = 0.0
    """Seconds that it took to come back after its process had died, since it was asked last."""
    decoding: tuple[float, ...] = ()
    """Sums over its decode steps since it was asked last: how many, their answers, the squares of these, seconds, and
    seconds times answers; nothing where it does not say."""


class Stateful(Protocol):
    """A part of a run that a checkpoint must hold. A checkpoint that lacks a part is refused at restore."""

    name: str

    def state(self) -> Mapping[str, Any]:
        """JSON-able values and torch tensors that restore the part exactly."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts the part back as `state` described it."""
        ...


def trajectory_key(trajectory: Trajectory) -> tuple[str, int, int]:
    """Orders trajectories in launch order whatever order they finished in."""
    return (trajectory.prompt.id, trajectory.visit, trajectory.attempt)
