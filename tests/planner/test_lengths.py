"""Length distributions: the mean is the mean of what is generated, prompts resemble themselves, seeds repeat."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import RecipeError
from stretto.planner.cost.lengths import PROMPT_SHARE, LengthDistribution
from stretto.recipe.schema import Response


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.02, 0.9), sigma=st.floats(0.1, 1.4))
def test_the_mean_is_that_of_what_is_generated_cut_answers_included(share, sigma):
    lengths = LengthDistribution(mean=share * 8192, sigma=sigma, cap=8192)
    drawn = np.array(lengths.sample(4000, 8))
    assert drawn.max() <= 8192
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.1)
    assert (drawn == 8192).mean() == pytest.approx(lengths.cut, abs=0.03)


def test_without_spread_every_answer_has_the_mean_length():
    assert LengthDistribution(mean=1024, sigma=0.0, cap=1024).sample(3, 4) == ((1024,) * 4,) * 3


def test_the_published_tails_come_out_of_a_spread_of_one():
    lengths = LengthDistribution(mean=1000, sigma=1.05, cap=16384)
    middle = lengths.quantile(0.5)
    assert lengths.quantile(0.75) / middle == pytest.approx(2.0, abs=0.1)
    assert 10 < lengths.quantile(0.99) / middle < 13
    assert max(map(max, lengths.sample(128, 8))) / middle > 20


def test_the_prompt_explains_most_of_the_spread():
    logs = np.log(LengthDistribution(mean=800, sigma=1.0, cap=10**6).sample(4000, 8))
    assert logs.mean(axis=1).var() / logs.var() == pytest.approx(PROMPT_SHARE + (1 - PROMPT_SHARE) / 8, abs=0.03)


def test_the_same_seed_gives_the_same_lengths_and_another_seed_others():
    lengths = LengthDistribution(mean=100, sigma=1.0, cap=500)
    assert lengths.sample(8, 8, seed=3) == lengths.sample(8, 8, seed=3)
    assert lengths.sample(8, 8, seed=3) != lengths.sample(8, 8, seed=4)


def test_recorded_lengths_are_drawn_as_they_were():
    recorded = np.array([5, 9, 9, 40])
    lengths = LengthDistribution.from_samples(recorded, cap=40)
    drawn = np.array(lengths.sample(2000, 4))
    assert set(drawn.flat) == {5, 9, 40}
    assert (drawn == 9).mean() == pytest.approx(0.5, abs=0.05)
    assert (lengths.mean, lengths.cut, lengths.quantile(1.0)) == (recorded.mean(), 0.25, 40)


def test_a_recipe_states_a_distribution():
    lengths = LengthDistribution.of(Response(mean=28.0, sigma=0.6, cap=64))
    assert math.exp(lengths.mu) < 28 < lengths.quantile(0.9) <= 64


def test_a_mean_above_the_cap_is_refused():
    with pytest.raises(RecipeError, match="above the cap"):
        LengthDistribution.of(Response(mean=100.0, cap=64))
