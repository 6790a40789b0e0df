"""Rounds of dynamic sampling, drawn from a seed: on average as many as probability theory says."""

from statistics import fmean

import pytest

from stretto.planner.rounds import draw_rounds
from stretto.scheduler.batch_rules import RoundRule

SEEDS = range(400)


def expected(groups, acceptance, most):
    """(launched, rounds) where a round launches what is missing: every place in the batch is tried until it is filled.

    Tries of a place are geometric, so that without a last round launches are negative binomial, groups / acceptance.
    """
    dropped = 1 - acceptance
    return groups * (1 - dropped**most) / acceptance, sum(1 - (1 - dropped**tried) ** groups for tried in range(most))


@pytest.mark.parametrize("groups", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.25, 0.6, 0.95])
@pytest.mark.parametrize("most", [2, 100])
def test_rounds_and_launches_are_on_average_those_of_the_closed_form(groups, acceptance, most):
    rule = RoundRule(groups=groups, most=most)
    drawn = [draw_rounds(rule, acceptance, seed=seed) for seed in SEEDS]
    launched, rounds = expected(groups, acceptance, most)
    assert fmean(len(each.kept) for each in drawn) == pytest.approx(launched, rel=0.1)
    assert fmean(len(each.sizes) for each in drawn) == pytest.approx(rounds, rel=0.1)
    assert most == 2 or all(len(each.trained) == groups for each in drawn)
    assert most == 2 or launched == pytest.approx(groups / acceptance, rel=1e-6)


@pytest.mark.parametrize("oversample", [1.0, 1.5, 3.0])
def test_every_round_launches_what_the_groups_before_it_left_missing(oversample):
    rule = RoundRule(groups=10, oversample=oversample, most=4)
    for seed in SEEDS[:50]:
        drawn, begun = draw_rounds(rule, 0.3, seed=seed), 0
        for number, size in enumerate(drawn.sizes):
            missing = 10 - sum(drawn.kept[:begun])
            assert size == (rule.again(missing, rounds=number) if number else rule.first) > 0
            begun += size
        assert begun == len(drawn.kept)
        assert drawn.trained == tuple(i for i, kept in enumerate(drawn.kept) if kept)[:10]
        assert len(drawn.trained) == 10 or len(drawn.sizes) == 4


def test_the_same_seed_draws_the_same_and_what_drops_nothing_takes_one_round():
    rule = RoundRule(groups=16, most=5)
    assert draw_rounds(rule, 0.5, seed=3) == draw_rounds(rule, 0.5, seed=3) != draw_rounds(rule, 0.5, seed=4)
    assert draw_rounds(RoundRule(groups=4, oversample=1.5), None, seed=0).sizes == (6,)
    assert draw_rounds(rule, 0.0, seed=0).sizes == (16,) * 5
