"""Groups and advantages in, samples out: the only bridge between the mathematics and the records.

By default every trained token of every conversation gets its trajectory's advantage. With `credit: turn`, a token gets
that of its turn: what the turn and all later ones were worth, compared with the same turn of the others in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.advantages import whitened
from stretto.algorithms.base import Streams
from stretto.algorithms.kl import estimator
from stretto.errors import RecipeError
from stretto.recipe.schema import AlgorithmSection, Kl
from stretto.types import Group, Reward, Sample, Trajectory, trajectory_key

Floats = NDArray[np.float64]


def needed_streams(section: AlgorithmSection) -> frozenset[str]:
    """What a KL coefficient adds to an algorithm's own needs."""
    return frozenset({"reference"}) if section.kl.coef > 0 else frozenset()


def shaped_rewards(group: Group, streams: Streams, kl: Kl) -> Floats:
    """The group's rewards, less the KL to the reference summed over each trajectory where the recipe says "reward".

    The engine's log-probabilities serve as the policy's: this happens before the trainer has seen the tokens.
    """
    rewards = np.array([reward.value for reward in group.rewards])
    if kl.coef == 0 or kl.where != "reward":
        return rewards
    estimate = estimator(kl)
    for row, trajectory in enumerate(group.trajectories):
        for index, conversation in enumerate(trajectory.conversations):
            reference = streams["reference"][(*trajectory_key(trajectory), index)]
            rewards[row] -= kl.coef * float(np.sum(estimate(conversation.logprobs[conversation.trained], reference)))
    return rewards


def judged(groups: Sequence[Group]) -> Iterator[tuple[Trajectory, Reward]]:
    """Every attempt with its verdict, for credit that looks at each by itself."""
    for group in groups:
        yield from zip(group.trajectories, group.rewards, strict=True)


def conversation_samples(trajectory: Trajectory, advantage: float, streams: Streams) -> list[Sample]:
    """One sample per conversation, every trained token with the trajectory's advantage."""
    samples = []
    lengths = [conversation.sampled for conversation in trajectory.conversations]
    spoken = [index for index, length in enumerate(lengths) if length]
    for index, (conversation, length) in enumerate(zip(trajectory.conversations, lengths, strict=True)):
        key = (*trajectory_key(trajectory), index)
        samples.append(
            Sample(
                key=key,
                conversation=conversation,
                advantage=np.full(length, advantage),
                leads=index == (spoken[0] if spoken else 0),
                siblings=max(1, len(spoken)),
                family_tokens=sum(lengths),
                reference=streams["reference"][key] if "reference" in streams else None,
                values=streams["values"][key] if "values" in streams else None,
            )
        )
    return samples


def token_penalties(sample: Sample, kl: Kl) -> Floats:
    """The KL penalty of each trained token where the recipe puts it into the reward; 0 elsewhere.

    The engine's log-probabilities serve as the policy's, as above.
    """
    if kl.coef == 0 or kl.where != "reward" or sample.reference is None:
        return np.zeros_like(sample.advantage)
    sampled = sample.conversation.logprobs[sample.conversation.trained]
    penalty: Floats = kl.coef * estimator(kl)(sampled, sample.reference)
    return penalty


def whitened_samples(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples with their advantages whitened over all of their trained tokens."""
    if not samples:
        return ()
    shares = shared_out(whitened(np.concatenate([sample.advantage for sample in samples])), samples)
    return tuple(replace(sample, advantage=share) for sample, share in zip(samples, shares, strict=True))


def shared_out(stream: Floats, samples: Sequence[Sample]) -> list[Floats]:
    """A stream over the trained tokens of all samples, cut into one per sample."""
    return np.split(stream, np.cumsum([len(sample.advantage) for sample in samples])[:-1])


def credit_by_group(
    groups: Sequence[Group],
    streams: Streams,
    *,
    advantages: Callable[[Floats], Floats],
    kl: Kl,
    credit: Literal["trajectory", "turn"] = "trajectory",
) -> tuple[Sample, ...]:
    """The `advantage` of every algorithm whose credit depends on the rewards of one group only."""
    samples: list[Sample] = []
    for group in groups:
        rewards = shaped_rewards(group, streams, kl)
        if credit == "turn":
            by_turn = turn_advantages(group.trajectories, rewards, advantages)
            for row, trajectory in enumerate(group.trajectories):
                samples += [in_turns(each, by_turn[row]) for each in conversation_samples(trajectory, 0.0, streams)]
            continue
        values = advantages(rewards)
        for trajectory, value in zip(group.trajectories, values, strict=True):
            samples += conversation_samples(trajectory, float(value), streams)
    return tuple(samples)


def turn_returns(trajectory: Trajectory, reward: float) -> Floats:
    """Of every call of the model: the verdict, and the rewards of this turn and of all later ones."""
    worth = None if trajectory.outcome is None else trajectory.outcome.turn_rewards
    if worth is None:
        reason = "is turn, and the environment said of no turn what it was worth"
        raise RecipeError.of("algorithm.credit", reason, "return an Outcome with turn_rewards, or use trajectory")
    returns: Floats = np.array(worth, dtype=np.float64)[::-1].cumsum()[::-1] + reward
    return returns


def turn_advantages(
    trajectories: Sequence[Trajectory], rewards: Floats, advantages: Callable[[Floats], Floats]
) -> list[dict[int, float]]:
    """Per trajectory, turn -> advantage: among the attempts that came as far as this turn, and among those alone."""
    returns = [turn_returns(each, float(reward)) for each, reward in zip(trajectories, rewards, strict=True)]
    found: list[dict[int, float]] = [{} for _ in trajectories]
    for turn in range(max((len(each) for each in returns), default=0)):
        there = [row for row, each in enumerate(returns) if turn < len(each)]
        for row, value in zip(there, advantages(np.array([returns[row][turn] for row in there])), strict=True):
            found[row][turn] = float(value)
    return found


def in_turns(sample: Sample, advantages: Mapping[int, float]) -> Sample:
    """The sample with every token's credit that of the turn in which it was sampled."""
    turns = sample.conversation.turns
    values = np.repeat([advantages[call] for call, _ in turns], [tokens for _, tokens in turns])
    return replace(sample, advantage=values.astype(np.float64))
