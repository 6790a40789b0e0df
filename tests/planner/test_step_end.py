"""What follows the last gradient costs what the plan does."""

from dataclasses import replace

import pytest

from planning import PPO
from stretto.placement.cluster import parse_cluster
from stretto.placement.rates import Rates
from stretto.placement.strategies import PRESETS
from stretto.placement.transport import TensorPath
from stretto.planner.candidate import Candidate
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.problem import ModelSplit, PlanningProblem
from stretto.planner.workload import StepWorkload
from stretto.scheduler.records import FORWARD, UPDATE

ROLES = ("generate", "reference", "train")


def prices(cluster="2xH100", roles=ROLES, **changes):
    told = {
        "shapes": dict.fromkeys(roles, named_shape("qwen2.5-3b")), "prompts": 16, "samples": 8, "updates": 1,
        "prompt": 200, "lengths": LengthDistribution(mean=200.0, sigma=0.5, cap=512), "adapter": 0,
        "reading": frozenset({"generate"}), "precision": "bfloat16", "base": "bfloat16", "nccl": True,
    }  # fmt: skip
    return StageTimes(PlanningProblem.of(StepWorkload(**told | changes), parse_cluster(cluster)))


FLATTEN, SEPARATE = Candidate(strategy="flatten", devices=2), Candidate(strategy="separate", devices=2, generating=1)


def test_cells_that_share_tensors_change_phase_for_the_price_of_a_call_each():
    ending = prices().ending(FLATTEN)
    assert ending.publish == 0
    assert ending.switch == pytest.approx(3 * 2 * Rates().phase)


def test_what_sleeps_moves_by_the_link_to_host_memory():
    priced = prices()
    awake, asleep = (priced.ending(replace(FLATTEN, sleeps=sleeps)).switch for sleeps in (False, True))
    device, shape = priced.setting.ordered[0][1], named_shape("qwen2.5-3b")
    frozen, optimizer = 2.0 * shape.params, 12.0 * shape.params
    weights = 2.0 * shape.params  # the reference does not read them
    moved = frozen + 2 * (optimizer + weights)
    assert asleep - awake == pytest.approx(moved / (device.host_link * Rates().host_share), rel=1e-3)


def test_an_engine_of_its_own_loads_a_copy_of_its_own_and_wakes_where_it_sleeps():
    native, apart = prices(), prices(engine="vllm")
    assert apart.ending(FLATTEN).publish > Rates().handover > native.ending(FLATTEN).publish == 0
    asleep, beside = replace(FLATTEN, sleeps=True), replace(SEPARATE, sleeps=True)
    weights = apart.costs.move(2.0 * named_shape("qwen2.5-3b").params, apart.setting.site(FLATTEN.lane, 0, 2))
    slept = apart.ending(asleep).switch - native.ending(asleep).switch
    assert slept == pytest.approx(Rates().wake + 2 * weights, rel=1e-3)
    assert apart.ending(FLATTEN).switch == native.ending(FLATTEN).switch
    assert apart.ending(beside).switch == native.ending(beside).switch  # nobody shares its devices
    ours, theirs = (MemoryFits(each.setting).still(FLATTEN)[0].beside["train"] for each in (native, apart))
    assert theirs.weights - ours.weights == pytest.approx(2.0 * named_shape("qwen2.5-3b").params)
    assert theirs.context == 2 * ours.context


def test_paths_follow_from_devices_and_from_the_recipe():
    def paths(choice, *where, **changes):
        ends = prices(*where, **changes).ends
        return ends.gradient_path(choice), ends.weight_path(choice)

    both = replace(SEPARATE, devices=4, generating=2)
    assert paths(FLATTEN) == (TensorPath.NCCL, TensorPath.SHARED)
    assert paths(FLATTEN, nccl=False) == (TensorPath.GLOO, TensorPath.SHARED)
    assert paths(SEPARATE, nccl=False) == (TensorPath.SHARED, TensorPath.GLOO)
    assert paths(both, "4xH100") == (TensorPath.NCCL, TensorPath.NCCL)
    assert paths(both, "4xcpu", nccl=False) == (TensorPath.GLOO, TensorPath.GLOO)
    assert paths(FLATTEN, engine="vllm")[1] is TensorPath.FILE
    assert paths(SEPARATE, engine="vllm", nccl=False)[1] is TensorPath.GLOO
    cut = replace(FLATTEN, train=ModelSplit(dp=2))
    assert paths(cut, nccl=False) == (TensorPath.NCCL, TensorPath.NCCL)  # torch's own group, inside a cell


def test_through_host_memory_gradients_and_weights_take_longer():
    direct, through = prices(), prices(nccl=False)
    assert through.ending(FLATTEN).update > 2 * direct.ending(FLATTEN).update
    assert through.ending(SEPARATE).publish > 10 * direct.ending(SEPARATE).publish
    assert through.ending(FLATTEN).publish == direct.ending(FLATTEN).publish == 0


@pytest.mark.parametrize(("strategy", "shares"), [("flatten", None), ("interleave", PRESETS["I1"])])
def test_on_one_host_nothing_hangs_on_the_network(strategy, shares):
    choice = Candidate(strategy=strategy, devices=8, fractions=shares, train=ModelSplit(dp=8), frozen=ModelSplit(dp=4))
    priced = prices("8xA100-80", PPO, shapes=dict.fromkeys(PPO, named_shape("llama-7b")))
    slow = StageTimes(priced.setting.repriced(Costs(rates=replace(Rates(), nic_share=0.1))))
    for stages in (FORWARD, UPDATE):
        assert slow.slowest(choice, stages) == priced.slowest(choice, stages)
    assert slow.ending(choice) == priced.ending(choice)


def test_rounded_sums_have_half_the_bytes_on_their_way():
    exact, rounded = (prices(nccl=False, rounds_sums=rounds).ending(FLATTEN).update for rounds in (False, True))
    size, device = 4.0 * named_shape("qwen2.5-3b").params, prices().setting.ordered[0][1]
    moved = 2 * size / (device.host_link * Rates().host_share) + size / Rates().gather
    assert exact - rounded == pytest.approx(moved / 2)


def test_other_constants_price_the_same_devices():
    setting = prices().setting
    slower = setting.repriced(Costs(rates=replace(Rates(), phase=0.5)))
    assert (slower.names, slower.workload) == (setting.names, setting.workload)
    assert StageTimes(slower).ending(FLATTEN).switch == pytest.approx(3 * 2 * 0.5)
