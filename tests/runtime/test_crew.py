"""Steps on several cells, in threads of this process: the same weights as on one device, whatever the plan."""

import asyncio
from dataclasses import replace

import pytest

from crewed import alone, distance, together
from running import recipe_in
from stretto.runtime import schedule
from stretto.scheduler.records import GroupStart
from stretto.workers.launchers.inprocess import ThreadLauncher
from stretto.workers.worker import Worker
from tiers import slow_but

RATE = 1e-4
"""Adam makes a gradient that is nothing but rounding as long as any other, times this."""

STAGES = {
    "model__dtype": "float64",
    "optimizer__lr": RATE,
    "roles": {"critic": {"name": "scratch"}, "reward_model": {"name": "scratch"}},
    "rewards": [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model", "weight": 0.5}],
    "algorithm": {"name": "ppo", "kl": {"coef": 0.1}},
}
"""A reward model, a reference and a critic, all with something to say."""

NUMBERS = ("loss", "grad_norm", "tokens/trained", "kl/reference")


@pytest.mark.parametrize(
    "strategy", slow_but("interleave", "elastic", of=["flatten", "interleave", "separate", "elastic"])
)
def test_every_strategy_ends_with_the_weights_of_one_device(strategy, tmp_path):
    kl = {"coef": 0.1, "estimator": "k2"}
    recipe = recipe_in(tmp_path, model__dtype="float64", optimizer__lr=RATE, algorithm__kl=kl)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    weights, crewed, metrics = asyncio.run(together(recipe, tmp_path, strategy))
    assert distance(single, weights) < 1e-10
    for name in NUMBERS:
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)
    assert 0 <= metrics["idle"] < 1


@pytest.mark.parametrize(
    ("strategy", "devices", "changes"),
    [
        ("flatten", 2, {}),
        ("elastic", 4, {"batch": {"prompts": 1, "samples": 3, "updates": 2, "epochs": 2}}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("flatten", 3, {"algorithm": {"name": "dapo", "clip": [1e-5, 1e-5]}}),
                ("interleave", 2, STAGES),
                ("separate", 2, {"batch__updates": 3}),
                ("elastic", 2, {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}}),
                ("elastic", 3, {"algorithm": {"name": "reinforce_pp"}}),
            ]
        ),
    ],
)
def test_several_updates_a_step_are_those_of_one_device(strategy, devices, changes, tmp_path):
    usual = {"model__dtype": "float64", "optimizer__lr": RATE, "batch__updates": 2}
    recipe = recipe_in(tmp_path, **{**usual, **changes})
    single, reports = asyncio.run(alone(recipe, tmp_path))
    weights, crewed, _ = asyncio.run(together(recipe, tmp_path, strategy, devices=devices))
    assert distance(single, weights) < 1e-10
    assert any(report["clip/share"] for report in reports) == ("algorithm" in changes and strategy == "flatten")
    for name in ("loss", "grad_norm", "tokens/trained", "updates/skipped", "clip/share"):
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)


@pytest.mark.parametrize("name", slow_but("dapo", "reinforce_pp", of=["dapo", "reinforce_pp", "rloo", "gspo"]))
@pytest.mark.parametrize("strategy", slow_but("elastic", of=["flatten", "elastic"]))
def test_algorithms_that_drop_or_need_the_whole_batch_are_exact_too(name, strategy, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", algorithm={"name": name})
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, strategy, devices=3))
    assert distance(single, weights) < 1e-10


def test_a_cell_without_work_contributes_nothing(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", batch={"prompts": 1, "samples": 2})
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, "flatten", devices=4))
    assert distance(single, weights) < 1e-10


def test_devices_that_train_one_model_add_up_alike_whatever_else_one_has_a_slice_of(tmp_path):
    def make(spec):
        beside = {"reward": (spec.device, "another")} if spec.device == "localhost/cpu:1" else {}
        return Worker(replace(spec, slices=beside))

    recipe = recipe_in(tmp_path, model__dtype="float64", optimizer__lr=RATE, deadlines={"train": 20})
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, "flatten", launcher=ThreadLauncher(make)))
    assert distance(single, weights) < 1e-10


def test_an_adapter_is_trained_on_several_cells(tmp_path):
    adapter = {"kind": "lora", "rank": 4, "alpha": 8}
    kl = {"coef": 0.1, "estimator": "k2"}
    changes = {"model__adapter": adapter, "optimizer__lr": RATE, "algorithm__kl": kl}
    recipe = recipe_in(tmp_path, model__dtype="float64", **changes)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, "elastic"))
    assert distance(single, weights) < 1e-10


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("interleave", 4),
        ("elastic", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("flatten", 3), ("interleave", 2), ("separate", 4)]),
    ],
)
def test_reward_models_and_critics_are_stages_that_change_nothing_wherever_they_are(strategy, devices, tmp_path):
    recipe = recipe_in(tmp_path, **STAGES)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    weights, crewed, metrics = asyncio.run(together(recipe, tmp_path, strategy, devices=devices))
    assert distance(single, weights) < 1e-10
    for name in NUMBERS:
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)
    assert {"seconds/reward", "seconds/reference", "seconds/value"} <= metrics.keys()


@pytest.mark.parametrize("name", slow_but("dapo", of=["dapo", "grpo"]))
def test_groups_are_dropped_by_what_a_reward_model_says_alike_everywhere(name, tmp_path):
    changes = {"optimizer__lr": RATE, "rewards": STAGES["rewards"][1:], "roles": {"reward_model": {"name": "scratch"}}}
    changes |= {"evaluate__every": 0, "checkpoint__best": None, "batch__oversample": 1.5 if name == "dapo" else 1.0}
    recipe = recipe_in(tmp_path, model__dtype="float64", algorithm={"name": name}, **changes)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, "elastic", devices=3))
    assert distance(single, weights) < 1e-10


@pytest.mark.parametrize("strategy", slow_but("elastic", of=["flatten", "elastic"]))
def test_a_cell_is_given_what_its_cache_holds_and_the_weights_stay_those_of_one_device(strategy, tmp_path, monkeypatch):
    given, terms_of = [], schedule.terms_of
    monkeypatch.setattr(schedule, "terms_of", lambda *rest: given.append(terms_of(*rest)) or given[-1])
    recipe = recipe_in(tmp_path, model__dtype="float64", optimizer__lr=RATE, engine__memory_share=1e-7)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, strategy))
    assert distance(single, weights) < 1e-10
    assert all(
        slots < recipe.batch.samples * recipe.batch.prompts / 2 for terms in given for slots in terms.slots.values()
    )


def test_a_prompt_is_counted_once_for_its_group():
    asked = GroupStart(prompt="p", prompt_tokens=800, samples=8, expected=10.0)
    assert schedule.slots_of(2100, [asked], longest=110) == 10
    assert schedule.slots_of(100, [asked], longest=110) == 1
    assert schedule.slots_of(1100, [], longest=110) == 10


def test_reward_functions_take_seconds_where_there_is_no_reward_model(tmp_path):
    *_, metrics = asyncio.run(together(recipe_in(tmp_path), tmp_path, "elastic"))
    assert metrics["seconds/reward"] > 0
