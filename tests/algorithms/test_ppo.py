"""GAE, whitening, the critic's loss and PPO's credit, with the arithmetic written out."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from four_answers import NEW, UNCORRECTED, numbers, rows
from stretto.algorithms.base import build
from stretto.algorithms.critic import clipped_value_loss, clipped_value_share, value_terms
from stretto.algorithms.gae import generalized_advantages, token_rewards, value_targets
from stretto.algorithms.losses import clipped_surrogate
from stretto.recipe.schema import AlgorithmSection, Gae, Kl
from stretto.types import Group, Outcome, Prompt, Reward, Trajectory
from tiny import conversation

REWARDS, VALUES = np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.5, 0.4])
"""An answer of three tokens with reward 1. With gamma 1: deltas .5 - .2 = .3, .4 - .5 = -.1, 1 - .4 = .6."""


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages"),
    [
        (1.0, 1.0, [0.3 + (-0.1 + 0.6), -0.1 + 0.6, 0.6]),
        (1.0, 0.95, [0.3 + 0.95 * (-0.1 + 0.95 * 0.6), -0.1 + 0.95 * 0.6, 0.6]),
        (0.9, 0.8, [(0.45 - 0.2) + 0.72 * ((0.36 - 0.5) + 0.72 * 0.6), (0.36 - 0.5) + 0.72 * 0.6, 0.6]),
        (1.0, 0.0, [0.3, -0.1, 0.6]),
    ],
)
def test_generalized_advantages_by_hand(gamma, lam, advantages):
    found = generalized_advantages(REWARDS, VALUES, gamma=gamma, lam=lam)
    assert found == pytest.approx(advantages, rel=1e-12)
    golden = {(1, 1): [0.8, 0.5, 0.6], (1, 0.95): [0.7465, 0.47, 0.6], (0.9, 0.8): [0.46024, 0.292, 0.6]}
    assert found == pytest.approx(golden.get((gamma, lam), advantages), abs=1e-9)
    assert value_targets(found, VALUES) == pytest.approx([a + v for a, v in zip(advantages, VALUES, strict=True)])


streams = st.lists(st.tuples(*[st.floats(-3, 3)] * 2), min_size=1, max_size=12)


@given(stream=streams, gamma=st.floats(0.1, 1))
def test_with_lambda_1_an_advantage_is_what_came_less_what_was_expected(stream, gamma):
    rewards, values = np.array(stream).T
    to_come = [sum(gamma**ahead * r for ahead, r in enumerate(rewards[at:])) for at in range(len(rewards))]
    found = generalized_advantages(rewards, values, gamma=gamma, lam=1.0)
    assert value_targets(found, values) == pytest.approx(to_come, abs=1e-9)


def test_a_critic_that_is_right_leaves_no_advantage():
    found = generalized_advantages(REWARDS, np.ones(3), gamma=1.0, lam=0.95)
    assert found.tolist() == [0.0, 0.0, 0.0]


def test_an_episode_without_tokens_has_no_advantages():
    empty = np.zeros(0)
    assert generalized_advantages(empty, empty, gamma=1.0, lam=0.95).shape == (0,)
    assert token_rewards(1.0, empty).shape == (0,)


def test_the_verdict_stands_at_the_last_token_and_each_penalty_at_its_own():
    assert token_rewards(1.0, np.array([0.1, 0.0, -0.2])) == pytest.approx([-0.1, 0.0, 1.2])


def critics_rows(**changes):
    """The answer of above with the returns of (1, .95)."""
    returns = value_targets(generalized_advantages(REWARDS, VALUES, gamma=1.0, lam=0.95), VALUES)
    blank = {"old": None, "reference": None, "advantage": numbers([0] * 3), "engine": numbers([0] * 3)}
    place = {"conversation": torch.zeros(3, dtype=torch.long), "lengths": torch.tensor([3])}
    return rows(**blank, **place, **({"values": numbers(VALUES), "returns": numbers(returns)} | changes))


NOW = [0.9, 0.1, 0.4]
"""What the critic says after some updates; returns are .2 + .7465, .5 + .47 and .4 + .6."""


@pytest.mark.parametrize(
    ("clip", "held", "golden", "clipped"),
    [(0.5, [0.7, 0.1, 0.4], 0.196277, [1, 0, 0]), (0.2, [0.4, 0.3, 0.4], 0.235927, [1, 0, 0])],
)
def test_the_critics_loss_by_hand(clip, held, golden, clipped):
    """The first value rose by .7 and is held; the second fell by .4, away from its return, and is not let off."""
    returns = [0.9465, 0.97, 1.0]
    by_hand = [max((v - t) ** 2, (h - t) ** 2) / 2 for v, h, t in zip(NOW, held, returns, strict=True)]
    found = clipped_value_loss(numbers(NOW), critics_rows(), clip=clip)
    assert found.tolist() == pytest.approx(by_hand, rel=1e-12)
    assert found.mean().item() == pytest.approx(golden, abs=1e-6)
    assert clipped_value_share(numbers(NOW), critics_rows(), clip=clip).tolist() == clipped


def test_a_held_value_gets_no_push_and_one_that_moved_away_is_pulled_back():
    values = numbers(NOW).requires_grad_()
    clipped_value_loss(values, critics_rows(), clip=0.2).sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 0.1 - 0.97, 0.4 - 1.0])


def test_the_critics_terms_are_a_mean_over_tokens_with_the_recipes_clip():
    (term,) = value_terms(Gae(value_clip=0.5))
    (usual,) = value_terms(Gae())
    assert (term.denominator, usual.denominator) == ("tokens", "tokens")
    assert term.loss(numbers(NOW), critics_rows()).sum().item() / 3 == pytest.approx(0.196277, abs=1e-6)
    assert usual.loss(numbers(NOW), critics_rows()).sum().item() / 3 == pytest.approx(0.235927, abs=1e-6)
    assert usual.watch["clip_share"].numbers(numbers(NOW), critics_rows()).sum().item() == 1


@given(order=st.permutations(range(10)), cut=st.integers(1, 9))
def test_the_critics_loss_may_be_summed_in_any_order_and_in_pieces(order, cut):
    rng = np.random.default_rng(0)
    now, old, returns = (numbers(rng.normal(size=10)) for _ in range(3))

    def total(at):
        return clipped_value_loss(now[at], critics_rows(values=old[at], returns=returns[at]), clip=0.2).sum().item()

    assert total(order[:cut]) + total(order[cut:]) == pytest.approx(total(list(range(10))), rel=1e-12)


@pytest.mark.parametrize("missing", ["values", "returns"])
def test_a_critics_loss_without_its_streams_is_an_error(missing):
    with pytest.raises(ValueError, match="no values and returns"):
        clipped_value_loss(numbers(NOW), critics_rows(**{missing: None}), clip=0.2)


PROMPT = Prompt(id="p", messages=({"role": "user", "content": "?"},))


def scored(values, *attempts):
    """A group from (the tokens and the trained places of each conversation) per attempt."""
    trajectories = tuple(
        Trajectory(
            prompt=PROMPT,
            visit=0,
            attempt=number,
            conversations=tuple(conversation(tokens, trained) for tokens, trained in talks),
            outcome=Outcome(answer=""),
        )
        for number, talks in enumerate(attempts)
    )
    rewards = tuple(Reward(value=value, outcome=value, parts={}) for value in values)
    return Group(prompt=PROMPT, trajectories=trajectories, rewards=rewards)


def credited(group, values, *, reference=None, **chosen):
    """PPO's samples, by the values of each conversation."""
    keys = [("p", 0, trajectory.attempt, index) for trajectory in group.trajectories
            for index in range(len(trajectory.conversations))]  # fmt: skip
    streams = {"values": dict(zip(keys, map(np.array, values), strict=True))}
    if reference:
        streams["reference"] = dict(zip(keys, map(np.array, reference), strict=True))
    return build(AlgorithmSection(name="ppo", **chosen)).advantage([group], streams)


def whitened_by_hand(numbers):
    mean = sum(numbers) / len(numbers)
    deviation = sqrt(sum((n - mean) ** 2 for n in numbers) / (len(numbers) - 1) + 1e-8)
    return [(n - mean) / deviation for n in numbers]


def test_advantages_are_whitened_over_the_tokens_of_the_batch_and_returns_are_not():
    """The answer of above, and one of two tokens with reward 0 and values .1, .3.

    Lambda .95: deltas .2 and -.3, so GAE .2 - .95 * .3 = -.085 and -.3, returns .015 and 0.
    """
    group = scored([1.0, 0.0], [([7, 1, 2, 3], [1, 2, 3])], [([7, 1, 2], [1, 2])])
    samples = credited(group, [[0.2, 0.5, 0.4], [0.1, 0.3]])
    by_hand = whitened_by_hand([0.7465, 0.47, 0.6, -0.085, -0.3])
    assert np.concatenate([s.advantage for s in samples]) == pytest.approx(by_hand, rel=1e-9)
    assert np.concatenate([s.returns for s in samples]) == pytest.approx([0.9465, 0.97, 1.0, 0.015, 0.0])
    assert np.concatenate([s.values for s in samples]).tolist() == [0.2, 0.5, 0.4, 0.1, 0.3]


@pytest.mark.parametrize(
    "talks",
    [
        [([7, 1, 8, 8, 2, 3], [1, 4, 5])],  # a tool answered after the first token
        [([7, 1], [1]), ([7, 9, 2, 3], [2, 3])],  # a second conversation
        [([7, 1], [1]), ([7, 9], []), ([7, 2, 3], [1, 2])],  # one in between in which the model said nothing
    ],
)
def test_values_and_advantages_are_carried_through_what_the_model_did_not_say(talks):
    group = scored([1.0, 0.0], talks, [([7, 4], [1])])
    cuts = np.cumsum([len(trained) for _, trained in talks])[:-1]
    samples = credited(group, [*np.split(VALUES, cuts), [0.0]])
    assert np.concatenate([s.returns for s in samples]) == pytest.approx([0.9465, 0.97, 1.0, 0.0])
    assert np.concatenate([s.advantage for s in samples]) == pytest.approx(whitened_by_hand([0.7465, 0.47, 0.6, 0.0]))
    assert [s.leads for s in samples] == [index == 0 for index in range(len(talks))] + [True]


@pytest.mark.parametrize(
    ("first", "second", "called"),
    [
        ([0.2, 0.4], [0.5], [((0, 1), (2, 1)), ((1, 1),)]),  # the first goes on after the second has answered it
        ([0.5], [0.2, 0.4], [((1, 1),), ((0, 1), (2, 1))]),
    ],
)
def test_credit_goes_by_the_order_of_calls_and_not_of_conversations(first, second, called):
    """The answer of three tokens, whose values in the order of calls are .2, .5 and .4."""
    group = scored([1.0], *[[([7, *range(len(each))], [*range(1, 1 + len(each))]) for each in (first, second)]])
    (trajectory,) = group.trajectories
    talks = [replace(talk, turns=turns) for talk, turns in zip(trajectory.conversations, called, strict=True)]
    group = replace(group, trajectories=(replace(trajectory, conversations=tuple(talks)),))
    samples = credited(group, [first, second])
    by_value = {value: r for s in samples for value, r in zip(s.values, s.returns, strict=True)}
    assert [by_value[value] for value in (0.2, 0.5, 0.4)] == pytest.approx([0.9465, 0.97, 1.0])
    by_value = {value: a for s in samples for value, a in zip(s.values, s.advantage, strict=True)}
    assert [by_value[v] for v in (0.2, 0.5, 0.4)] == pytest.approx(whitened_by_hand([0.7465, 0.47, 0.6]))


def test_policy_and_critic_look_ahead_by_lambdas_of_their_own():
    """Deltas .3, -.1 and .6. The critic's lambda of 1 makes every return 1; the policy's is .5, or that of 3 tokens."""
    talks = [([7, 1], [1]), ([7, 2, 3], [1, 2])]  # the length is the trajectory's
    expected = {
        Gae(lam=0.5, critic_lam=1.0): [0.3 + 0.5 * (-0.1 + 0.5 * 0.6), -0.1 + 0.5 * 0.6, 0.6],
        Gae(length_alpha=2 / 3, critic_lam=1.0): [0.3 + 0.5 * (-0.1 + 0.5 * 0.6), -0.1 + 0.5 * 0.6, 0.6],
        Gae(length_alpha=0.1, critic_lam=1.0): [0.3, -0.1, 0.6],  # 1 - 1 / .3 is below 0
    }
    for gae, advantages in expected.items():
        samples = credited(scored([1.0], talks), np.split(VALUES, [1]), gae=gae)
        assert np.concatenate([s.returns for s in samples]) == pytest.approx([1.0, 1.0, 1.0])
        assert np.concatenate([s.advantage for s in samples]) == pytest.approx(whitened_by_hand(advantages))


def test_a_penalty_in_the_reward_stands_at_its_token():
    """Two tokens, k1 of each -1 - (-2) = 1, coefficient .1: rewards -.1 and .9; values 0, lambda and gamma 1."""
    group = scored([1.0], [([7, 1, 2], [1, 2])])
    chosen = {"gae": Gae(lam=1.0), "kl": Kl(coef=0.1, estimator="k1", where="reward")}
    (sample,) = credited(group, [[0.0, 0.0]], reference=[[-2.0, -2.0]], **chosen)
    assert sample.returns == pytest.approx([0.8, 0.9])
    assert sample.advantage == pytest.approx(whitened_by_hand([0.8, 0.9]))


def test_a_penalty_in_the_loss_leaves_the_rewards_alone():
    group = scored([1.0], [([7, 1, 2], [1, 2])])
    (sample,) = credited(group, [[0.0, 0.0]], reference=[[-2.0, -2.0]], gae=Gae(lam=1.0), kl=Kl(coef=0.1))
    assert sample.returns == pytest.approx([1.0, 1.0])


def test_an_empty_batch_and_a_trajectory_without_conversations_have_no_samples():
    assert build(AlgorithmSection(name="ppo")).advantage([], {}) == ()
    assert credited(scored([1.0], []), []) == ()


def test_ppo_sees_the_whole_batch_needs_values_and_sums_the_clipped_surrogate_over_tokens():
    algorithm = build(AlgorithmSection(name="ppo", correction=UNCORRECTED))
    assert (algorithm.scope, algorithm.needs, algorithm.min_samples) == ("batch", {"values"}, 1)
    (term,) = algorithm.terms
    assert term.denominator == "tokens"
    surrogate = clipped_surrogate(numbers(NEW), rows(), clip=(0.2, 0.2), correction=UNCORRECTED)
    assert term.loss(numbers(NEW), rows()).tolist() == surrogate.tolist()
    assert surrogate.sum().item() / 10 == pytest.approx(0.003432, abs=2e-6)
