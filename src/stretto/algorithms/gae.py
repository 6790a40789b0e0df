"""Generalized advantage estimation over the trained tokens of one episode, as plain numpy. Schulman et al. 2016.

An episode is a trajectory: the trained tokens of its conversations, one after the other. Prompts, tool answers and
other context are not in the stream, so values and advantages are carried through them from the last token before to
the first one after; no token that the policy did not choose takes a step, is discounted, or has a value of its own.

After the last token nothing follows: its next value is 0, for an answer that was cut off too, because the reward has
already judged it as it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stretto.recipe.schema import Gae

Floats = NDArray[np.float64]


def token_rewards(reward: float, penalties: Floats) -> Floats:
    """(N) penalties of an episode's tokens -> (N) rewards: each token's penalty taken off, the verdict at the last."""
    rewards = -penalties
    if len(rewards):
        rewards[-1] += reward
    return rewards


def generalized_advantages(rewards: Floats, values: Floats, *, gamma: float, lam: float) -> Floats:
    """(N), (N) -> (N): A_t = delta_t + gamma lam A_{t+1}, with delta_t = r_t + gamma V_{t+1} - V_t. Eq. 16."""
    following = np.append(values[1:], 0.0)[: len(values)]
    surprise = rewards + gamma * following - values
    advantages = np.zeros_like(values)
    later = 0.0
    for token in reversed(range(len(values))):
        later = surprise[token] + gamma * lam * later
        advantages[token] = later
    return advantages


def policy_lambda(gae: Gae, tokens: int) -> float:
    """By which the policy of an episode of so many trained tokens looks ahead."""
    if gae.length_alpha is None:
        return gae.lam
    return max(0.0, 1 - 1 / (gae.length_alpha * max(1, tokens)))


def critic_lambda(gae: Gae) -> float:
    """By which the critic's targets look ahead."""
    return gae.lam if gae.critic_lam is None else gae.critic_lam


def value_targets(advantages: Floats, values: Floats) -> Floats:
    """(N) what the critic should have said, the lambda-return: its value and by how much it was surprised."""
    return advantages + values
