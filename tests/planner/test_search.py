"""The search keeps to memory, gives reasons, does not change from run to run, and more devices never make it worse."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from planning import PPO, setting_of, workload
from stretto.placement.cluster import parse_cluster
from stretto.planner import explain
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.enumerate import Candidates, Variant
from stretto.planner.problem import ALONE, ModelSplit, PlanningProblem
from stretto.planner.search import named_by, search, smallest_cluster, variants_of
from stretto.recipe.schema import Placement

ALL = variants_of(Placement())


@pytest.mark.parametrize(
    ("cluster", "model", "roles"),
    [("8xA100-80", "llama-7b", PPO), ("8xH100", "qwen2.5-7b", PPO[:2]), ("8xH100", "qwen3-30b-a3b", PPO[:2])],
)
def test_no_plan_takes_more_memory_than_there_is(cluster, model, roles):
    setting = setting_of(cluster, model, roles=roles)
    found = search(setting, ALL)
    assert found.best
    for forecast in found.best:
        assert forecast.cached <= forecast.room.pool
        for room in forecast.room.sides:
            assert forecast.held(room)[1].total <= room.usable
            assert room.asleep <= room.device.host_memory


@pytest.mark.parametrize(("model", "prompts"), [("qwen2.5-0.5b", 4), ("qwen2.5-3b", 16), ("qwen2.5-7b", 64)])
def test_more_devices_never_make_the_best_plan_slower(model, prompts):
    steps = []
    for count in (1, 2, 4, 8, 16):
        found = search(setting_of(f"{count}xH100", model, prompts=prompts), ALL)
        steps.append(min((forecast.step for forecast in found.best), default=float("inf")))
    assert steps[-1] < float("inf")
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(steps))


@pytest.mark.parametrize(
    ("cluster", "changes"),
    [("8xA100-80", {"roles": PPO}), ("16xA100-80", {"model": "llama-7b", "prompts": 64}), ("4xH800+4xH20", {})],
)
def test_what_is_passed_over_is_not_faster(cluster, changes, monkeypatch):
    setting = setting_of(cluster, **changes)
    usual = search(setting, ALL)
    for name in ("SLACK", "MIXED"):
        monkeypatch.setattr("stretto.planner.search." + name, 1e9)
    every = search(setting, ALL)
    assert usual.simulated < every.simulated
    assert [(each.choice, each.step) for each in usual.best] == [(each.choice, each.step) for each in every.best]


def test_a_model_that_no_cluster_holds_has_no_smallest_one():
    setting = setting_of("8xH100", prompt=10**9)
    assert search(setting, ALL).best == ()
    assert smallest_cluster(setting, ALL) is None


def test_of_several_kinds_of_devices_the_one_with_most_memory_is_counted():
    setting = setting_of("8xL4+4xH100", "llama-65b")
    count = smallest_cluster(setting, ALL)
    assert search(replace(setting, cluster=parse_cluster(f"{count}xH100")), ALL).best


def test_the_same_question_has_the_same_answer():
    documents = []
    for _ in range(2):
        setting = setting_of("8xH100", roles=PPO)
        documents.append(explain.document(search(setting, ALL), setting))
    assert documents[0] == documents[1]


def test_plans_come_best_first_one_for_each_strategy_and_the_others_have_a_reason():
    setting = setting_of("8xH100", roles=PPO)
    found = search(setting, ALL)
    assert [forecast.step for forecast in found.best] == sorted(forecast.step for forecast in found.best)
    for kept in (found.best, found.ready):
        assert len(kept) == len({forecast.choice.label for forecast in kept}) > 3
    labels = {forecast.choice.label for forecast in found.best} | {name for name, _ in found.rejected}
    assert {"elastic", "flatten", "interleave I1", "interleave I2", "separate"} <= labels


def test_of_plans_as_good_as_equal_the_one_is_chosen_whose_devices_share_no_matrices():
    setting = setting_of("8xH100")
    found = search(setting, ALL)
    first = replace(found.ready[0], choice=replace(found.ready[0].choice, lane=ALONE, train=ALONE, others=()))
    found = replace(found, best=(first,), ready=(first,))
    for share, chosen in ((0.97, first), (0.9, None)):
        lanes = replace(first.choice, lane=ModelSplit(tp=2))
        other = replace(first, choice=lanes, step=share * first.step)
        both = found.beside(other, setting.workload)
        assert both.best[0] == other
        assert both.today == (chosen or other)
        assert ("talk in every layer" in explain.today(both, setting)) == (both.today == first)
        assert both.listed == both.ready and len(both.ready) == 2


def test_what_is_listed_behind_what_can_be_executed_cannot_be():
    setting = setting_of("8xA100-80", "llama-7b", roles=PPO)
    found = search(setting, ALL)
    assert not any(forecast.choice.runs(setting.workload) for forecast in found.listed[len(found.ready) :])


@pytest.mark.parametrize(
    ("strategy", "changes", "cluster", "reason"),
    [
        ("elastic", {}, "1xH100", "needs two devices"),
        ("flatten", {"staleness": 1}, "4xH100", "devices that only generate"),
        ("interleave", {}, "4xH100", "nothing to lay side by side"),
        ("interleave", {"roles": PPO[:3]}, "4xH100", "only one of them"),
        ("flatten", {"model": "llama-65b"}, "1xH100", "training needs"),
    ],
)
def test_a_strategy_that_is_no_choice_says_why(strategy, changes, cluster, reason):
    setting = setting_of(cluster, **changes)
    rejected = dict(search(setting, tuple(v for v in ALL if v.strategy == strategy)).rejected)
    assert any(reason in why for why in rejected.values()), rejected


def test_shares_that_no_number_of_devices_has_are_no_choice():
    third = Variant(strategy="interleave", fractions=tuple(Fraction(n, 3) for n in (3, 3, 1, 2)))
    rejected = dict(search(setting_of("2xH100", roles=PPO), (third,)).rejected)
    assert "do not divide 2 devices" in rejected[third.label]


def test_shares_that_come_close_to_whole_devices_are_these():
    setting = setting_of("3xH100", roles=PPO)
    own = Placement(strategy="interleave", fractions=(1.0, 1.0, 0.33, 0.67))
    (variant,) = (variant for variant in variants_of(own) if variant.label == named_by(own))
    grid = Candidates(setting, StageTimes(setting), MemoryFits(setting))
    assert any(True for _ in grid.choices(variant, 3))


def test_more_devices_of_a_cpu_share_the_same_memory():
    setting = setting_of("2xcpu", "llama-65b")
    assert not search(setting, ALL).best
    assert smallest_cluster(setting, ALL) is None


def test_a_model_that_fits_nowhere_names_the_term_and_the_smallest_cluster():
    setting = setting_of("1xH100", "llama-65b")
    found = search(setting, ALL)
    assert found.best == ()
    assert "optimizer" in found.misses[0] and "GB too much" in found.misses[0]
    count = smallest_cluster(setting, ALL)
    assert count is not None and count > 8
    assert search(replace(setting, cluster=parse_cluster(f"{count}xH100")), ALL).best


def test_a_batch_too_small_for_the_cluster_says_so():
    setting = setting_of("64xH100", "qwen2.5-0.5b", prompts=2, samples=2)
    told = " ".join(explain.notes(search(setting, ALL), setting))
    assert "64 devices" in told and "raise batch.prompts" in told


def test_devices_with_bandwidth_generate_and_those_with_arithmetic_train():
    setting = setting_of("8xH800+8xH20", nccl=True)
    (forecast,) = search(setting, (Variant(strategy="separate"),)).best
    kinds = setting.cluster.devices
    generating = [d for cell in forecast.plan.cells if cell.role == "generate" for d in cell.devices]
    assert kinds[generating[0]].name == "H20"
    training = [d for cell in forecast.plan.cells if cell.role == "train" for d in cell.devices]
    assert kinds[training[-1]].name == "H800"
    assert "H20 has most memory bandwidth" in " ".join(explain.notes(search(setting, ALL), setting))


def test_of_plans_as_fast_as_each_other_none_leaves_a_device_out():
    """Whole models on all devices, gradients through host memory, are a little slower than cut ones, and plainer."""
    step = {"prompts": 64, "prompt": 128, "lengths": LengthDistribution(mean=409.6, sigma=0.8, cap=1024)}
    found = search(setting_of("8xH100", "qwen2.5-7b", adapter=16, recorded="alone", nccl=False, **step), ALL)
    assert found.today.choice.devices == 8


@pytest.mark.parametrize(
    ("cluster", "says"), [("8xV100", "V100 has bfloat16 in software only"), ("8xH100", "exchange their parts by NCCL")]
)
def test_what_a_forecast_does_not_know_is_noted(cluster, says):
    setting = setting_of(cluster, "qwen2.5-7b")
    assert says in " ".join(explain.notes(search(setting, ALL), setting))


def test_a_recipe_names_its_strategy_as_it_is_listed():
    assert named_by(Placement(strategy="elastic")) == "elastic"
    assert named_by(Placement(strategy="interleave")) == "interleave I1"
    assert named_by(Placement(strategy="interleave", fractions=(1.0, 1.0, 0.5, 0.5))) == "interleave I1"
    own = Placement(strategy="interleave", fractions=(1.0, 0.5, 0.5, 1.0))
    assert named_by(own) == "interleave (1, 1/2, 1/2, 1)"
    assert named_by(own) in [variant.label for variant in variants_of(own)]


def test_a_reference_that_reads_the_policy_on_half_of_the_devices_bounds_the_cells_that_train():
    setting = setting_of("4xH100", roles=PPO, adapter=16, reading=frozenset({"generate", "value", "reference"}))
    (best,) = search(setting, tuple(v for v in ALL if v.label == "interleave I1")).best
    assert best.choice.train.width <= 2


def test_a_mixture_has_its_experts_once_more_in_an_engine_of_its_own():
    work = workload(
        "qwen3-235b-a22b", prompts=64, samples=16, adapter=32, base="fp8", engine="vllm",
        lengths=LengthDistribution(mean=3000.0, sigma=1.1, cap=8192),
    )  # fmt: skip
    setting = PlanningProblem.of(work, parse_cluster("6x8xH100"))
    (best,) = search(setting, tuple(v for v in ALL if v.strategy == "elastic")).best
    assert best.choice.source("generate", work) == "own"
    once = work.shapes["train"].routed_params / best.choice.devices
    assert best.room.sides[0].phases["publish"].weights > 1.03 * once + 2 * once


@pytest.mark.parametrize(
    ("amount", "told"),
    [
        (0.0, "0.00"),
        (1e-9, "<0.000001"),
        (0.00001234, "0.000012"),
        (0.0001, "0.00010"),
        (0.0099, "0.0099"),
        (0.05, "0.050"),
        (0.5, "0.50"),
        (3.456, "3.46"),
        (1234.5, "1234.50"),
    ],
)
def test_an_amount_below_a_cent_is_not_nothing(amount, told):
    assert explain.money(amount) == told
