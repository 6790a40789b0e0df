"""Length rewards against numbers worked out by hand, each beside the verdict that it is added to."""

from __future__ import annotations

import math

import pytest

from stretto.rewards import length

LENGTHS, RIGHT = [100, 200, 300, 400], [True, False, True, False]


def test_lcpo_exact_pays_for_every_token_away_from_the_target() -> None:
    assert 1 + length.lcpo_exact(1500, target=1000, alpha=3e-4) == pytest.approx(0.85)  # 1 - 0.0003 * 500
    assert 1 + length.lcpo_exact(500, target=1000, alpha=3e-4) == pytest.approx(0.85)
    assert 0 + length.lcpo_exact(1500, target=1000, alpha=3e-4) == pytest.approx(-0.15)  # wrong ones too
    assert length.lcpo_exact(1000, target=1000, alpha=3e-4) == 0


def test_lcpo_max_leaves_a_right_answer_a_share_of_its_reward_and_a_wrong_one_alone() -> None:
    def reward(tokens: int, *, right: bool = True) -> float:
        return right + length.lcpo_max(tokens, right, target=1000, alpha=3e-4, delta=0.5)

    assert reward(1500) == pytest.approx(0.35)  # 0.0003 * -500 + 0.5
    assert reward(1000) == pytest.approx(0.5)
    assert reward(0) == pytest.approx(0.8)  # 0.0003 * 1000 + 0.5
    assert reward(3000) == 0  # clipped: 0.0003 * -2000 + 0.5 is -0.1
    assert length.lcpo_max(0, True, target=10_000, alpha=3e-4, delta=0.5) == 0  # clipped at 1: nothing is lost
    assert reward(1, right=False) == reward(3000, right=False) == 0


def test_kimi_goes_from_the_shortest_to_the_longest_and_gives_wrong_answers_no_bonus() -> None:
    # 0.5 - (l - 100) / 300: 0.5, 1/6, -1/6, -0.5; of the wrong ones the smaller of that and 0
    assert length.kimi(LENGTHS, RIGHT) == pytest.approx([0.5, 0.0, -1 / 6, -0.5])
    assert length.kimi([100, 200], [False, True]) == pytest.approx([0.0, -0.5])
    assert length.kimi([7, 7, 7], [True, False, True]) == [0.0, 0.0, 0.0]
    assert length.kimi([7], [True]) == [0.0] and length.kimi([], []) == []


def test_arora_zanette_compares_with_the_right_answers_of_the_group() -> None:
    # right: 100 and 300, mean 200, deviation 100: sigmoid(-1) = 0.268941, sigmoid(1) = 0.731059
    given = length.arora_zanette(LENGTHS, RIGHT, alpha=0.4)
    assert [right + each for right, each in zip(RIGHT, given, strict=True)] == pytest.approx(
        [0.892423, 0, 0.707577, 0], abs=1e-6
    )
    assert length.arora_zanette([9, 9], [True, True], alpha=0.4) == [-0.2, -0.2]
    assert length.arora_zanette([9, 90], [True, False], alpha=0.4) == [-0.2, 0.0]
    assert length.arora_zanette([9, 90], [False, False], alpha=0.4) == [0.0, 0.0]


def test_cosine_falls_for_right_answers_and_rises_for_wrong_ones() -> None:
    def reward(tokens: int, *, right: bool) -> float:
        ranges = {"right_range": (1.0, 0.5), "wrong_range": (-1.0, -0.5)}
        return right + length.cosine(tokens, right, longest=1000, **ranges)

    assert [reward(tokens, right=True) for tokens in (0, 500, 1000)] == pytest.approx([1.0, 0.75, 0.5])
    assert [reward(tokens, right=False) for tokens in (0, 500, 1000)] == pytest.approx([-1.0, -0.75, -0.5])
    assert reward(250, right=True) == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2)  # 0.926777
    assert reward(5000, right=True) == pytest.approx(0.5)


def test_very_long_answers_overflow_nothing() -> None:
    lengths = [1] * 999 + [10**9]
    given = length.arora_zanette(lengths, [True] * 1000, alpha=1.0)
    assert all(math.isfinite(each) for each in given) and given[-1] == pytest.approx(-1.0)
