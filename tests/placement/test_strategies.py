"""A strategy is one entry of the table: recipes, rules, plans, the planner, its words and the benches read it there."""

from fractions import Fraction

import pytest

from stretto.checks.rules.base import CheckContext
from stretto.checks.rules.not_available import strategy_exists
from stretto.errors import RecipeError
from stretto.placement import closed_forms, strategies
from stretto.placement.build import plan_of
from stretto.placement.cluster import parse_cluster
from stretto.placement.strategies import STRATEGIES, Strategy, find_strategy
from stretto.planner.candidate import Candidate
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.shapes import named_shape
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import named_by, search, variants_of
from stretto.planner.workload import StepWorkload
from stretto.recipe.describe import plan_sentence
from stretto.recipe.schema import Placement, Recipe

POLICY = frozenset({"generate", "train"})
FIFTH = Strategy(
    name="backwards",
    sentence="the last devices generate, the others score{asking} and train",
    flow="streamed",
    places=lambda devices, roles, division: {
        role: devices[-1:] if role == "generate" else devices[:-1] for role in roles
    },
    seconds=closed_forms.side_by_side,
)


@pytest.fixture
def fifth(monkeypatch):
    monkeypatch.setitem(STRATEGIES, FIFTH.name, FIFTH)


def problem():
    work = StepWorkload(
        shapes=dict.fromkeys(POLICY, named_shape("qwen2.5-0.5b")),
        prompts=8,
        samples=4,
        updates=1,
        prompt=100,
        lengths=LengthDistribution(mean=200.0, sigma=0.5, cap=512),
        adapter=0,
        reading=frozenset({"generate"}),
        precision="bfloat16",
        base="bfloat16",
    )
    return PlanningProblem.of(work, parse_cluster("4xH100"))


def test_a_fifth_strategy_is_one_entry(fifth):
    section = Placement(strategy="backwards", cluster="4xcpu")
    devices = tuple(f"localhost/cpu:{index}" for index in range(4))
    plan = plan_of(section, roles=POLICY, devices=devices)
    assert [cell.devices for cell in plan.cells if cell.role == "generate"] == [devices[-1:]]
    assert (plan.strategy, plan.flow) == ("backwards", "streamed")
    assert plan_sentence(Recipe(placement=section)).startswith("backwards on 4xcpu: the last devices generate, the")
    assert [variant.label for variant in variants_of(Placement(), "backwards")] == [named_by(section)] == ["backwards"]
    (best,) = search(problem(), variants_of(section, "backwards")).best
    assert {cell.devices for cell in best.plan.cells if cell.role == "generate"} == {(max(best.plan.devices),)}


def test_it_is_refused_where_it_cannot_be_and_before_it_is_there(fifth, monkeypatch):
    cannot = {"devices": 4, "roles": POLICY, "staleness": 0}
    assert FIFTH.refusal(**cannot) is None
    assert "two devices" in FIFTH.refusal(**cannot | {"devices": 1})
    assert "only generate" in FIFTH.refusal(**cannot | {"staleness": 1})
    monkeypatch.delitem(STRATEGIES, FIFTH.name)
    with pytest.raises(RecipeError, match="no strategy 'backwards'"):
        plan_of(Placement(strategy="backwards"), roles=POLICY, devices=("localhost/cpu:0",))


@pytest.mark.parametrize(("name", "fix"), [("flaten", "did you mean flatten?"), ("x", "use one of auto, flatten,")])
def test_a_name_that_is_no_strategy_gets_the_nearest_that_is(tmp_path, name, fix):
    recipe = Recipe(placement=Placement(strategy=name))
    scene = CheckContext(root=tmp_path, probes=None, prompts=(), complete=False, planning=True)
    (found,) = strategy_exists(recipe, scene)
    assert (found.field, found.reason) == ("placement.strategy", f"there is no strategy {name!r}")
    assert found.fix.startswith(fix)


def test_only_shares_of_models_are_told_with_a_name():
    assert find_strategy("auto") is STRATEGIES[strategies.DEFAULT]
    assert Candidate(strategy="interleave", devices=4, fractions=strategies.PRESETS["I2"]).label == "interleave I2"
    quarter = (Fraction(1), Fraction(1), Fraction(1, 4), Fraction(3, 4))
    assert Candidate(strategy="interleave", devices=4, fractions=quarter).label == "interleave (1, 1, 1/4, 3/4)"
    assert Candidate(strategy="separate", devices=4, generating=2).label == "separate"
