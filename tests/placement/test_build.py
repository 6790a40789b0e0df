"""From the recipe's section to a plan: strategies by name, shares of devices, cells by hand and what they leave out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as given_by

from stretto.errors import RecipeError
from stretto.placement.build import devices_for, plan_of
from stretto.placement.strategies import STRATEGIES
from stretto.recipe.load import parse_recipe
from stretto.recipe.schema import Placement

DEVICES = tuple(f"localhost/gpu:{index}" for index in range(4))
ROLES = frozenset({"generate", "reference", "reward", "train"})


def section(**keys):
    """As a recipe gives it: read strictly, lists and all."""
    return parse_recipe({"placement": keys}).placement


def refused(devices=DEVICES, roles=ROLES, **keys):
    """Problems of a section as field -> reason and fix."""
    with pytest.raises(RecipeError) as error:
        plan_of(section(**keys), roles=roles, devices=devices)
    return {problem.field: f"{problem.reason} | {problem.fix}" for problem in error.value.problems}


@pytest.mark.parametrize("devices", [DEVICES[:1], DEVICES])
def test_auto_lets_every_device_do_everything(devices):
    plan = plan_of(section(), roles=ROLES, devices=devices)
    assert plan == plan_of(section(strategy="flatten"), roles=ROLES, devices=devices)
    assert len(plan.cells) == len(ROLES) * len(devices)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_the_cells_of_a_plan_may_be_put_into_a_recipe_as_they_were_written(strategy):
    plan = plan_of(section(strategy=strategy), roles=ROLES, devices=DEVICES)
    cells = json.loads(json.dumps(plan.to_json()))["cells"]
    assert plan_of(section(strategy=strategy, cells=cells), roles=ROLES, devices=DEVICES) == plan


@pytest.mark.parametrize(
    ("fractions", "reference", "reward"),
    [
        (None, DEVICES[:2], DEVICES[2:]),
        ("I1", DEVICES[:2], DEVICES[2:]),
        ([1, 1, 0.5, 0.5], DEVICES[:2], DEVICES[2:]),
        ([1.0, 1.0, 0.252, 0.748], DEVICES[:1], DEVICES[1:]),
        ("I2", DEVICES[:2], DEVICES[2:]),
    ],
)
def test_interleave_takes_shares_or_a_preset(fractions, reference, reward):
    plan = plan_of(section(strategy="interleave", fractions=fractions), roles=ROLES, devices=DEVICES)
    on = {role: tuple(d for cell in plan.cells if cell.role == role for d in cell.devices) for role in ROLES}
    assert (on["reference"], on["reward"]) == (reference, reward)
    assert on["train"] == (DEVICES[:2] if fractions == "I2" else DEVICES)


def test_shares_that_do_not_fit_the_devices_are_refused_as_they_were_written():
    told = refused(strategy="interleave", fractions=[1, 1, 0.3, 0.7])
    assert "gives 3/10 of 4 devices to the reference" in told["placement.fractions"]
    assert "four" in refused(strategy="interleave", fractions=[1, 1])["placement.fractions"]


def test_shares_without_interleave_have_no_effect():
    assert "no effect" in refused(strategy="elastic", fractions="I1")["placement.fractions"]
    cells = [{"role": role, "devices": [DEVICES[0]]} for role in ROLES]
    assert "no effect" in refused(strategy="interleave", fractions="I1", cells=cells)["placement.fractions"]


def test_cells_by_hand_need_only_a_role_and_devices():
    cells = [
        {"role": "train", "devices": DEVICES[:2], "mesh": {"tp": 2}},
        {"role": "generate", "devices": [DEVICES[0]]},
        {"role": "generate", "devices": [DEVICES[2]], "name": "apart"},
    ]
    ours = plan_of(section(cells=cells), roles={"generate", "train"}, devices=DEVICES)
    assert [cell.weights for cell in ours.cells] == ["own", "gather:train", "own"]
    plan = plan_of(section(cells=cells), roles={"generate", "train"}, devices=DEVICES, engine="vllm")
    assert [cell.name for cell in plan.cells] == ["train", "generate-0", "apart"]
    assert [cell.weights for cell in plan.cells] == ["own"] * 3, "another process has another's tensors"
    assert [cell.engine for cell in plan.cells] == [None, "vllm", "vllm"]
    assert plan.cells[0].mesh == {"dp_shard": 1, "tp": 2, "pp": 1, "ep": 1}
    assert plan.priority == {
        DEVICES[0]: ("generate-0", "train"),
        DEVICES[1]: ("train",),
        DEVICES[2]: ("apart",),
    }
    assert (plan.strategy, plan.flow) == ("by hand", "phased")


def test_a_strategy_beside_cells_decides_the_flow():
    cells = [{"role": role, "devices": [DEVICES[0]]} for role in ("generate", "train")]
    plan = plan_of(section(strategy="elastic", cells=cells), roles={"generate", "train"}, devices=DEVICES)
    assert (plan.strategy, plan.flow, plan.tail["move"]) == ("elastic", "streamed", True)


def test_a_cell_that_cannot_be_read_is_told_with_all_that_is_wrong_with_it():
    told = refused(cells=[{"rol": "train", "devices": DEVICES[0], "mesh": {"tp": "two"}, "token_budget": 0}])
    assert told == {
        "placement.cells.0.role": "is missing | every cell has a role and devices",
        "placement.cells.0.devices": "is no list of names | write such as [localhost/gpu:0]",
        "placement.cells.0.mesh.tp": "is no section of whole numbers | write such as {tp: 2}",
        "placement.cells.0.token_budget": "is no whole number above 0 | write such as 4096, or leave it out",
        "placement.cells.0.rol": "a cell has no such key | did you mean role?",
    }


@pytest.mark.parametrize("mesh", [{"tp": 0}, {"tp": -1}, {"tp": 3}, {"tp": 10**30}])
def test_a_mesh_by_hand_that_makes_no_sense_is_a_problem_and_no_crash(mesh):
    cells = [{"role": "train", "devices": DEVICES[:2], "mesh": mesh}, {"role": "generate", "devices": DEVICES[2:3]}]
    assert all(
        field.startswith("placement.cells.0.mesh") for field in refused(roles={"generate", "train"}, cells=cells)
    )


WORDS = given_by.sampled_from(
    ["train", "generate", "reward", "own", "shared:train", "gather:", "native", "", "x", *DEVICES]
)
VALUES = given_by.one_of(
    WORDS,
    given_by.lists(WORDS, max_size=3),
    given_by.integers(-2, 4),
    given_by.dictionaries(given_by.sampled_from(["tp", "ep", "dp_shard", "q"]), given_by.integers(-1, 4), max_size=3),
    given_by.none(),
)
KEYS = given_by.sampled_from(["name", "role", "devices", "mesh", "engine", "weights", "sleeps", "token_budget", "q"])
CELL = given_by.fixed_dictionaries(
    {"role": WORDS, "devices": given_by.lists(given_by.sampled_from(DEVICES), max_size=2)}
)


@given(cells=given_by.lists(given_by.builds(lambda a, b: a | b, CELL, given_by.dictionaries(KEYS, VALUES, max_size=3))))
def test_whatever_cells_say_there_is_a_plan_or_a_list_of_problems(cells):
    try:
        plan = plan_of(Placement(cells=tuple(cells)), roles={"generate", "train"}, devices=DEVICES)
    except RecipeError as error:
        assert all(problem.field and problem.reason and problem.fix for problem in error.problems)
    else:
        assert {cell.role for cell in plan.cells} == {"generate", "train"}


def test_no_cells_at_all_serve_nothing():
    assert "no cell serves" in refused(cells=[])["placement.cells"]


def test_one_version_behind_is_for_generation_that_is_apart():
    plan = plan_of(section(strategy="separate", staleness=1), roles=ROLES, devices=DEVICES)
    assert plan.staleness == 1
    assert list(refused(strategy="elastic", staleness=1)) == ["placement.staleness"]


def test_a_cluster_asks_for_devices_and_gets_those_that_are_seen():
    seen = ("a/cpu:0", "a/cpu:1", "a/gpu:0", "b/gpu:0")
    assert devices_for(section(), seen) == ("a/cpu:0",)
    assert devices_for(section(cluster="1xcpu"), seen) == ("a/cpu:0",)
    assert devices_for(section(cluster="1xgpu"), seen) == ("a/gpu:0",)
    assert devices_for(section(cluster="2xH100"), seen) == ("a/gpu:0", "b/gpu:0")
    three = ("a/cpu:0", "a/cpu:1", "localhost/cpu:2")
    assert devices_for(section(cluster="3xcpu"), seen) == three, "processes may share cores"
    with pytest.raises(RecipeError, match="need 8 devices of kind gpu, see 2"):
        devices_for(section(cluster="8xH100"), seen)


def test_where_the_cluster_is_left_open_it_is_what_cells_by_hand_name():
    cells = [
        {"role": role, "devices": ["a/cpu:1", "a/gpu:0"][:count]} for role, count in (("train", 2), ("generate", 1))
    ]
    assert devices_for(section(cells=cells), ("a/cpu:0", "a/cpu:1", "a/gpu:0")) == ("a/cpu:1", "a/gpu:0")
    assert devices_for(section(cells=cells), ("a/cpu:0",)) == ("a/cpu:0",)  # which their plan then lacks
    beyond = ({"role": "generate", "devices": ["localhost/cpu:9"]}, {"role": "train", "devices": ["localhost/cpu:10"]})
    assert devices_for(section(cells=beyond), ("localhost/cpu:0",)) == ("localhost/cpu:9", "localhost/cpu:10")


def test_devices_of_other_hosts_are_taken_as_they_are_told():
    assert devices_for(section(cluster="2x1xcpu"), ["localhost/cpu:0"]) == ("host0/cpu:0", "host1/cpu:0")
    assert len(devices_for(section(cluster="16xH100"), [])) == 16
