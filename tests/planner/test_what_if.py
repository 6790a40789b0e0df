"""What a change would bring follows from measured durations: fitted as they were made, and simulated as they run."""

from dataclasses import replace

import pytest

from simulated import plan_of
from stretto.planner.what_if import (
    Change,
    MeasuredRun,
    PieceTimes,
    fitted_lanes,
    gains,
    step_seconds,
    verdict_seconds,
    with_budget,
)
from stretto.scheduler.speed_estimator import SHARE


def run_of(strategy="flatten", devices=1, **more):
    """A run of two groups of four answers of ten tokens, with durations that are round numbers."""
    usual = {
        "plan": plan_of(strategy, devices),
        "steps": (((0, (10,) * 4), (0, (10,) * 4)),),
        "seconds": 20.0,
        "tick": 1.0,
        "tick_each": 0.0,
        "pieces": {"train": PieceTimes(fixed=0.0, per_token=0.125)},
        "verdict": 0.0,
        "reward_workers": 1,
        "update": 0.0,
        "budgets": {"train": 1000},
    }
    return MeasuredRun(**usual | more)


def test_fixed_and_per_token_seconds_come_apart():
    made = PieceTimes(fixed=0.3, per_token=0.002)
    noisy = [(made.seconds(tokens, 99) * (1 + 0.01 * (-1) ** tokens), tokens) for tokens in range(40, 90, 3)]
    found = PieceTimes.fitted([*noisy, (60.0, 64)], budget=99)  # one that waited for something else
    assert found.fixed == pytest.approx(0.3, rel=0.1) and found.per_token == pytest.approx(0.002, rel=0.25)


def test_pieces_of_one_size_or_of_several_micro_batches_promise_nothing_of_larger_ones():
    assert PieceTimes.fitted([(1.0, 100), (1.1, 101)], budget=999) == PieceTimes(
        fixed=0.0, per_token=pytest.approx(1.05 / 100.5)
    )
    falling = PieceTimes.fitted([(2.0, 10), (1.0, 20)], budget=99)
    assert falling.per_token == 0.0 and falling.fixed == 1.5
    several = PieceTimes.fitted([(2.0, 10), (3.0, 20)], budget=15)
    assert several == PieceTimes(fixed=0.0, per_token=pytest.approx(2.5 / 15))


def test_decode_steps_come_out_of_whole_lanes():
    pieces = {"train": PieceTimes(fixed=5.0, per_token=0.004)}
    lanes = []
    for longest, tokens, context in ((20, 100, 50), (30, 90, 60), (12, 80, 40), (25, 160, 50)):
        lanes.append((0.02 * longest + 0.001 * (tokens - longest) + 0.002 * context, longest, tokens, context))
    assert fitted_lanes(lanes, pieces) == (pytest.approx(0.02), pytest.approx(0.001))


def test_lanes_that_are_all_alike_are_told_apart_by_what_the_engine_measured():
    """Of a batch of a hundred answers that took 0.02 + 0.001 x 100 a step, and a first lane that took far longer."""
    lane = (0.02 * 30 + 0.001 * 3000, 30, 3000, 0)
    overhead = 0.02 * 30 / lane[0]
    tick, each = fitted_lanes([(9.0, 30, 3000, 0), lane, lane, lane], {}, overhead=overhead)
    assert (tick, each) == (pytest.approx(0.021), pytest.approx(0.001))


def test_lanes_that_are_much_alike_let_a_further_answer_take_a_forward_of_its_tokens():
    pieces = {"train": PieceTimes(fixed=5.0, per_token=0.004)}
    lanes = [(3.0 + noise, 20, 1000 + more, 50) for noise, more in ((0.1, 1), (-0.1, 3), (0.0, 2))]
    tick, each = fitted_lanes(lanes, pieces)
    assert each == 0.004 * SHARE
    assert tick * 20 + each * 982 == pytest.approx(3.0 - each * 50, rel=1e-3)


def test_a_step_is_generation_then_training_then_the_update():
    assert step_seconds(run_of()) == pytest.approx(10 + 80 * 0.125)
    assert step_seconds(run_of(update=3.0)) == pytest.approx(23.0)


def test_verdicts_wait_for_a_worker():
    # Eight answers end together after 10 s; one worker needs 8 x 2 s for them, four need 2 x 2 s.
    assert step_seconds(run_of(verdict=2.0)) == pytest.approx(10 + 16 + 10)
    assert step_seconds(run_of(verdict=2.0, reward_workers=4)) == pytest.approx(10 + 4 + 10)


@pytest.mark.parametrize(("answers", "workers", "each"), [(8, 2, 4.0), (2, 8, 16.0), (0, 2, 0.0)])
def test_a_verdict_takes_what_busy_workers_took(answers, workers, each):
    assert verdict_seconds(16.0, answers=answers, workers=workers) == each


def test_larger_micro_batches_save_what_each_costs():
    run = run_of(pieces={"train": PieceTimes(fixed=2.0, per_token=0.125)}, budgets={"train": 10})
    assert step_seconds(run) == pytest.approx(10 + 8 * (2.0 + 10 * 0.125))
    told = PieceTimes.shared_out([(26.0, 80)], overhead=16 / 26, budget=10)
    assert (told.fixed, told.per_token) == (pytest.approx(2.0), pytest.approx(0.125))
    assert step_seconds(with_budget(run, 100)) == pytest.approx(10 + 2.0 + 10)


def test_gains_stand_in_order_and_what_is_not_simulated_stays():
    run = run_of(seconds=40.0, verdict=2.0)  # 4 s more than the simulation has
    more = [
        Change(key=f"workers={n}", what="", apply=lambda run, n=n: replace(run, reward_workers=n)) for n in (1, 4, 8)
    ]
    found = gains(run, more)
    assert [gain.change.key for gain in found] == ["workers=8", "workers=4", "workers=1"]
    assert [gain.seconds for gain in found] == pytest.approx([26.0, 28.0, 40.0]) and found[1].share == pytest.approx(
        0.3
    )


def test_devices_that_wait_for_each_other_are_seen():
    apart, shared = (run_of(name, 2, tick_each=1.0) for name in ("separate", "elastic"))
    assert step_seconds(shared) < 0.7 * step_seconds(apart)  # decoding on two devices, not on one
