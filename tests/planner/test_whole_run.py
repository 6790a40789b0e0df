"""What a run is expected to take and cost: steps and evaluations are counted, and the interval has both its reasons."""

from dataclasses import replace

import pytest

from planning import setting_of
from stretto.planner.enumerate import Variant
from stretto.planner.saved_calibration import SavedCalibration, keep, this_machine
from stretto.planner.search import search
from stretto.planner.whole_run import (
    ANOTHER,
    PUBLISHED,
    UNSEEN,
    between,
    duration,
    evaluation_of,
    forecast_run,
    model_error,
    relative_spread,
    vstar_samples,
)
from stretto.recipe.load import parse_recipe

RECIPE = {
    "model": {"name": "scratch"},
    "run": {"steps": 25},
    "evaluate": {"every": 10, "prompts": 50},
    "placement": {"price_per_gpu_hour": 2.0},
}


def run(recipe=None, **given):
    asked = {"step": 4.0, "evaluation": 5.0, "spread": 0.0, "error": 0.0, "devices": 3, **given}
    return forecast_run(parse_recipe({**RECIPE, **(recipe or {})}), **asked)


def test_steps_evaluations_and_the_price_of_all_devices_are_counted():
    told = run()
    assert told.evaluations == 4  # after 0, 10, 20 and 25
    assert told.seconds == pytest.approx(25 * 4.0 + 4 * 5.0)
    assert told.interval == (told.seconds, told.seconds)
    assert told.device_hours == pytest.approx(told.seconds * 3 / 3600)
    assert told.cost == pytest.approx(told.device_hours * 2.0)
    assert "25 steps and 4 evaluations take 2 min" in str(told)


def test_answers_of_an_evaluation_are_decoded_together_and_those_for_pass_at_k_with_them():
    assert run({"evaluate": {"every": 0}}).seconds == pytest.approx(100.0)
    setting = setting_of("1xH100")
    (found,) = search(setting, (Variant(strategy="flatten"),)).best

    def evaluation(**told):
        return evaluation_of(found, parse_recipe({**RECIPE, "evaluate": {"prompts": 16, **told}}))

    step = found.stages["generate"]  # of 16 prompts x 8, where the longest answer takes most of it
    assert evaluation(pass_k=7) == pytest.approx(step, rel=0.1)
    assert 0.8 * step < evaluation() < evaluation(pass_k=7) < evaluation(prompts=64, pass_k=7) < 2 * step
    assert evaluation(every=0) == 0


def test_v_star_is_counted_where_the_recipe_says_of_how_many_prompts():
    source = {"kind": "reasoning_gym", "name": "countdown", "count": 450}
    asked = {"algorithm": {"name": "astar_po"}, "task": {"source": source, "holdout": {"prompts": 50}}}
    told = run(asked, valuing=30.0)
    assert (told.valued, told.seconds) == (400, pytest.approx(120 + 0.4 * 30.0))
    assert "25 steps, 4 evaluations and V* of 400 prompts take 2.2 min" in str(told)
    told = run({"algorithm": {"name": "astar_po"}}, valuing=30.0)
    assert (told.valued, told.seconds) == (0, pytest.approx(120))
    assert str(told).endswith("; a table of V* takes 30 s more for each 1,000 prompts")
    assert vstar_samples(parse_recipe({**RECIPE, **asked})) == 8
    assert vstar_samples(parse_recipe({**RECIPE, "algorithm": {"name": "astar_po", "vstar": {"table": "t"}}})) is None
    assert vstar_samples(parse_recipe(RECIPE)) is None


def test_a_cpu_that_was_not_measured_is_told_with_the_error_of_another_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [model_error(setting_of(each)) for each in ("8xH100", "2xcpu")] == [PUBLISHED, ANOTHER]
    fitted = SavedCalibration(
        machine=this_machine(), device="cpu", model="m", date="2026-01-01", steps=1, error=0.01, rates={}
    )
    keep(fitted)
    assert model_error(setting_of("2xcpu")) == UNSEEN
    keep(replace(fitted, error=0.3))
    assert model_error(setting_of("2xcpu")) == 0.3


def test_the_spread_of_steps_averages_out_and_the_error_of_the_model_does_not():
    few, many = (run({"run": {"steps": steps}, "evaluate": {"every": 0}}, spread=0.3) for steps in (4, 400))
    assert few.interval[1] / few.seconds - 1 == pytest.approx(1.28 * 0.3 / 2)
    assert many.interval[1] / many.seconds - 1 == pytest.approx(1.28 * 0.3 / 20)
    off = [run({"run": {"steps": steps}, "evaluate": {"every": 0}}, error=0.1) for steps in (4, 400)]
    assert {round(each.interval[1] / each.seconds - 1, 3) for each in off} == {round(0.1 * 1.28 / 0.6745, 3)}
    assert off[0].interval[0] * off[0].interval[1] == pytest.approx(off[0].seconds ** 2)


def test_costs_below_a_cent_are_not_nothing():
    cheap = run({"placement": {"price_per_gpu_hour": 0.001}})
    assert "cost 0.0001" in str(cheap)
    assert run({"placement": {}}).cost is None
    assert str(run({"placement": {}})).endswith("device hours")


def test_durations_have_the_unit_that_people_use():
    assert [duration(seconds) for seconds in (0.457, 95, 150, 9000, 2e6)] == [
        "0.457 s",
        "95 s",
        "2.5 min",
        "2.5 h",
        "23.1 days",
    ]
    assert between(150, 130, 170) == "2.5 min (2.17 to 2.83 min)"
    assert between(150, 100, 170) == "2.5 min (100 s to 2.83 min)"


def test_the_spread_of_one_number_is_nothing():
    assert relative_spread([3.0]) == 0.0
    assert relative_spread([2.0, 4.0]) == pytest.approx(2**0.5 / 3)
