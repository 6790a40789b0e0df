"""Spans become Chrome-trace events, and idle time counts every second of a cell once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.report.timeline import Span, idle, to_events


def span(cell, start, seconds):
    return Span(stage="train", cell=cell, start=start, seconds=seconds, step=1)


def test_an_event_has_microseconds_and_every_argument_of_the_contract():
    made = Span(
        stage="generate",
        cell="cpu",
        start=1.5,
        seconds=0.25,
        step=3,
        groups=8,
        tokens=900,
        shared=100,
        version=2,
        simulated=True,
    )
    assert to_events([made], "laptop") == [
        {
            "name": "generate",
            "ph": "X",
            "pid": "laptop",
            "tid": "cpu",
            "ts": 1_500_000,
            "dur": 250_000,
            "args": {"step": 3, "groups": 8, "tokens": 900, "shared": 100, "version": 2, "simulated": True},
        }
    ]


@pytest.mark.parametrize(
    ("spans", "cells", "share"),
    [
        ([], ["a"], 1.0),
        ([span("a", 0, 10)], ["a"], 0.0),
        ([span("a", 0, 10)], ["a", "b"], 0.5),
        ([span("a", 2, 3), span("a", 3, 1)], ["a"], 0.7),
        ([span("a", 2, 3), span("a", 4, 3)], ["a"], 0.5),
        ([span("a", -5, 10), span("a", 8, 10)], ["a"], 0.3),
        ([span("a", 20, 5), span("b", 0, 10)], ["a"], 1.0),
        ([span("a", 0, 5)], ["a", "a"], 0.5),
    ],
)
def test_idle_is_the_share_of_cell_seconds_without_work(spans, cells, share):
    assert idle(spans, cells, 0.0, 10.0) == pytest.approx(share)


def test_nothing_is_idle_where_there_is_no_time_or_no_cell():
    assert idle([span("a", 0, 1)], ["a"], 3.0, 3.0) == 0.0
    assert idle([], [], 0.0, 1.0) == 0.0


pieces = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-3, 12), st.integers(0, 8)), max_size=8)


@given(pieces=pieces)
def test_idle_equals_counting_seconds_one_by_one(pieces):
    free = [
        all(cell != name or not start <= second < start + length for name, start, length in pieces)
        for cell in "ab"
        for second in range(10)
    ]
    assert idle([span(*piece) for piece in pieces], ["a", "b"], 0, 10) == pytest.approx(sum(free) / 20)
