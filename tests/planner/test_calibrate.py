"""Constants are found again from steps that obeyed them, and are kept for this machine and no other."""

import json
from dataclasses import replace

import pytest

from stretto.errors import RecipeError
from stretto.placement.build import plan_of
from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import DeviceKind
from stretto.placement.rates import THREADS, Rates
from stretto.planner import saved_calibration as kept
from stretto.planner.calibrate import MeasuredStep, StepNotes, fit, parts
from stretto.planner.candidate import Candidate
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import PlanDurations, StageTimes
from stretto.planner.forecast import choose, forecast_of
from stretto.planner.lone_devices import lone_shares
from stretto.planner.problem import PlanningProblem
from stretto.planner.saved_calibration import ELSEWHERE, SavedCalibration, as_measured, keep, kept_for
from stretto.planner.simulate import simulate
from stretto.planner.workload import StepWorkload
from stretto.recipe.schema import Placement
from stretto.scheduler.asyncio_driver import Event, EventLog
from stretto.scheduler.records import GroupStart, MoveRollouts, StartRollouts, StepSpec
from stretto.scheduler.simulator import Simulation
from stretto.scheduler.state import StepState

TRUE = replace(
    THREADS,
    matmul_share=0.6,
    backward=2.4,
    tick=4e-3,
    tick_layer=3e-4,
    tick_request=5e-4,
    piece=2e-3,
    phase=0.05,
    lone=0.2,
)
"""What holds on a machine that nobody has measured."""
TWO = parse_cluster("2xcpu")


def workload(roles=("generate", "train"), *, prompts=4, samples=4, prompt=64, mean=24.0, sigma=0.6, cap=96):
    return StepWorkload(
        shapes=dict.fromkeys(roles, named_shape("smollm2-135m")),
        prompts=prompts,
        samples=samples,
        updates=1,
        prompt=prompt,
        lengths=LengthDistribution(mean=mean, sigma=sigma, cap=cap),
        adapter=8,
        reading=frozenset({"generate", "reference"} & set(roles)),
        precision="bfloat16",
        base="bfloat16",
    )


WORK = (
    workload(prompts=8, samples=8),
    workload(prompts=2, samples=2, mean=64.0, cap=128),
    workload(prompt=512, mean=16.0, cap=32),
    workload(("generate", "train", "reference"), sigma=1.0, cap=192),
)


class Noting(StepState):
    """A step that notes what it is told, as a driver does."""

    def __init__(self, plan, terms):
        super().__init__(plan, terms)
        self.notes, self.now = EventLog(), lambda: 0.0

    def offer(self, now):
        works = super().offer(now)
        self.notes.offers.append((len(self.notes.told), now, tuple(works)))
        return works

    def ended(self, item, tokens, now):
        self.notes.told.append(Event(at=self.now(), what="ended", arguments=(item, tokens, now)))
        super().ended(item, tokens, now)

    def done(self, piece):
        self.notes.told.append(Event(at=self.now(), what="done", arguments=(piece,)))
        super().done(piece)


def taken(work, choice, rates=TRUE):
    """A step that took what the constants say, faster where a cell works alone."""
    setting = PlanningProblem(workload=work, cluster=TWO, costs=Costs(rates=rates))
    together = _taken(setting, choice, {})
    return _taken(setting, choice, alone_in(together))


def alone_in(seen):
    """How much of its work each cell did alone."""
    return lone_shares(StepNotes.of(seen.notes).spans, seen.plan, seen.setting.cluster.devices)


def _taken(setting, choice, lone):
    work, prices, plan = setting.workload, StageTimes(setting), choice.plan(setting)
    durations = PlanDurations(prices, choice, plan, lone)
    terms = StepSpec(
        groups=work.prompts,
        drops=False,
        barrier=False,
        stages=tuple(sorted({"reference", "train"} & work.roles)),
        slots={cell.name: 999 for cell in plan.cells if cell.role == "generate"},
        budgets={cell.name: choice.budget for cell in plan.cells if cell.role != "generate"},
        longest=work.lengths.cap,
    )
    step = Noting(plan, terms)
    lengths = {(i, j): tokens for i, row in enumerate(durations.lengths) for j, tokens in enumerate(row)}
    simulation = Simulation(step, durations, lengths)
    step.now = lambda: simulation.now
    launch = {"prompt_tokens": work.prompt, "samples": work.samples, "expected": work.lengths.mean}
    took = simulation.run([GroupStart(prompt=str(i), **launch) for i in range(work.launched)])
    return MeasuredStep(setting=setting, choice=choice, plan=plan, seconds=took.seconds, notes=step.notes)


def choices(work):
    yield Candidate(strategy="flatten", devices=1, budget=2048)
    yield Candidate(strategy="flatten", devices=2, budget=2048)
    if work.prompts > 2:
        yield Candidate(strategy="separate", devices=2, generating=1, budget=2048)


def test_constants_that_steps_obeyed_predict_other_steps_as_they_do():
    seen = [taken(work, choice) for work in WORK for choice in choices(work)]
    found = fit(seen, THREADS)
    assert found.before > 0.15
    assert found.after < 0.02
    assert found.rates["lone"] == pytest.approx(TRUE.lone, abs=0.03)
    other, choice = workload(prompts=6, prompt=200, mean=40.0, cap=160), Candidate(strategy="elastic", devices=2)
    steps = []
    for rates in (TRUE, Rates.of(found.rates, kind=DeviceKind.CPU)):
        prices = StageTimes(PlanningProblem(workload=other, cluster=TWO, costs=Costs(rates=rates)))
        steps.append(simulate(prices, choice, MemoryFits(prices.setting).room(choice)).step)
    assert steps[1] == pytest.approx(steps[0], rel=0.05)


@pytest.mark.parametrize("choice", list(choices(WORK[0])), ids=lambda choice: f"{choice.strategy} on {choice.devices}")
def test_the_parts_of_a_step_are_told_by_the_constants_that_it_obeyed(choice):
    seen = taken(WORK[3], choice)
    priced = PlanDurations(StageTimes(seen.setting), seen.choice, seen.plan, alone_in(seen))
    found = list(parts(seen, StepNotes.of(seen.notes)))
    assert {part.name for part in found} == {"generate", "reference", "train", "rest"}
    for part in found:
        assert part.predicted(priced) == pytest.approx(part.seconds, rel=0.02)


def test_answers_that_move_keep_the_cell_busy_on_which_they_are():
    one, two, three = (0, 0), (0, 1), (1, 0)
    offers = [
        (0, 5.0, (StartRollouts(cell="a", items=(one, two)), StartRollouts(cell="b", items=(three,)))),
        (1, 8.0, (MoveRollouts(source="a", target="b", items=(two,)),)),
    ]
    ends = {one: 7.0, three: 8.5, two: 12.0}
    told = [Event(what="ended", arguments=(item, 3), at=at) for item, at in ends.items()]
    notes = StepNotes.of(EventLog(told=told, offers=offers))
    assert notes.moved
    assert sorted(notes.spans) == [("a", 5.0, 7.0), ("a", 5.0, 8.0), ("b", 5.0, 8.5), ("b", 8.0, 12.0)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kept, "this_machine", lambda: "a machine, 2 cores")
    found = SavedCalibration(
        machine="a machine, 2 cores",
        device="cpu",
        model="m",
        date="2026-11-20",
        steps=9,
        error=0.1,
        rates={"tick": 0.5},
    )
    return found, keep(found)


def test_what_was_measured_is_found_again_on_this_machine_only(here, monkeypatch):
    found, path = here
    assert path.parent.parts == (".stretto", "rates")
    assert kept_for(TWO) == found
    cluster, source = as_measured(TWO)
    assert cluster.rates == {"tick": 0.5, "lone": 0.0}, "measured before that was one of them"
    assert "measured on this machine on 2026-11-20" in source
    assert as_measured(replace(TWO, rates={"tick": 0.1}))[0].rates == {"tick": 0.1, "lone": 0.0}
    assert as_measured(parse_cluster("8xH100")) == (parse_cluster("8xH100"), None)
    monkeypatch.setattr(kept, "this_machine", lambda: "another")
    assert as_measured(TWO) == (TWO, ELSEWHERE)
    assert as_measured(replace(TWO, rates={"tick": 0.1}))[0].rates == {"tick": 0.1, "lone": 0.0}


@pytest.mark.parametrize("saving", [0.95, 15])
def test_a_core_that_works_alone_still_takes_time(saving):
    with pytest.raises(RecipeError, match=r"lone is .*0\.9 at most"):
        Rates.of({"lone": saving}, kind=DeviceKind.CPU)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rates": 1}', '{"rates": {"tock": 1}}', '{"rates": {"tick": -1}}'])
def test_a_spoiled_file_of_constants_is_named(here, text):
    _, path = here
    told = json.loads(text) if text != "{" else None
    if isinstance(told, dict) and told:
        text = json.dumps(json.loads(path.read_text()) | told)
    path.write_text(text)
    with pytest.raises(RecipeError) as raised:
        kept_for(TWO)
    assert str(path) in raised.value.problems[0].field


@pytest.mark.parametrize("strategy", ["flatten", "separate", "elastic"])
def test_a_plan_that_is_given_is_forecast_as_it_is(strategy):
    setting = PlanningProblem.of(WORK[0], TWO)
    section = Placement.model_validate({"strategy": strategy, "cluster": "2xcpu"})
    plan = plan_of(section, roles=setting.workload.roles, devices=setting.names, reading={"generate", "reference"})
    forecast = forecast_of(plan, setting, section, budget=4096)
    assert forecast is not None
    assert (forecast.choice.strategy, forecast.choice.devices, forecast.choice.budget) == (strategy, 2, 4096)


def test_cells_that_no_strategy_makes_have_no_forecast():
    setting = PlanningProblem.of(WORK[0], TWO)
    first, second = setting.names
    cells = ({"role": "generate", "devices": [first]}, {"role": "generate", "devices": [second]})
    section = Placement.model_validate(
        {"strategy": "elastic", "cells": (*cells, {"role": "train", "devices": [second]})}
    )
    plan = plan_of(section, roles=setting.workload.roles, devices=setting.names)
    assert forecast_of(plan, setting, section, budget=4096) is None


def test_auto_names_the_fastest_plan_that_can_be_executed_and_why():
    setting = PlanningProblem.of(WORK[0], TWO)
    found = [choose(setting, Placement()) for _ in range(2)]
    assert found[0].forecast.plan == found[1].forecast.plan
    assert not list(found[0].forecast.choice.waits_for(setting.workload))
    assert found[0].why.startswith(f"{found[0].forecast.choice.label} on ")
    assert "s a step expected" in found[0].why


def test_auto_without_a_plan_says_why():
    large = dict.fromkeys(("generate", "train"), named_shape("llama-65b"))
    setting = PlanningProblem.of(replace(WORK[0], shapes=large, adapter=0), TWO)
    with pytest.raises(RecipeError, match="auto finds no plan"):
        choose(setting, Placement())
