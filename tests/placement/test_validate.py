"""Plans with one thing wrong with them: each is told, where it is and what to do, and a sound plan is left alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as given_by

from stretto.placement.strategies import MODELS, ORDER, STRATEGIES, StrategyInputs
from stretto.placement.validate import problems

DEVICES = tuple(f"localhost/gpu:{index}" for index in range(4))
ROLES = frozenset({"generate", "reference", "train"})
CRITIC = frozenset(ORDER)


def plan_on(count=2, strategy="flatten", roles=ROLES, **changes):
    return STRATEGIES[strategy].plan(StrategyInputs(devices=DEVICES[:count], roles=roles, **changes))


def with_cell(plan, index, **changes):
    cells = list(plan.cells)
    cells[index] = replace(cells[index], **changes)
    return replace(plan, cells=tuple(cells))


def told(plan, **case):
    """Problems as field -> reason and fix."""
    found = problems(plan, **{"roles": ROLES, "devices": DEVICES} | case)
    return {problem.field: f"{problem.reason} | {problem.fix}" for problem in found}


@given(
    strategy=given_by.sampled_from(sorted(STRATEGIES)),
    hosts=given_by.sampled_from([1, 2]),
    count=given_by.sampled_from([2, 4, 8]),
    roles=given_by.sampled_from([frozenset({"generate", "train"}), ROLES, CRITIC]),
    width=given_by.sampled_from([{}, {"train": 2}, {"generate": 1, "train": 2, "fit": 2}]),
)
def test_what_a_strategy_makes_is_sound(strategy, hosts, count, roles, width):
    devices = tuple(f"host{host}/gpu:{index}" for host in range(hosts) for index in range(count))
    if strategy == "separate" and (hosts, count) == (1, 2):
        width = {}
    plan = STRATEGIES[strategy].plan(StrategyInputs(devices=devices, roles=roles, width=width))
    assert problems(plan, roles=roles, devices=devices) == []


def test_roles_stand_in_one_order_everywhere():
    assert {role for roles in MODELS.values() for role in roles} == set(ORDER)


def test_a_stage_nobody_serves_is_named():
    found = told(plan_on(roles=ROLES), roles=CRITIC)
    assert found["placement.cells"].startswith("no cell serves the stage")
    missing = [p.fix for p in problems(plan_on(), roles=CRITIC, devices=DEVICES)]
    assert missing == ["add one: role: reward", "add one: role: value", "add one: role: fit"]


def test_a_cell_without_work_and_a_role_nobody_knows_are_refused():
    plan = plan_on(1)
    assert "nothing in this recipe needs the stage reference" in str(told(plan, roles={"generate", "train"}))
    found = told(with_cell(plan, 2, role="trian", weights="own"), roles={"generate", "reference"})
    assert found["placement.cells.2.role"] == "there is no role 'trian' | did you mean train?"


def test_more_devices_than_there_are_is_one_sentence_with_both_numbers():
    eight = tuple(f"localhost/gpu:{index}" for index in range(8))
    plan = STRATEGIES["flatten"].plan(StrategyInputs(devices=eight, roles=ROLES))
    (problem,) = problems(plan, roles=ROLES, devices=eight[:6])
    assert problem.field == "placement.cluster"
    assert problem.reason == "need 8 devices, see 6: localhost/gpu:6, localhost/gpu:7 cannot be found"


def test_an_unknown_device_gets_the_nearest_name():
    plan = with_cell(plan_on(1), 1, devices=("localhots/gpu:0",))
    assert told(plan)["placement.cells.1.devices"] == (
        "there is no device localhots/gpu:0 | did you mean localhost/gpu:0?"
    )


@pytest.mark.parametrize(
    ("devices", "reason"), [((), "reference has no device"), ((DEVICES[0], DEVICES[0]), f"names {DEVICES[0]} 2 times")]
)
def test_a_cell_has_each_of_its_devices_once(devices, reason):
    assert reason in told(with_cell(plan_on(1), 1, devices=devices))["placement.cells.1.devices"]


@pytest.mark.parametrize(("name", "reason"), [("generate", "another cell is called generate too"), ("", "has no name")])
def test_names_are_unique(name, reason):
    assert reason in told(with_cell(plan_on(1), 1, name=name))["placement.cells.1.name"]


@pytest.mark.parametrize(
    ("mesh", "field", "reason"),
    [
        ({"tp": 4}, "", "dp_shard 1 x tp 4 x pp 1 is 4 ranks, and train has 2 devices"),
        ({"dp_shard": 2, "tq": 1}, ".tq", "there is no degree 'tq' | did you mean tp?"),
        ({"dp_shard": 2, "tp": 0}, ".tp", "is 0"),
        ({"dp_shard": 2, "ep": 3}, ".ep", "ep 3 does not divide the 2 ranks that hold a layer"),
    ],
)
def test_a_mesh_uses_each_device_once(mesh, field, reason):
    plan = plan_on(2, width={"train": 2})
    index = [cell.role for cell in plan.cells].index("train")
    assert problems(plan, roles=ROLES, devices=DEVICES) == []
    assert reason in told(with_cell(plan, index, mesh=mesh))[f"placement.cells.{index}.mesh{field}"]


def test_experts_may_be_spread_over_the_ranks_that_are_there():
    plan = plan_on(4, width={"train": 4})
    index = [cell.role for cell in plan.cells].index("train")
    assert told(with_cell(plan, index, mesh={"dp_shard": 2, "tp": 2, "ep": 4})) == {}
    piped = told(with_cell(plan, index, mesh={"dp_shard": 2, "pp": 2, "ep": 4}))
    assert "the 2 ranks that hold a layer" in piped[f"placement.cells.{index}.mesh.ep"]


def test_all_cells_that_train_one_model_share_one_layout():
    plan = plan_on(4, width={"train": 2})
    index = [cell.role for cell in plan.cells].index("train")
    found = told(with_cell(plan, index + 1, mesh={"tp": 2}))
    assert found[f"placement.cells.{index + 1}.mesh"] == (
        "train-1 and train-0 train one model in two layouts: 2 devices (tp 2), and 2 devices (dp_shard 2)"
        " | give all train cells the same layout"
    )
    again = told(with_cell(plan, index + 1, devices=plan.cells[index].devices))
    assert "both train on localhost/gpu:1" in again[f"placement.cells.{index + 1}.devices"]


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("borrowed", "'borrowed' says nothing | use own, shared:CELL or gather:CELL"),
        ("shared", "'shared' says nothing"),
        ("shared:train-7", "there is no cell 'train-7' | did you mean train-"),
        ("shared:reference-0", "reference-0 does not train the model that generate-0 needs"),
        ("shared:train-1", "generate-0 has devices that train-1 does not have"),
    ],
)
def test_weights_come_from_a_cell_that_trains_there(weights, reason):
    assert reason in told(with_cell(plan_on(2), 0, weights=weights))["placement.cells.0.weights"]


def test_an_optimizer_is_shared_by_those_that_have_the_same_slices():
    narrow, wide = (replace(plan_on(4, width={"train": width}), optimizer="sharded") for width in (1, 2))
    assert told(narrow) == told(wide) == {}
    assert narrow.sharers("train") == narrow.devices
    assert wide.sharers("train") == tuple(wide.devices[index] for index in (0, 2, 1, 3))


def test_a_cell_on_part_of_a_sharded_trainer_gathers():
    plan = plan_on(2, width={"train": 2})
    assert plan.cells[0].weights == "gather:train"
    assert told(with_cell(plan, 0, weights="shared:train"))["placement.cells.0.weights"].endswith("use gather:train")


def test_a_trainer_has_weights_of_its_own():
    assert told(with_cell(plan_on(1), 2, weights="shared:generate"))["placement.cells.2.weights"].endswith("use own")


@pytest.mark.parametrize(
    ("index", "engine", "reason"),
    [(0, "nativ", "did you mean native?"), (0, None, "generate has none"), (2, "native", "train generates nothing")],
)
def test_an_engine_is_what_a_generate_cell_runs(index, engine, reason):
    assert "no native engine" in told(with_cell(plan_on(1), 2, memory_share=0.4))["placement.cells.2.memory_share"]
    assert reason in told(with_cell(plan_on(1), index, engine=engine))[f"placement.cells.{index}.engine"]


def test_a_device_that_generates_with_others_generates_in_no_other_cell():
    plan = plan_on(2, width={"generate": 2})
    lane = next(cell for cell in plan.cells if cell.role == "generate")
    assert len(lane.devices) == 2 and not told(plan)
    alone = replace(lane, name="alone", devices=lane.devices[:1], mesh={"dp_shard": 1})
    priority = {
        device: (*names, "alone") if device in alone.devices else names for device, names in plan.priority.items()
    }
    found = told(replace(plan, cells=(*plan.cells, alone), priority=priority))
    assert list(found) == [f"placement.cells.{len(plan.cells)}.devices"]
    assert "alone and generate both generate on localhost/gpu:0" in next(iter(found.values()))


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        ("trane", "did you mean train?"),
        ("generate", "works in the phase generate"),
        ("reward", "no cell works in the phase reward on the devices of generate"),
    ],
)
def test_a_cell_sleeps_while_others_work(phase, reason):
    assert reason in told(with_cell(plan_on(1), 0, sleeps=(phase,)))["placement.cells.0.sleeps"]
    assert told(with_cell(plan_on(1), 0, sleeps=("train",))) == {}


def of_role(plan, role):
    return next(index for index, cell in enumerate(plan.cells) if cell.role == role)


@pytest.mark.parametrize(
    ("role", "sleeps", "sound"),
    [
        ("train", ("generate",), True),
        ("train", ("generate", "reference"), False),
        ("train", ("reference",), False),
        ("generate", ("train",), False),
        ("reference", ("generate",), False),
    ],
)
def test_where_stages_flow_an_optimizer_sleeps_until_its_update_and_nothing_else(role, sleeps, sound):
    plan = plan_on(2, "elastic")
    index = of_role(plan, role)
    found = told(with_cell(plan, index, sleeps=sleeps))
    assert found == {} if sound else "stages flow" in found[f"placement.cells.{index}.sleeps"]


def test_an_optimizer_whose_devices_do_not_generate_has_nobody_to_make_room_for():
    plan = plan_on(2, "separate")
    index = of_role(plan, "train")
    found = told(with_cell(plan, index, sleeps=("generate",)))[f"placement.cells.{index}.sleeps"]
    assert "no cell works in the phase generate" in found


def test_nothing_sleeps_where_the_others_are_elsewhere():
    apart = replace(plan_on(2, "separate"), flow="phased")
    assert (
        "no cell works in the phase train" in told(with_cell(apart, 0, sleeps=("train",)))["placement.cells.0.sleeps"]
    )


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (("generate-0", "train-0"), "says nothing about reference-0"),
        (("generate-0", "reference-0", "train-0", "trian-0"), "there is no cell 'trian-0' | did you mean train-0?"),
        (("generate-0", "reference-0", "train-0", "train-1"), "the cell train-1 is not on this device"),
        (("generate-0", "reference-0", "train-0", "train-0"), "names train-0 2 times"),
    ],
)
def test_a_device_serves_exactly_the_cells_that_are_on_it(order, reason):
    plan = plan_on(2)
    found = told(replace(plan, priority=plan.priority | {DEVICES[0]: order}))
    assert [reason in text for text in found.values()] == [True]
    assert list(found) == [f"priority.{DEVICES[0]}"]


def test_a_device_without_an_order_is_told():
    plan = plan_on(2)
    assert list(told(replace(plan, priority={DEVICES[0]: plan.priority[DEVICES[0]]}))) == [f"priority.{DEVICES[1]}"]


def test_a_sampler_may_lag_by_one_version_where_generation_is_apart():
    assert told(plan_on(2, strategy="separate", staleness=1)) == {}
    assert "are not possible" in told(plan_on(2, strategy="separate", staleness=2))["placement.staleness"]
    together = told(plan_on(2, staleness=1))["placement.staleness"]
    assert "generate-0 shares its own with train-0" in together and "strategy: separate" in together
    assert "off-policy twice" in told(plan_on(2, strategy="separate", staleness=1), updates=2)["placement.staleness"]
    assert told(plan_on(2, strategy="separate"), updates=2) == {}
    phased = replace(plan_on(2, strategy="separate", staleness=1), flow="phased")
    assert "no effect" in told(phased)["placement.staleness"]
