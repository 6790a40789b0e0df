"""Where the order of two plans turns is where a simulation with that constant turns it."""

from dataclasses import replace

import pytest

from stretto.placement.cluster import parse_cluster
from stretto.planner.candidate import Candidate
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.explain import document
from stretto.planner.problem import ModelSplit, PlanningProblem
from stretto.planner.search import SearchResult
from stretto.planner.sensitivity import turning_point
from stretto.planner.simulate import simulate
from stretto.planner.workload import StepWorkload

SETTING = PlanningProblem.of(
    StepWorkload(
        shapes=dict.fromkeys(("generate", "train"), named_shape("qwen2.5-3b")), prompts=32, samples=8, updates=1,
        prompt=200, lengths=LengthDistribution(mean=600.0, sigma=1.0, cap=4096), adapter=0,
        reading=frozenset({"generate"}), precision="bfloat16", base="bfloat16", nccl=True,
    ),
    parse_cluster("8xL40S"),
)  # fmt: skip


def with_lanes(width, setting=SETTING):
    """The forecast of a plan whose lanes cut matrices over so many devices."""
    lane, train = ModelSplit(tp=width), ModelSplit(dp=8)
    choice = Candidate(strategy="flatten", devices=8, lane=lane, train=train, recompute=True)
    return simulate(StageTimes(setting), choice, MemoryFits(setting).room(choice))


@pytest.fixture(scope="module", params=[(4, 8), (8, 2)])
def pair(request):
    """Two plans, the first of which is faster: narrow lanes read more weights, wide ones send more messages."""
    first, second = map(with_lanes, request.param)
    assert first.step < second.step
    return first, second


def test_beyond_the_turning_point_the_second_plan_is_first(pair):
    turn = turning_point(pair, SETTING)
    assert turn is not None
    beyond = 1.1 if turn.at > turn.now else 1 / 1.1
    leads = []
    for factor in (turn.at / turn.now / beyond, turn.at / turn.now * beyond):
        rates = SETTING.costs.rates
        changed = {name: factor * getattr(rates, name) for name in turn.constant.rates}
        setting = replace(SETTING, costs=Costs(rates=replace(rates, **changed)))
        first, second = (with_lanes(each.choice.lane.tp, setting).step for each in pair)
        leads.append(second - first)
    assert leads[0] > 0 > leads[1]


def test_the_answer_says_it_in_words_and_as_data(pair):
    turn = turning_point(pair, SETTING)
    assert turn is not None
    bound = "at most" if turn.at > turn.now else "at least"
    assert str(turn).startswith(f"flatten is first while {turn.constant.words} {bound} ")
    found = SearchResult(best=pair, rejected=(), ready=(), waiting=pair, misses=(), weighed=2, simulated=2)
    told = document(found, SETTING)["plans"]
    assert told[0]["turns"] == turn.document()
    assert str(turn) in told[0]["why"]
    assert told[1]["turns"] is None


def test_one_plan_alone_hangs_on_nothing(pair):
    assert turning_point(pair[:1], SETTING) is None
