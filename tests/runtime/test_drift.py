"""Guards that look at how a run develops: each warns once of what it is for, and of nothing else."""

import pytest

from stretto.errors import GuardError
from stretto.recipe.schema import Guards
from stretto.runtime.drift import LOOKS, WINDOW, DriftGuards

CALM = {"reward/mean": 0.5, "entropy": 1.0, "kl/engine_trainer": 1e-4, "seconds/loop_lag": 0.01, "memory/host_gb": 2.0}


def course(change, *, steps=40):
    """Metrics of so many steps, which a function changes."""
    return [{**CALM, **change(step)} for step in range(steps)]


def warned(folder, rows, *, before=(), **section):
    """What is warned of, in order, as (step, guard)."""
    run = DriftGuards(Guards(**{"warn_disk_gb": None, **section}), folder, before)
    return [(step, each.guard) for step, row in enumerate(rows) for each in run.after_step(row)]


DEVELOPMENTS = {
    "reward_collapse": lambda step: {"reward/mean": 0.9 if step < 20 else 0.1},
    "entropy_collapse": lambda step: {"entropy": 2.0 if step < 20 else 0.01},
    "mismatch_growth": lambda step: {"kl/engine_trainer": 1e-3 if step < 20 else 0.03},
    "loop_lag": lambda step: {"seconds/loop_lag": 9.0 if step == 20 else 0.0},
    "memory_growth": lambda step: {"memory/host_gb": 2 + 0.1 * step},
}


@pytest.mark.parametrize("guard", DEVELOPMENTS)
def test_each_warns_once_with_advice_and_nothing_else_warns(guard, tmp_path):
    rows = course(DEVELOPMENTS[guard])
    found = warned(tmp_path, rows)
    assert [name for _, name in found] == [guard]
    assert warned(tmp_path, rows, **{guard: None}) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda step: {},
        lambda step: {"reward/mean": -3 + 0.05 * step},  # negative rewards that grow
        lambda step: {"reward/mean": 0.5 + 0.1 * (-1) ** step},  # noise
        lambda step: {"entropy": 1.0 - step / 60},
        lambda step: {"kl/engine_trainer": 1e-9 if step < 20 else 5e-8},  # growth of nothing
        lambda step: {"memory/host_gb": 3.0 if step > 2 else 0.5},  # a process that settles
    ],
)
def test_what_is_usual_is_not_warned_of(change, tmp_path):
    assert warned(tmp_path, course(change)) == []


def test_negative_rewards_that_fall_back_are_a_collapse(tmp_path):
    rows = course(lambda step: {"reward/mean": -3 + 0.1 * step if step < 25 else -3.0})
    assert [name for _, name in warned(tmp_path, rows)] == ["reward_collapse"]


def test_a_resumed_run_remembers_its_best_steps(tmp_path):
    before = course(lambda step: {"reward/mean": 0.9}, steps=2 * WINDOW)
    after = course(lambda step: {"reward/mean": 0.1}, steps=WINDOW)
    assert warned(tmp_path, after) == []
    assert [name for _, name in warned(tmp_path, after, before=before)] == ["reward_collapse"]


def test_what_was_over_in_between_is_warned_of_again(tmp_path):
    rows = course(lambda step: {"seconds/loop_lag": 9.0 if step in (3, 4, 9) else 0.0})
    assert warned(tmp_path, rows) == [(3, "loop_lag"), (9, "loop_lag")]


def test_a_warning_that_the_recipe_lists_ends_the_run(tmp_path):
    with pytest.raises(GuardError, match=r"guards\.loop_lag: the event loop did not run for 9\.0 s"):
        warned(tmp_path, course(DEVELOPMENTS["loop_lag"]), stop_on=("loop_lag",))


def test_a_disk_that_fills_up_is_warned_of_before_the_run_stops(tmp_path):
    assert warned(tmp_path, course(lambda step: {}, steps=2), warn_disk_gb=1e9) == [(0, "warn_disk_gb")]


def test_every_guard_can_end_a_run():
    assert Guards(stop_on=tuple(LOOKS)).stop_on == tuple(LOOKS)
