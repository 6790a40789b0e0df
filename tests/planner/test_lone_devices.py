"""How much of its work a cell does while the rest of its host stands idle."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from stretto.placement.cluster import parse_cluster
from stretto.placement.rates import THREADS
from stretto.planner.candidate import Candidate
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.lone_devices import lone_shares
from stretto.planner.problem import PlanningProblem
from stretto.planner.simulate import simulate
from stretto.planner.workload import StepWorkload


def plan(**cells):
    """Cells by name, each on some devices."""
    return SimpleNamespace(cells=[SimpleNamespace(name=name, devices=devices) for name, devices in cells.items()])


def names(cluster):
    return list(parse_cluster(cluster).devices)


def test_a_cell_is_alone_while_nothing_else_of_its_host_works():
    one, two = names("2xcpu")
    cells, known = plan(a=(one,), b=(two,)), parse_cluster("2xcpu").devices
    assert lone_shares([("a", 0.0, 4.0), ("b", 3.0, 5.0)], cells, known) == {"a": 0.75, "b": 0.5}
    assert lone_shares([("a", 0.0, 1.0), ("a", 0.5, 2.0), ("b", 4.0, 5.0)], cells, known) == {"a": 1.0, "b": 1.0}
    assert lone_shares([], cells, known) == {}


def test_several_others_count_by_their_number_and_other_hosts_do_not():
    known = parse_cluster("2x3xcpu").devices
    one, two, three, far, *_ = known
    cells = plan(a=(one,), b=(two,), c=(far,), d=(two, three))
    spans = [("a", 0.0, 2.0), ("b", 0.0, 1.0), ("c", 0.0, 2.0)]
    assert lone_shares(spans, cells, known) == {"a": 0.75, "b": 0.5, "c": 1.0}
    assert lone_shares([("a", 0.0, 1.0), ("d", 0.0, 1.0)], cells, known) == {"a": 0.0, "d": 0.0}
    assert lone_shares([("d", 0.0, 1.0)], cells, known) == {"d": 0.5}, "its devices work beside each other"


def test_a_cell_that_has_its_whole_host_is_not_alone_there():
    known = parse_cluster("2xcpu").devices
    assert lone_shares([("a", 0.0, 1.0)], plan(a=tuple(known)), known) == {"a": 0.0}


@pytest.mark.parametrize(("cluster", "share"), [("1xcpu", 1.0), ("1xcpu2", 0.0)])
def test_one_device_is_a_thread_among_idle_cores_or_all_of_them(cluster, share):
    known = parse_cluster(cluster).devices
    cells = plan(a=tuple(known))
    assert lone_shares([("a", 0.0, 1.0)], cells, known) == {"a": share}


def test_what_runs_alone_is_forecast_to_be_faster():
    work = StepWorkload(
        shapes=dict.fromkeys(("generate", "train"), named_shape("smollm2-135m")),
        prompts=4,
        samples=4,
        updates=1,
        prompt=64,
        lengths=LengthDistribution(mean=24.0, sigma=0.0, cap=96),
        adapter=8,
        reading=frozenset({"generate"}),
        precision="bfloat16",
        base="bfloat16",
    )

    def step(lone, **choice):
        costs = Costs(rates=replace(THREADS, lone=lone))
        prices = StageTimes(PlanningProblem(workload=work, cluster=parse_cluster("2xcpu"), costs=costs))
        choice = Candidate(budget=2048, **choice)
        return simulate(prices, choice, MemoryFits(prices.setting).room(choice))

    slow, fast = (step(lone, strategy="flatten", devices=1) for lone in (0.0, 0.2))
    assert fast.step - fast.ending.seconds == pytest.approx(0.8 * (slow.step - slow.ending.seconds), rel=0.02)
    slow, fast = (step(lone, strategy="flatten", devices=2) for lone in (0.0, 0.2))
    assert fast.step == pytest.approx(slow.step, rel=0.02)
    slow, fast = (step(lone, strategy="separate", devices=2, generating=1) for lone in (0.0, 0.2))
    assert 0.8 * slow.step < fast.step < 0.98 * slow.step
