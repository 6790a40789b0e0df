"""Models in groups side by side: any partition, any sizes, each model with a layout of its own."""

from dataclasses import replace
from fractions import Fraction

import pytest

from planning import PPO, setting_of
from stretto.errors import RecipeError
from stretto.placement.build import plan_of
from stretto.placement.partitions import ModelGroup, set_partitions
from stretto.placement.strategies import MODELS, groupings
from stretto.planner.candidate import Candidate
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.enumerate import Candidates, Variant
from stretto.planner.estimate import estimate
from stretto.planner.search import named_by, search, variants_of
from stretto.recipe.schema import Placement

GROUPS = Variant(strategy="interleave", groups=True)


def models(choice):
    """The models of each group; none where a preset is what they come to."""
    return tuple(group.models for group in choice.fractions if isinstance(group, ModelGroup))


def grid_of(setting):
    return Candidates(setting, StageTimes(setting), MemoryFits(setting))


def test_four_models_have_fifteen_partitions_and_every_model_is_in_one_group():
    found = list(set_partitions(tuple(MODELS)))
    assert len(found) == len(set(found)) == 15
    assert all(sorted(model for group in groups for model in group) == sorted(MODELS) for groups in found)
    assert groupings(frozenset({"generate", "train"})) == ()
    assert groupings(frozenset({"generate", "train", "reference"})) == ((("actor",), ("reference",)),)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_groups_share_no_device_and_leave_none_out(size):
    setting = setting_of("8xH100", "qwen2.5-0.5b", roles=PPO)
    seen = set()
    for choice in grid_of(setting).choices(GROUPS, size):
        places = choice.places(setting.workload.roles)
        ranges = {tuple(range(first, first + count)) for first, count in places.values()}
        if choice.label == "interleave I1":
            continue
        assert sorted(device for group in ranges for device in group) == list(range(size))
        assert places["generate"] == places["train"] and places["value"] == places["fit"]
        seen.add(frozenset(ranges))
    assert seen


def test_a_critic_that_is_larger_than_the_actor_gets_more_devices():
    setting = setting_of("8xH100", "qwen2.5-0.5b", roles=PPO)
    shapes = dict(setting.workload.shapes) | dict.fromkeys(("value", "fit"), named_shape("qwen2.5-7b"))
    setting = replace(setting, workload=replace(setting.workload, shapes=shapes))
    grid = grid_of(setting)
    apart = ("actor", "reference"), ("critic", "reward")
    cuts = [cut for cut in grid.groups.cuts(Candidate(strategy="interleave", devices=8)) if models(cut[1]) == apart]
    _, choice, _ = min(cuts, key=lambda cut: cut[0])
    places = choice.places(setting.workload.roles)
    assert places["fit"][1] > places["train"][1]
    (best,) = search(setting, (GROUPS,)).best
    usual = search(setting, tuple(v for v in variants_of(Placement()) if v.label == "interleave I2")).best
    assert best.step < usual[0].step


def test_each_model_is_divided_in_its_own_way():
    setting = setting_of("8xA100-80", "qwen2.5-0.5b", roles=PPO)
    shapes = dict(setting.workload.shapes) | dict.fromkeys(("value", "fit"), named_shape("qwen2.5-7b"))
    setting = replace(setting, workload=replace(setting.workload, shapes=shapes))
    grid = grid_of(setting)
    alone = (("actor",), ("critic",), ("reference",), ("reward",))
    plan = next(c for _, c, _ in grid.groups.cuts(Candidate(strategy="interleave", devices=8)) if models(c) == alone)
    cells = {cell.role: cell for cell in plan.plan(setting).cells}
    assert len(cells["train"].devices) < len(cells["fit"].devices)
    assert cells["value"].mesh == cells["fit"].mesh


def test_what_is_cut_off_the_search_is_not_faster_by_closed_forms(monkeypatch):
    setting = setting_of("8xA100-80", "llama-7b", roles=PPO)
    few = grid_of(setting)
    best = min(estimate(few.prices, choice) for choice in few.choices(GROUPS, 8) for _ in few.fitting(choice, GROUPS))
    monkeypatch.setattr("stretto.planner.groups.CUTS", 60)
    many = grid_of(setting)
    every = (estimate(many.prices, c) for c in many.choices(GROUPS, 8) for _ in many.fitting(c, GROUPS))
    assert best <= min(every) * 1.001


def test_a_recipe_may_name_its_groups():
    section = Placement(strategy="interleave", fractions={"actor+reference": 0.75, "critic+reward": 0.25})
    devices = tuple(f"localhost/cpu:{index}" for index in range(4))
    plan = plan_of(section, roles=frozenset(PPO), devices=devices)
    assert {cell.role for cell in plan.cells if devices[3] in cell.devices} == {"value", "fit", "reward"}
    assert named_by(section, 4) == "interleave actor+reference:3 critic+reward:1"
    (variant,) = (each for each in variants_of(section) if each.fractions and isinstance(each.fractions[0], ModelGroup))
    assert variant.fractions == (
        ModelGroup(("actor", "reference"), Fraction(3, 4)),
        ModelGroup(("critic", "reward"), Fraction(1, 4)),
    )


@pytest.mark.parametrize(
    ("fractions", "reason"),
    [
        ({"actor+critc": 0.5, "reference+reward": 0.5}, "no model 'critc'"),
        ({"actor+critic": 0.5, "critic+reference+reward": 0.5}, "in two groups"),
        ({"actor+critic": 0.5, "reference+reward": 0.25}, "add up to 3/4"),
        ({"actor+critic": 0.5, "reference": 0.5}, "no group with devices for the stage reward"),
        ({"actor+critic": 0.3, "reference+reward": 0.7}, "gives 3/10 of 4 devices"),
        ({"actor+critic+reference+reward": 1.0, "reward": 0.0}, "in two groups"),
    ],
)
def test_groups_that_cannot_be_are_refused(fractions, reason):
    devices = tuple(f"localhost/cpu:{index}" for index in range(4))
    with pytest.raises(RecipeError, match=reason):
        plan_of(Placement(strategy="interleave", fractions=fractions), roles=frozenset(PPO), devices=devices)
