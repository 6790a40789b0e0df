"""Elastic against flatten on paper: a sleeping optimizer makes room and costs its bytes; what is slower says why."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planning import PPO, setting_of
from stretto.placement.validate import problems
from stretto.planner import explain
from stretto.planner.candidate import Candidate
from stretto.planner.compare import NOTICED, parts_of, slower_because, usual_of
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.problem import ModelSplit
from stretto.planner.search import search, variants_of
from stretto.planner.simulate import simulate
from stretto.recipe.schema import Placement

BOTH = tuple(variant for variant in variants_of(Placement()) if variant.strategy in ("flatten", "elastic"))


@pytest.fixture(scope="module")
def random_workloads():
    folder = str(Path(__file__).parents[2] / "scripts" / "evidence")
    sys.path.insert(0, folder)
    import random_workloads

    yield random_workloads
    sys.path.remove(folder)


def test_an_optimizer_that_sleeps_while_stages_flow_leaves_its_memory_to_caches():
    setting = setting_of("4xH100", "qwen2.5-3b")
    awake = Candidate(strategy="elastic", devices=4, budget=4096)
    asleep = replace(awake, sleeps=True)
    rooms, prices = MemoryFits(setting), StageTimes(setting)
    one, other = (rooms.room(choice).sides[0] for choice in (awake, asleep))
    optimizer = one.phases["generate"].optimizer
    assert optimizer > 0
    assert other.phases["generate"] == one.phases["generate"]._replace(optimizer=0.0)
    assert other.phases["train"] == one.phases["train"]._replace(optimizer=0.0)
    assert other.phases["publish"].optimizer == optimizer  # awake for the update
    assert other.pool == pytest.approx(one.pool + optimizer / one.token)
    assert other.asleep > optimizer
    more = prices.ending(asleep).switch - prices.ending(awake).switch
    assert more == pytest.approx(2 * setting.costs.move(optimizer, setting.site(ModelSplit(), 0, 4)))


def test_its_plan_says_who_sleeps_and_passes_every_rule():
    setting = setting_of("4xH100", "qwen2.5-3b", roles=PPO)
    choice = Candidate(strategy="elastic", devices=4, budget=4096, sleeps=True)
    plan = choice.plan(setting)
    assert problems(plan, roles=setting.workload.roles, devices=setting.names) == []
    sleeping = {cell.role: cell.sleeps for cell in plan.cells}
    assert sleeping.pop("train") == sleeping.pop("fit") == ("generate",)
    assert set(sleeping.values()) == {()}
    assert not any("sleeps" in told for told in choice.waits_for(setting.workload))


def slowly(forecast):
    """Its stages, generating all the time."""
    return {**forecast.stages, "generate": forecast.step * 3}


def test_the_parts_of_a_step_add_up_and_the_largest_is_the_reason():
    setting = setting_of("4xH100", "qwen2.5-3b")
    prices, rooms = StageTimes(setting), MemoryFits(setting)
    usual, streamed = (
        simulate(prices, choice, rooms.room(choice))
        for choice in (Candidate(strategy=name, devices=4, budget=4096) for name in ("flatten", "elastic"))
    )
    for forecast in (usual, streamed):
        assert sum(parts_of(forecast, setting.workload).values()) == pytest.approx(forecast.step)
    assert usual_of(streamed, (streamed, usual)) is usual and usual_of(usual, (streamed, usual)) is None
    lanes = ModelSplit(tp=4), ModelSplit(dp=2, tp=2)
    narrow, alike = (
        replace(streamed, choice=replace(streamed.choice, lane=lane), slots=setting.workload.answers) for lane in lanes
    )
    told = slower_because(replace(narrow, stages=slowly(narrow), step=usual.step * 3), alike, setting.workload)
    assert told is not None and "lanes of 4 devices, cut otherwise, are what fits" in told
    slow = replace(streamed, step=usual.step * 1.5)
    told = slower_because(slow, usual, setting.workload)
    assert told is not None and told.startswith("50.0% slower than flatten") and "waiting" in told
    assert slower_because(replace(streamed, step=usual.step), usual, setting.workload) is None


def test_elastic_is_not_slower_than_flatten_or_the_answer_says_why(random_workloads):
    for _, setting in random_workloads.draw(4):  # scripts/evidence/elastic_on_paper has 200
        found = search(setting, BOTH)
        best = {forecast.choice.label: forecast for forecast in found.best}
        why = explain.why(best["elastic"], found, setting)
        slower = best["elastic"].step > (1 + NOTICED) * best["flatten"].step
        assert slower == ("slower than flatten (" in why), why
