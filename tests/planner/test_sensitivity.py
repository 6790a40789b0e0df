"""Where the order of two plans turns is where a search with that constant turns it."""

from dataclasses import replace

import pytest

from stretto.placement.cluster import parse_cluster
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.enumerate import Variant
from stretto.planner.explain import document
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import search
from stretto.planner.sensitivity import turning_point
from stretto.planner.simulate import simulate
from stretto.planner.workload import StepWorkload

WORK = StepWorkload(
    shapes=dict.fromkeys(("generate", "train"), named_shape("qwen2.5-14b")), prompts=32, samples=8, updates=1,
    prompt=200, lengths=LengthDistribution(mean=100.0, sigma=1.0, cap=4096), adapter=0,
    reading=frozenset({"generate"}), precision="bfloat16", base="bfloat16", nccl=True,
)  # fmt: skip
PAIR = (Variant(strategy="flatten"), Variant(strategy="elastic"))


@pytest.fixture(scope="module")
def found():
    """A problem in which two plans are close enough that a constant decides, and its answer."""
    setting = PlanningProblem.of(WORK, parse_cluster("8xH100"))
    return setting, search(setting, PAIR)


def test_beyond_the_turning_point_the_second_plan_is_first(found):
    setting, answer = found
    turn = turning_point(answer.best, setting)
    assert turn is not None
    beyond = 1.1 if turn.at > turn.now else 1 / 1.1
    order = []
    for factor in (turn.at / turn.now * beyond, turn.at / turn.now / beyond):
        rates = setting.costs.rates
        changed = {name: factor * getattr(rates, name) for name in turn.constant.rates}
        prices = StageTimes(replace(setting, costs=Costs(rates=replace(rates, **changed))))
        order.append(simulate(prices, answer.best[0].choice, answer.best[0].room).step)
        order.append(simulate(prices, answer.best[1].choice, answer.best[1].room).step)
    assert order[1] < order[0]
    assert order[2] < order[3]


def test_the_answer_says_it_in_words_and_as_data(found):
    setting, answer = found
    turn = turning_point(answer.best, setting)
    assert turn is not None
    assert str(turn).startswith(f"{turn.first} is first while {turn.constant.words} at ")
    assert str(turn).endswith(turn.then)
    told = document(answer, setting)["plans"]
    assert told[0]["turns"] == turn.document()
    assert str(turn) in told[0]["why"]
    assert "turns" not in told[1]


def test_one_plan_alone_hangs_on_nothing(found):
    setting, answer = found
    assert turning_point(answer.best[:1], setting) is None
