"""What the closed forms say of each other: equal models and linear scaling leave nothing to place."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interleaved import interleave_frozen, interleave_pairs
from stretto.placement import closed_forms as closed
from stretto.placement.closed_forms import Stages

AT = Stages(
    generate=100.0, old=5.0, reference=6.0, reward=7.0, value=5.0, train=30.0, fit=30.0, publish=2.0, switch=1.0
)
seconds = st.floats(0.0, 1000.0)


def test_flatten_is_the_sum():
    assert closed.flatten(AT) == 100 + 5 + 6 + 7 + 5 + 30 + 30 + 2 + 2


def test_equal_frozen_models_that_scale_linearly_gain_nothing_side_by_side():
    at = replace(AT, reference=6.0, reward=6.0)
    halves = replace(at, reference=12.0, reward=12.0)
    assert interleave_frozen(halves) == closed.flatten(at)


def test_frozen_models_that_do_not_scale_gain_the_shorter_one():
    assert interleave_frozen(AT) == closed.flatten(AT) - 6.0


def test_pairs_run_side_by_side():
    assert interleave_pairs(AT) == 100 + max(5 + 6, 5 + 7) + 30 + 2 + 2


@given(stages=st.lists(seconds, min_size=1, max_size=5), sync=seconds)
def test_a_pipeline_of_one_piece_is_the_sum_of_its_stages(stages, sync):
    assert closed.pipeline(stages, 1, sync) == pytest.approx(sync + sum(stages))


@given(stages=st.lists(seconds, min_size=1, max_size=5), pieces=st.integers(1, 50))
def test_more_pieces_never_hurt_and_never_beat_the_longest_stage(stages, pieces):
    more = closed.pipeline(stages, pieces + 1)
    assert max(stages) - 1e-9 <= more <= closed.pipeline(stages, pieces) + 1e-9


def test_elastic_that_moves_nobody_is_flatten():
    same = closed.elastic(AT, ranks=8, moved=0, tail=40.0, slower_tail=40.0, ready=1.0, costs=0.0)
    assert same == closed.flatten(AT)


@given(moved=st.integers(0, 7), tail=st.floats(0.0, 100.0), ready=st.floats(0.0, 1.0), costs=st.floats(0.0, 20.0))
def test_elastic_gains_at_most_the_moved_share_of_the_tail(moved, tail, ready, costs):
    took = closed.elastic(AT, ranks=8, moved=moved, tail=tail, slower_tail=tail, ready=ready, costs=costs)
    gain = closed.flatten(AT) - took
    assert -1e-9 <= gain <= moved / 8 * tail + 1e-9
