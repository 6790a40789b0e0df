"""Speeds are found again from lanes and pieces that were made with them."""

import pytest

from stretto.scheduler.speed_estimator import SpeedEstimator


def lane_seconds(lengths, *, tick, each):
    """What a lane takes that decodes these answers from the same moment on."""
    active = [sum(length > done for length in lengths) for done in range(max(lengths))]
    return sum(tick + each * (count - 1) for count in active)


def test_the_two_numbers_of_a_decode_step_are_found_again():
    speed = SpeedEstimator(round_seconds=0.25)
    for lengths in ([10, 10, 10], [40, 3, 2], [100], [7] * 30):
        seconds = lane_seconds(lengths, tick=0.03, each=0.002)
        speed.lane(seconds=seconds, longest=max(lengths), tokens=sum(lengths), context=0)
    speeds = speed.speeds()
    assert (speeds.tick, speeds.tick_each) == (pytest.approx(0.03), pytest.approx(0.002))


def test_one_lane_alone_does_not_tell_the_two_apart():
    speed = SpeedEstimator(round_seconds=0.25)
    speed.lane(seconds=2.0, longest=100, tokens=100, context=0)
    speeds = speed.speeds()
    assert (speeds.tick, speeds.tick_each) == (pytest.approx(0.02), 0.0)


@pytest.mark.parametrize("times", [1.0, 2.0, 3.0])
def test_where_lanes_are_always_alike_the_engines_tell_the_two_apart(times):
    """Of two cells, one always has fewer answers and takes longer: it would seem that answers take nothing."""
    speed, few, many, shares = SpeedEstimator(round_seconds=0.25), 300, 300 * times, {}
    for cell, tokens, slower in (("slow", few, times), ("fast", many, 1.0)):
        fixed, grows = 0.02 * 40, 0.001 * tokens
        speed.lane(seconds=slower * (fixed + grows), longest=40, tokens=int(tokens), context=0, cell=cell)
        shares[cell] = fixed / (fixed + grows)
    speed.decoded({})
    speed.decoded(shares)
    speeds = speed.speeds()
    assert (speeds.tick - speeds.tick_each) / speeds.tick_each == pytest.approx(20)
    assert speeds.on("slow").tick / speeds.on("fast").tick == pytest.approx(times)


def test_a_forward_over_the_prompts_is_not_taken_for_decode_steps():
    speed = SpeedEstimator(round_seconds=0.25)
    speed.piece("train", seconds=4.0, tokens=1000)
    for lengths, prompts in ([10, 10, 10], 512), ([40, 3, 2], 1536), ([100], 512), ([7] * 30, 4 * 512):
        decoding = lane_seconds(lengths, tick=0.03, each=0.002)
        longest, tokens = max(lengths), sum(lengths)
        speed.lane(seconds=0.002 * prompts + decoding, longest=longest, tokens=tokens, context=prompts)
    speeds = speed.speeds()
    assert (speeds.tick, speeds.tick_each) == (pytest.approx(0.03), pytest.approx(0.002))


def test_a_move_costs_a_round_and_a_forward():
    speed = SpeedEstimator(round_seconds=0.25)
    speed.piece("train", seconds=3.0, tokens=1000)
    speed.decay()
    assert (speed.speeds().switch, speed.speeds().again) == (0.25, pytest.approx(0.003 / 2))
    assert speed.speeds().per_token == {"train": pytest.approx(0.003)}


def test_before_the_first_step_something_is_assumed():
    assert SpeedEstimator(round_seconds=0.25).speeds().tick > 0
