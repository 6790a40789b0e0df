"""A curve in text has the asked size, rises where the numbers rise and never fails on odd ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.report.curve import ASCII, BLOCKS, curve


def test_a_rising_curve_is_drawn_from_low_to_high():
    assert curve([0.0, 0.5, 1.0], 3, 2) == "1 |  ▁█\n0 | ▁██"


def test_few_values_are_stretched_and_many_are_averaged():
    assert curve([0, 1], 4, 1) == "1 | ▁▁██"
    assert curve([0, 0, 4, 0], 2, 1) == "2 | ▁█"


def test_equal_values_draw_a_flat_line_with_one_label():
    assert curve([0.25] * 5, 5, 2) == "     |\n0.25 | ▁▁▁▁▁"


def test_without_a_finite_value_there_is_no_curve():
    assert curve([], 10, 3) == ""
    assert curve([math.nan, math.inf], 10, 3) == ""


@pytest.mark.parametrize("marks", [BLOCKS, ASCII])
@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=50),
    width=st.integers(1, 20),
    height=st.integers(1, 20),
)
def test_every_column_is_filled_from_below_and_the_size_is_kept(marks, values, width, height):
    drawn = curve(values, width, height, marks)
    if not any(map(math.isfinite, values)):
        assert drawn == ""
        return
    rows = [row.partition("| ")[2].ljust(width) for row in drawn.split("\n")]
    assert len(rows) == height
    assert all(len(row) == width for row in rows)
    for column in zip(*reversed(rows), strict=True):
        levels = [marks.index(mark) for mark in column]
        assert levels[0] > 0
        assert levels == sorted(levels, reverse=True)
        assert sum(0 < level < len(marks) - 1 for level in levels) <= 1


@pytest.mark.parametrize(
    "values",
    [
        [5e-324, 0.0, 5e-324],
        [1e-320, 2e-320],
        [-1.7e308, 1.7e308],
        [1.7e308] * 200,
        [5e-324] * 3,
    ],
)
def test_values_at_the_ends_of_floats_are_drawn(values):
    drawn = curve(values, 6, 3).splitlines()
    assert len(drawn) == 3 and all("|" in line for line in drawn)
    assert ("\N{FULL BLOCK}" in drawn[0]) == (len(set(values)) > 1)
