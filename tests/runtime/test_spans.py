"""What a step's clock makes of its spans: seconds of stages, idle time, and what was finished last."""

import time

import pytest

from stretto.runtime.spans import REWARD_WORKERS, Clock

DEVICES = {"generate": "localhost/cpu:0", "train": "localhost/cpu:1"}


def clock_after(*pieces):
    """A clock of two cells after (stage, cell, seconds), one after the other."""
    clock = Clock(devices=DEVICES)
    clock.begin()
    for stage, cell, seconds in pieces:
        with clock.piece(stage, cell, step=1, version=0):
            time.sleep(seconds)
    return clock


def cut_off(clock):
    """Has a piece of training end by an error."""
    with pytest.raises(ValueError), clock.piece("train", "train", step=1, version=0):
        time.sleep(0.05)
        raise ValueError


def test_a_piece_that_was_cut_off_was_work():
    clock = clock_after()
    cut_off(clock)
    assert clock.metrics()["seconds/train"] >= 0.05
    assert clock.metrics()["idle"] < 0.9


def test_a_piece_that_was_cut_off_is_not_what_was_finished_last():
    clock = clock_after(("generate", "generate", 0.0))
    cut_off(clock)
    assert "generate of step 1" in clock.last


def test_no_device_is_busy_while_reward_functions_run_beside_it():
    clock = clock_after(("reward", REWARD_WORKERS, 0.05))
    assert clock.metrics()["idle"] == 1.0


def test_reward_functions_are_a_stage_where_no_cell_serves_it():
    clock = clock_after(("reward", REWARD_WORKERS, 0.05))
    assert clock.metrics()["seconds/reward"] >= 0.05


def test_seconds_of_a_reward_model_are_those_of_its_cells():
    clock = clock_after(("reward", REWARD_WORKERS, 0.4), ("reward", "generate", 0.01))
    assert 0.01 <= clock.metrics()["seconds/reward"] < 0.2


def test_reward_functions_have_a_row_of_their_own_in_the_timeline():
    (event,) = clock_after(("reward", REWARD_WORKERS, 0.0)).events()
    assert (event["name"], event["pid"], event["tid"]) == ("reward", "localhost", REWARD_WORKERS)
