"""Steps that are taken to fit constants: real workers in threads of this process, on a tiny model."""

import asyncio
from dataclasses import replace

import pytest

from stretto.bench.calibration_steps import CalibrationWorker, prompt_of, trial_recipe
from stretto.bench.measure import PROBES, own, recipes, runnable, taken
from stretto.bench.ours import RATE
from stretto.environments.render import Renderer
from stretto.errors import RecipeError
from stretto.models.scratch import character_tokenizer
from stretto.placement.cluster import parse_cluster
from stretto.planner.calibrate import StepNotes, fit, parts
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import search, variants_of
from stretto.planner.workload import workload_of
from stretto.recipe.schema import Adapter, ModelSection, Placement, Recipe, RewardPart, RoleModel, Roles, Scratch
from stretto.workers.launchers.inprocess import ThreadLauncher

SCRATCH = Scratch(layers=1, width=16, heads=2, characters="0123456789=")
RECIPE = Recipe.model_validate(
    {
        "model": ModelSection(name="scratch", scratch=SCRATCH, adapter=Adapter(rank=2), dtype="float32"),
        "batch": {"prompts": 2, "samples": 2, "lengths": {"prompt": 20, "response": {"mean": 4, "cap": 6}}},
        "engine": {"max_new_tokens": 6},
    }
)


def setting_of(cluster="2xcpu", tmp_path=None):
    return PlanningProblem.of(workload_of(RECIPE, tmp_path), parse_cluster(cluster))


def threads(devices, **_):
    return ThreadLauncher(CalibrationWorker)


def test_own_workloads_tell_short_from_long_few_from_many_and_scored_from_not(tmp_path):
    asks = list(own(setting_of(tmp_path=tmp_path)))
    assert {ask.choice.devices for ask in asks} == {1, 2}
    assert {ask.choice.strategy for ask in asks} == {"flatten", "separate"}
    assert {"reference" in ask.setting.workload.roles for ask in asks} == {True, False}
    assert max(probe.prompt for probe in PROBES) > 10 * min(probe.prompt for probe in PROBES)
    counts = [probe.prompts * probe.samples for probe in PROBES]
    assert max(counts) >= 16 * min(counts)


def test_a_scratch_model_of_a_trial_has_room_for_every_workload(tmp_path):
    longest = max(probe.prompt + probe.lengths.cap for probe in PROBES)
    assert longest > SCRATCH.context
    for ask in own(setting_of(tmp_path=tmp_path)):
        assert trial_recipe(RECIPE, ask.setting.workload).model.scratch.context >= longest
    large = RECIPE.model_copy(update={"model": ModelSection(name="scratch", scratch=Scratch(context=4096))})
    assert trial_recipe(large, ask.setting.workload).model.scratch.context == 4096


def test_a_trial_states_a_rate_where_the_hidden_size_is_not_known(tmp_path):
    hub = RECIPE.model_copy(update={"model": ModelSection(name="org/name")})
    assert hub.optimizer.lr == "auto"
    assert trial_recipe(hub, setting_of(tmp_path=tmp_path).workload).optimizer.peak == RATE


@pytest.mark.parametrize("change", [{"updates": 4}, {"staleness": 1}])
def test_a_recipe_whose_steps_no_trial_takes_is_measured_by_our_own_workloads_alone(change, tmp_path):
    setting = setting_of(tmp_path=tmp_path)
    setting = replace(setting, workload=replace(setting.workload, **change))
    assert list(recipes(setting, search(setting, variants_of(Placement())).ready)) == []
    assert {(ask.setting.workload.updates, ask.setting.workload.staleness) for ask in own(setting)} == {(1, 0)}


@pytest.mark.slow
def test_steps_are_taken_as_they_were_asked_for_and_every_second_of_them_is_part_of_something(tmp_path):
    setting = setting_of(tmp_path=tmp_path)
    best = runnable(search(setting, variants_of(Placement())), setting)
    scored = [ask for ask in own(setting) if "reference" in ask.setting.workload.roles][:2]
    asks = [*scored, *recipes(setting, best)]
    told = []
    seen = asyncio.run(taken(RECIPE, tmp_path, asks, note=told.append, launch=threads, rounds=1))
    assert len(told) == 1 + len(asks)
    assert f"{len(asks)}/{len(asks)}" in told[-1]
    for ask, step in zip(asks, seen, strict=True):
        ended = {event.arguments[0]: event.arguments[1] for event in step.notes.told if event.what == "ended"}
        drawn = ask.setting.workload.drawn
        assert ended == {(i, j): tokens for i, row in enumerate(drawn) for j, tokens in enumerate(row)}
        found = list(parts(step, StepNotes.of(step.notes)))
        assert {part.name for part in found} >= {"train", "rest"}
        assert all(0 < part.seconds <= step.seconds for part in found)
    assert all(rate > 0 for rate in fit(seen, setting.costs.rates).rates.values())


def test_a_reward_model_scores_the_steps_that_have_one_and_no_others(tmp_path):
    judged = RECIPE.model_copy(
        update={
            "roles": Roles(reward_model=RoleModel(name="scratch")),
            "rewards": (*RECIPE.rewards, RewardPart(name="model", kind="model")),
        }
    )
    settings = [PlanningProblem.of(workload_of(each, tmp_path), parse_cluster("2xcpu")) for each in (RECIPE, judged)]
    asks = [next(recipes(each, runnable(search(each, variants_of(Placement(), "flatten")), each))) for each in settings]
    seen = asyncio.run(taken(RECIPE, tmp_path, asks, note=lambda text: None, launch=threads, rounds=2))
    assert [any(part.name == "reward" for part in parts(step, StepNotes.of(step.notes))) for step in seen] == [
        False,
        True,
    ]


def test_devices_that_are_not_here_are_not_measured(tmp_path):
    setting = setting_of("2000xcpu", tmp_path)
    with pytest.raises(RecipeError, match="this host has no localhost/cpu:"):
        runnable(search(setting, variants_of(Placement(), "flatten")), setting)


@pytest.mark.parametrize("tokens", [8, 20, 300])
def test_a_prompt_has_the_tokens_that_it_should_have(tokens):
    renderer = Renderer(character_tokenizer("0123456789: a"), stop=frozenset())
    first, second = (prompt_of(number, tokens, renderer, filler=" a"[:1]) for number in (10_000, 10_001))
    assert len(first.tokens) == tokens
    assert first.tokens.tolist() != second.tokens.tolist()
