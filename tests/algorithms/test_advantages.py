"""Advantages of one group, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.advantages import group_normalized, leave_one_out, reward_itself

REWARDS = np.array([1.0, 0.0, 0.5, 0.0])
"""Mean 1.5 / 4 = 0.375; differences from it 0.625, -0.375, 0.125, -0.375."""

rewards_of_a_group = st.lists(st.floats(-100, 100), min_size=2, max_size=12).map(np.array)


def test_reinforce_takes_the_reward_itself():
    assert reward_itself(REWARDS).tolist() == [1.0, 0.0, 0.5, 0.0]


def test_rloo_subtracts_the_mean_of_the_others():
    by_hand = [1 - 0.5 / 3, 0 - 1.5 / 3, 0.5 - 1 / 3, 0 - 1.5 / 3]
    np.testing.assert_allclose(leave_one_out(REWARDS), by_hand, rtol=1e-14)
    np.testing.assert_allclose(leave_one_out(REWARDS), [0.833333, -0.5, 0.166667, -0.5], atol=5e-7)


def test_grpo_divides_by_the_sample_deviation_plus_an_epsilon():
    squares = 0.625**2 + 0.375**2 + 0.125**2 + 0.375**2  # 0.6875
    deviation = (squares / 3) ** 0.5  # over n - 1; 0.478714
    by_hand = [difference / (deviation + 1e-4) for difference in (0.625, -0.375, 0.125, -0.375)]
    np.testing.assert_allclose(group_normalized(REWARDS), by_hand, rtol=1e-14)
    np.testing.assert_allclose(group_normalized(REWARDS), [1.30531, -0.783186, 0.261062, -0.783186], atol=5e-6)


def test_grpo_with_another_epsilon_gives_the_other_published_numbers():
    np.testing.assert_allclose(
        group_normalized(REWARDS, epsilon=1e-6), [1.30558, -0.783348, 0.261116, -0.783348], atol=5e-6
    )


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -7.3])
def test_a_group_without_variance_teaches_nothing(value):
    same = np.full(5, value)
    np.testing.assert_allclose(group_normalized(same), 0, atol=1e-9)
    np.testing.assert_allclose(leave_one_out(same), 0, atol=1e-9)


def test_a_group_of_one_has_nothing_to_compare_with():
    assert group_normalized(np.array([3.0])).tolist() == [0.0]


@given(rewards_of_a_group, st.floats(-50, 50))
def test_what_is_added_to_every_reward_changes_no_baselined_advantage(rewards, shift):
    np.testing.assert_allclose(leave_one_out(rewards + shift), leave_one_out(rewards), atol=1e-9)
    np.testing.assert_allclose((group_normalized(rewards + shift)).sum(), 0, atol=1e-6)


@given(rewards_of_a_group)
def test_rloo_is_the_centred_reward_stretched_by_n_over_n_minus_1(rewards):
    n = len(rewards)
    np.testing.assert_allclose(leave_one_out(rewards), n / (n - 1) * (rewards - rewards.mean()), atol=1e-9)
