"""PPO: a critic's values as baseline for every token, and the clipped surrogate. Schulman et al. 2017.

The verdict stands at the last trained token of a trajectory, a KL "in the reward" is taken off token by token, and
`gae` turns both and the critic's values into an advantage per token. Advantages are then whitened over every trained
token of the batch: its mean shifts each of them, so no credit is final before the last answer is scored; a trainer may
whiten its gradient instead (`training.whitening`). Returns are not whitened; they are what the critic of `critic.py`
learns from.

The policy and the critic may look ahead by lambdas of their own, and the policy's may follow from the length of the
answer, so that a verdict reaches the beginning of a long one (VAPO, Yue et al. 2025, eq. 5 to 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.base import Algorithm, Streams, keep
from stretto.algorithms.credit import (
    conversation_samples,
    judged,
    needed_streams,
    shared_out,
    token_penalties,
    whitened_samples,
)
from stretto.algorithms.critic import value_terms
from stretto.algorithms.gae import critic_lambda, generalized_advantages, policy_lambda, token_rewards, value_targets
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import Gae, Kl, Ppo
from stretto.types import Group, Sample, Trajectory


def credit(groups: Sequence[Group], streams: Streams, *, gae: Gae, kl: Kl) -> tuple[Sample, ...]:
    """Whitened advantages and plain returns for every trained token of the batch."""
    return whitened_samples(plain_credit(groups, streams, gae=gae, kl=kl))


def plain_credit(groups: Sequence[Group], streams: Streams, *, gae: Gae, kl: Kl) -> tuple[Sample, ...]:
    """Advantages as `gae` has them, and returns, for every trained token."""
    return tuple(
        sample
        for trajectory, reward in judged(groups)
        for sample in episode(trajectory, reward.value, streams, gae=gae, kl=kl)
    )


def episode(trajectory: Trajectory, reward: float, streams: Streams, *, gae: Gae, kl: Kl) -> list[Sample]:
    """The samples of one trajectory, whose trained tokens are one stream in the order in which they were said."""
    samples = conversation_samples(trajectory, reward, streams)
    if not samples:
        return []
    order = sampling_order(samples)
    values = np.concatenate([streams["values"][sample.key] for sample in samples])[order]
    rewards = token_rewards(reward, np.concatenate([token_penalties(sample, kl) for sample in samples])[order])
    ahead = partial(generalized_advantages, rewards, values, gamma=gae.gamma)
    credited = np.stack([ahead(lam=policy_lambda(gae, len(values))), ahead(lam=critic_lambda(gae))])
    credited[1] = value_targets(credited[1], values)
    advantages, returns = credited[:, np.argsort(order)]
    parts = zip(samples, shared_out(advantages, samples), shared_out(returns, samples), strict=True)
    return [replace(sample, advantage=advantage, returns=returned) for sample, advantage, returned in parts]


def sampling_order(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Places of the trained tokens of these conversations, one after the other, in the order of sampling.

    A conversation may go on after another was opened, as that of an agent does which asks another. Where nobody has
    counted calls, one conversation was over before the next.
    """
    turns = [sample.conversation.turns for sample in samples if len(sample.advantage)]
    if not all(turns):
        return np.arange(sum(len(sample.advantage) for sample in samples))
    calls = [np.repeat(*np.array(each).T) for each in turns]
    return np.argsort(np.concatenate([*calls, np.zeros(0, np.int64)]), kind="stable")


def build(section: Ppo) -> Algorithm:
    """PPO with the recipe's numbers."""
    return Algorithm(
        name="ppo",
        scope="batch",
        needs=needed_streams(section) | {"values"},
        min_samples=1,
        terms=policy_terms(section, denominator="tokens", scale="token"),
        critic=value_terms(section.gae),
        advantage=partial(credit, gae=section.gae, kl=section.kl),
        unwhitened=partial(plain_credit, gae=section.gae, kl=section.kl),
        drop=keep,
    )
