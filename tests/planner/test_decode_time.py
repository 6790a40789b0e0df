"""One lane of continuous batching against the sum over ticks, and what must hold whatever the lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.planner.cost.decode_time import decode

lengths_of = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def tick(batch, context):
    return 1.0 + 0.25 * batch


def test_one_answer_takes_one_tick_per_token():
    assert decode([7], 10, tick, slots=8, pool=1e9).seconds == pytest.approx(7 * 1.25)


@given(lengths=lengths_of)
def test_with_room_for_all_it_is_the_sum_over_the_sorted_lengths(lengths):
    ordered = [*sorted(lengths, reverse=True), 0]
    expected = sum(tick(j + 1, 0) * (ordered[j] - ordered[j + 1]) for j in range(len(lengths)))
    done = decode(lengths, 3, tick, slots=len(lengths), pool=1e9)
    assert done.seconds == pytest.approx(expected, rel=1e-9)
    assert (done.ticks, done.preempted) == (max(lengths), 0)


@given(lengths=lengths_of)
def test_growing_caches_cost_what_a_walk_over_single_ticks_says(lengths):
    def growing(batch, context):
        return 0.1 + 0.01 * batch * context

    expected = 0.0
    for t in range(max(lengths)):
        live = [length for length in lengths if length > t]
        expected += growing(len(live), 4 + t + 0.5)
    assert decode(lengths, 4, growing, slots=99, pool=1e9).seconds == pytest.approx(expected, rel=1e-9)


def test_waves_when_there_are_fewer_slots_than_answers():
    assert decode([10] * 6, 0, tick, slots=2, pool=1e9).seconds == pytest.approx(3 * 10 * 1.5)


def test_prompts_are_prefilled_when_they_are_admitted():
    done = decode([10] * 4, 5, tick, slots=2, pool=1e9, prefill=lambda tokens: 0.1 * tokens)
    assert done.seconds == pytest.approx(2 * (10 * 1.5 + 1.0))


@settings(deadline=None)
@given(lengths=lengths_of, pool=st.integers(80, 400), slots=st.integers(1, 12))
def test_every_answer_is_generated_once_and_nothing_is_faster_than_possible(lengths, pool, slots):
    prompt = 10
    seen = []

    def watched(batch, context):
        seen.append(batch)
        return tick(batch, context)

    done = decode(lengths, prompt, watched, slots=slots, pool=pool)
    assert all(0 < end <= done.seconds for end in done.ends)
    assert done.ticks >= max(lengths)
    assert max(seen) <= slots
    whole = decode(lengths, prompt, tick, slots=len(lengths), pool=1e9)
    assert done.seconds >= whole.seconds - 1e-9


def test_caches_that_outgrow_the_pool_push_out_the_newest():
    done = decode([50, 50, 50], 10, tick, slots=3, pool=100)
    assert done.preempted > 0
    assert done.ends[0] < done.ends[1] <= done.ends[2]


def test_one_answer_longer_than_the_pool_still_ends():
    assert decode([50], 10, tick, slots=3, pool=20).ticks == 50


def test_the_same_lengths_take_the_same_time():
    lengths = [3, 50, 17, 17, 4] * 5
    first, second = (decode(lengths, 9, tick, slots=4, pool=150) for _ in range(2))
    assert first == second
