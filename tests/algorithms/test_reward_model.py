"""The reward model's loss: numbers worked out by hand, and the gradient that the formula has."""

import math

import numpy as np
import pytest
import torch

from stretto.algorithms import reward_model
from stretto.algorithms.base import TokenStreams, build
from stretto.recipe.schema import PairwiseRanking
from stretto.runtime.preferences import calibration_error, evaluation_of


def rows(*margins):
    """Streams of pairs with these margins."""
    count = 2 * len(margins)
    return TokenStreams(
        advantage=torch.tensor(np.repeat(margins, 2)),
        engine=torch.zeros(count),
        conversation=torch.arange(count),
        lengths=torch.ones(count, dtype=torch.long),
    )


SCORES = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 1.0], dtype=torch.float64)
"""A pair that is right by 1, one that is wrong by 3, and one that is even."""


def test_the_loss_is_that_of_bradley_and_terry_less_the_margin():
    found = reward_model.bradley_terry(SCORES, rows(0.0, 0.5, 0.0))
    by_hand = [math.log1p(math.exp(-1)), math.log1p(math.exp(3.5)), math.log(2)]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-12)
    assert reward_model.right(SCORES, rows(0.0, 0.0, 0.0)).tolist() == [1.0, 0.0, 0.5]
    assert reward_model.difference(SCORES, rows(0.0, 0.0, 0.0)).tolist() == [1.0, -3.0, 0.0]
    assert reward_model.off_centre(SCORES, rows(0.0, 0.0, 0.0), coef=0.1).tolist() == pytest.approx([0.9, 0.9, 0.4])


def test_the_gradient_pulls_a_pair_apart_by_how_unlikely_its_order_is():
    scores = SCORES.clone().requires_grad_()
    reward_model.bradley_terry(scores, rows(0.0, 0.5, 0.0)).sum().backward()
    wrong = [1 / (1 + math.exp(1)), 1 / (1 + math.exp(-3.5)), 0.5]
    assert scores.grad.tolist() == pytest.approx([sign * each for each in wrong for sign in (-1, 1)], rel=1e-12)


def test_centring_is_a_term_of_its_own_only_where_it_is_asked_for():
    assert [term.name for term in build(PairwiseRanking()).terms] == ["ranking"]
    centered = build(PairwiseRanking(centring=0.01))
    assert [term.name for term in centered.terms] == ["ranking", "centring"]
    assert centered.whole


def test_held_out_pairs_give_accuracy_brier_score_and_calibration_error():
    chance = np.array([0.9, 0.9, 0.9, 0.9, 0.6, 0.6, 0.4, 0.2])
    found = evaluation_of(np.log(chance / (1 - chance)), np.zeros(8))
    assert found.accuracy == 6 / 8
    assert found.measures["eval/brier"] == pytest.approx(np.mean((1 - chance) ** 2))
    assert found.measures["eval/loss"] == pytest.approx(np.mean(-np.log(chance)))
    # Confidence .9: four, all right; .8: one, wrong; .6: three, two of them right.
    assert found.measures["eval/ece"] == pytest.approx((4 * 0.1 + 0.8 + abs(2 - 3 * 0.6)) / 8)
    low, high = found.measures["eval/ece_low"], found.measures["eval/ece_high"]
    assert 0 <= low < high <= 1
    assert found.interval[0] < found.accuracy < found.interval[1]


def test_a_model_that_knows_nothing_is_half_right_and_calibrated():
    found = evaluation_of(np.zeros(10), np.zeros(10))
    assert (found.accuracy, calibration_error(np.full(10, 0.5))) == (0.5, 0.0)
    assert found.measures["eval/loss"] == pytest.approx(math.log(2))
