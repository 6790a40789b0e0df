"""Placements that a user has in mind, and those of others: priced like ours, or refused with where and why."""

import json
from dataclasses import replace

import pytest

from planning import PPO, setting_of
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.placement.baselines import BASELINES
from stretto.placement.strategies import STRATEGIES
from stretto.placement.written import plan_of_file, plan_of_mapping, plan_of_texts
from stretto.planner import sensitivity
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.enumerate import Variant
from stretto.planner.given import forecast_given
from stretto.planner.search import search, variants_of
from stretto.planner.simulate import Forecast
from stretto.planner.whole_run import step_spread
from stretto.recipe.schema import Placement


def about(setting):
    work = setting.workload
    return {"roles": work.roles, "devices": tuple(setting.cluster.devices), "reading": work.reading}


def priced(setting, *texts) -> Forecast:
    return forecast_given(plan_of_texts(texts, **about(setting)), setting, field="--mesh")


@pytest.mark.parametrize("roles", [PPO, PPO[:2]])
def test_our_own_plans_written_as_files_cost_what_the_search_said(tmp_path, roles):
    setting = setting_of("8xH100", "qwen2.5-7b", roles=roles, recompute=True)
    for forecast in search(setting, variants_of(Placement())).best:
        path = tmp_path / f"{forecast.choice.strategy}.json"
        path.write_text(json.dumps(forecast.plan.to_json()))
        again = forecast_given(plan_of_file(path, **about(setting)), setting, field="--cells")
        assert again.step == pytest.approx(forecast.step), forecast.choice.label
        assert [room.pool for room in again.room.sides] == [room.pool for room in forecast.room.sides]


def test_generating_under_zero_3_gathers_parameters_at_every_token():
    setting = setting_of("8xA100-80", "qwen2.5-7b")
    (baseline,) = search(setting, (Variant(strategy="baseline ZeRO-3"),)).best
    cell = next(cell for cell in baseline.plan.cells if cell.role == "generate")
    assert (len(cell.devices), cell.mesh["dp_shard"], cell.weights) == (8, 8, "shared:train")
    longest = max(map(max, setting.workload.drawn))
    gathered = setting.costs.gathers(
        setting.workload.shapes["generate"], setting.site(baseline.choice.lane, 0, 8), "bfloat16"
    )
    assert baseline.stages["generate"] > longest * gathered
    whole = priced(setting, "train=all:dp_shard=8", "generate=all:dp_shard=8")
    assert whole.step == pytest.approx(baseline.step)
    assert priced(setting, "train=all:dp_shard=8", "generate=all:tp=4").step < 0.7 * baseline.step


def test_devices_that_wait_in_turns_are_slower_than_those_that_stream():
    setting = setting_of("8xH100")
    both = (Variant(strategy="baseline split, phased"), Variant(strategy="separate"))
    streams, waits = search(setting, both).best
    assert (waits.choice.strategy, streams.choice.strategy) == ("baseline split, phased", "separate")
    assert waits.plan.flow == "phased" and waits.step > streams.step
    ends = max(s.stop for s in waits.stretches if s.stage == "generate")
    assert all(s.start >= ends for s in waits.stretches if s.stage == "train")


def test_what_is_compared_with_is_never_chosen_or_named_by_a_recipe():
    setting = setting_of("8xH100")
    found = search(setting, (*variants_of(Placement()), *(Variant(strategy=name) for name in BASELINES)))
    assert all(forecast.choice.strategy in STRATEGIES for forecast in found.ready)
    assert not set(BASELINES) & set(STRATEGIES)


def test_roles_lie_on_any_devices_of_which_some_order_has_them_side_by_side():
    setting = setting_of("8xH100")
    odd = plan_of_mapping(
        {"train": {"devices": "0+2+4+6"}, "generate": {"devices": "1+3+5+7"}, "flow": "streamed"},
        field="cells",
        **about(setting),
    )
    apart = priced(setting, "train=0-3", "generate=4-7", "flow=streamed")
    forecast = forecast_given(odd, setting, field="cells")
    assert forecast.step == pytest.approx(apart.step)
    assert {d for cell in forecast.plan.cells if cell.role == "train" for d in cell.devices} == {
        f"localhost/gpu:{index}" for index in (0, 2, 4, 6)
    }


def test_what_hangs_on_it_is_asked_on_the_devices_where_it_lies():
    setting = setting_of("2xH800+2xH20", lengths=LengthDistribution(mean=400.0, sigma=0.0, cap=400))
    assert setting.names[0].startswith("host1")  # what has most bandwidth for its arithmetic generates first
    yours = priced(setting, "generate=0-1", "train=2-3", "flow=streamed")
    (usual,) = search(setting, (Variant(strategy="separate"),)).best
    assert usual.step < yours.step
    assert step_spread(yours, setting) == step_spread(usual, setting) == 0
    ahead = sensitivity._Ahead(setting, usual, yours)
    assert ahead.by_simulation(sensitivity.CONSTANTS[0], 1.0) == pytest.approx(yours.step - usual.step)
    assert ahead.by_closed_forms(sensitivity.CONSTANTS[0], 1.0) == pytest.approx(yours.step - usual.step)


@pytest.mark.parametrize(
    ("texts", "field", "reason"),
    [
        (["train"], "--mesh", "says no role"),
        (["trian=all"], "--mesh: trian", "there is no role"),
        (["train=0-8", "generate=all"], "--mesh: train", "there is no device '0-8' among 8"),
        (["train=all:dp_shard=3", "generate=all"], "--mesh: train", "do not divide the 8"),
        (["train=all:tp=x", "generate=all"], "--mesh: train", "whole numbers"),
        (["train=all:tp=²", "generate=all"], "--mesh: train", "whole numbers"),
        (["train=all", "generate=all", "flow=sideways"], "--mesh: flow", "no flow"),
        (["train=all"], "--mesh", "no cell serves the stage generate"),
        (["train=all", "generate=all", "reward=all"], "--mesh: reward", "has no work"),
        (["train=all", "generate=all", "value=all"], "--mesh: cells.16.role", "has no work"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(texts, field, reason):
    with pytest.raises(RecipeError, match=reason) as raised:
        priced(setting_of("8xH100"), *texts)
    assert raised.value.problems[0].field == field


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [([(0, 2), (1, 3)], "do not lie side by side"), ([(0, 1), (2,), (3,)], "in two layouts")],
)
def test_cells_of_which_no_price_is_known_are_refused(pairs, reason):
    setting = setting_of("4xH100")
    names = tuple(setting.cluster.devices)
    train = [{"role": "train", "devices": [names[index] for index in pair]} for pair in pairs]
    generate = [{"role": "generate", "devices": [name]} for name in names]
    with pytest.raises(RecipeError, match=reason):
        plan = plan_of_mapping({"cells": [*train, *generate]}, field="cells", **about(setting))
        forecast_given(plan, setting, field="cells")


def test_a_placement_that_can_be_executed_counts_among_those_that_can():
    setting = setting_of("2xH100", "qwen2.5-0.5b")
    found = search(setting, (Variant(strategy="flatten"),))
    own = priced(
        setting, "train=host0/gpu:0" if "host0/gpu:0" in setting.names else f"train={setting.names[0]}", "generate=1"
    )
    assert own in found.beside(own, setting.workload).ready


@pytest.mark.parametrize("key", ["flow", "strategy"])
def test_a_list_where_a_name_belongs_is_refused(key):
    setting = setting_of("2xH100")
    cells = [{"role": role, "devices": [setting.names[0]]} for role in ("train", "generate")]
    told = {"cells": cells, key: ["streamed"]}
    if key == "flow":
        with pytest.raises(RecipeError, match="there is no flow"):
            plan_of_mapping(told, field="cells", **about(setting))
    else:
        assert plan_of_mapping(told, field="cells", **about(setting)).strategy == "yours"


def test_what_does_not_fit_is_refused_with_the_part_that_is_too_large():
    setting = setting_of("8xH100", "llama-65b")
    with pytest.raises(RecipeError, match="GB too much; the largest part is"):
        priced(setting, "train=all", "generate=all")
    wide = replace(setting, workload=replace(setting.workload, adapter=8))
    assert priced(wide, "train=all:dp_shard=8", "generate=all:tp=8").step > 0


def test_the_program_shows_them_in_the_same_table(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: none/at-all, shape: qwen2.5-7b, adapter: null}\n")
    asked = ["plan", str(recipe), "--cluster", "8xH100", "--baselines", "--mesh", "train=all:dp_shard=8"]
    assert main([*asked, "--mesh", "generate=all:tp=2", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert {"yours", *BASELINES} <= {plan["strategy"] for plan in plans}
    assert all(plan["runs_today"] == (not plan["waits_for"]) for plan in plans if plan["strategy"] == "yours")
    assert main([*asked, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["field"] == "--mesh"
    alone = ["plan", str(recipe), "--cluster", "1xH100", "--strategy", "separate", "model.shape=qwen2.5-0.5b", "--json"]
    assert main(alone) == 2
    assert "nothing fits" in capsys.readouterr().out
    assert main([*alone, "--mesh", "train=all", "--mesh", "generate=all"]) == 0
    assert [plan["strategy"] for plan in json.loads(capsys.readouterr().out)["plans"]] == ["yours"]
