"""Three runs that are slow for a known reason: the reason is named, and what its cure would bring is foretold.

The runs are made up by the scheduler on its virtual clock, with durations that are known here and have to be found
again from what stands in the run's folder.
"""

import random
import sys
from statistics import fmean

import pytest

from recorded import RECIPE, metrics_row, trajectory, write_run
from simulated import Clockwork, launches_of, plan_of
from stretto.cli.report import lines
from stretto.report.timeline import Span
from stretto.runtime.explain_run import explain, lengths_of
from stretto.scheduler.records import StepSpec
from stretto.scheduler.simulator import Simulation
from stretto.scheduler.state import StepState

GROUPS, SAMPLES, STEPS, PROMPT = 8, 8, 6, 5


class Timed(Clockwork):
    """Durations with reward workers and a little noise, as a real machine has them."""

    def __init__(self, *, workers=2, verdict=0.0, noise=0.0, **more):
        super().__init__(**more)
        self.workers, self.verdict, self.noise, self.rng = [0.0] * workers, verdict, noise, random.Random(3)
        self.verdicts = []

    def piece(self, piece):
        """A piece is cut into micro-batches, each of which costs `fixed` and its tokens."""
        self.batches = -(-piece.tokens // self.budget)
        self.trained = self.fixed * self.batches + self.per_token["train"] * piece.tokens
        return self.trained * (1 + self.noise * self.rng.uniform(-1, 1))

    def judge(self, item):
        at = min(range(len(self.workers)), key=self.workers.__getitem__)
        begin = max(self.now(), self.workers[at])
        self.workers[at] = begin + self.verdict
        self.verdicts.append((self.now(), begin + self.verdict))
        return begin + self.verdict - self.now()


def step_of(plan, lengths, durations, budget):
    """A step on the virtual clock: its seconds and what each cell did."""
    lanes = [cell.name for cell in plan.cells if cell.role == "generate"]
    spec = StepSpec(
        groups=len(lengths), drops=False, barrier=False, stages=("train",),
        slots=dict.fromkeys(lanes, sys.maxsize), longest=64,
        budgets={cell.name: budget for cell in plan.cells if cell.role == "train"},
    )  # fmt: skip
    true = {(g, a): tokens for g, group in enumerate(lengths) for a, tokens in enumerate(group)}
    simulation = Simulation(StepState(plan, spec), durations, true)
    durations.now, durations.budget = lambda: simulation.now, budget
    return simulation.run(launches_of(lengths, prompt=PROMPT, expected=20.0))


def lengths_for(steps):
    rng = random.Random(7)
    return [[[rng.randint(6, 60) for _ in range(SAMPLES)] for _ in range(GROUPS)] for _ in range(steps)]


def record(folder, plan, *, budget=2304, recipe=None, workers=2, **durations):
    """A run's folder, and the seconds of its steps."""
    rows, spans, metrics, now = {}, [], [], 0.0
    for number, lengths in enumerate(lengths_for(STEPS), start=1):
        timed = Timed(workers=workers, **durations)
        took = step_of(plan, lengths, timed, budget)
        spans += [
            Span(stage=each.stage, cell=each.cell, start=now + each.start, seconds=each.stop - each.start, step=number,
                 tokens=each.tokens, groups=each.groups)
            for each in took.stretches
        ]  # fmt: skip
        spans += judged(timed.verdicts, now, number)
        spans += [
            Span(stage="publish", cell=cell.name, start=now + start, seconds=stop - start, step=number)
            for start, stop in took.updates for cell in plan.cells if cell.role == "train"
        ]  # fmt: skip
        now += took.seconds
        metrics.append(metrics_row(number) | {"seconds/step": took.seconds, "groups/used": GROUPS})
        metrics[-1]["micro_batches/overhead"] = timed.fixed * timed.batches / timed.trained
        rows[number] = [
            trajectory(number, g, a, ["p"] * PROMPT + ["t"] * tokens) | {"conversations": [talk(tokens)]}
            for g, group in enumerate(lengths) for a, tokens in enumerate(group)
        ]  # fmt: skip
    told = plan.to_json() | {"reward_workers": workers}
    settings = RECIPE | {"run": {"steps": STEPS}} | (recipe or {})
    write_run(folder, steps=STEPS, rows=rows.__getitem__, spans=spans, metrics=metrics, plan=told, recipe=settings)
    return fmean(row["seconds/step"] for row in metrics)


def judged(verdicts, now, step):
    """The spans in which any reward function ran."""
    found = []
    for begin, end in sorted(verdicts):
        if end > begin and found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        elif end > begin:
            found.append([begin, end])
    return [Span(stage="reward", cell="judges", start=now + a, seconds=b - a, step=step) for a, b in found]


def talk(tokens):
    return {"tokens": [0] * (PROMPT + tokens), "trained": [0] * PROMPT + [1] * tokens}


def seconds_of(plan, *, budget=2304, **durations):
    """What steps of the same answers truly take."""
    return fmean(step_of(plan, lengths, Timed(**durations), budget).seconds for lengths in lengths_for(STEPS))


def promised(told):
    """The first piece of advice: its change, and the share of a step that it promises to save."""
    return told["advice"][0]["change"], told["advice"][0]["share"]


USUAL = {"tick_seconds": 0.02, "tick_each": 0.0004, "prefill_seconds": 0.001, "per_token": {"train": 0.002}}


def test_a_slow_reward_is_named_with_the_workers_that_cure_it(tmp_path):
    plan = plan_of("flatten", 1)
    slow = USUAL | {"verdict": 0.5, "noise": 0.05, "fixed": 0.05}
    before = record(tmp_path / "run", plan, **slow)
    told = explain(tmp_path / "run")
    assert told["healthy"] and told["waits"][0]["stage"] == "reward"
    change, share = promised(told)
    key, _, workers = change.partition("=")
    assert key == "run.reward_workers"
    after = seconds_of(plan, workers=int(workers), **slow)
    assert share == pytest.approx(1 - after / before, rel=0.2)


def test_a_tiny_token_budget_is_named(tmp_path):
    plan = plan_of("flatten", 1)
    slow = USUAL | {"fixed": 0.4, "noise": 0.05}
    recipe = {"batch": RECIPE["batch"] | {"token_budget": 96}}
    before = record(tmp_path / "run", plan, budget=96, recipe=recipe, **slow)
    told = explain(tmp_path / "run")
    assert told["waits"][0]["stage"] == "train"
    change, share = promised(told)
    assert change == "batch.token_budget=auto"
    after = seconds_of(plan, budget=2304, **slow)
    assert share == pytest.approx(1 - after / before, rel=0.2)


def test_an_unbalanced_split_is_named_with_a_strategy_that_shares(tmp_path):
    plan = plan_of("separate", 4)
    slow = USUAL | {"tick_seconds": 0.1, "fixed": 0.02, "noise": 0.02}
    before = record(tmp_path / "run", plan, budget=16_384, **slow)
    told = explain(tmp_path / "run")
    assert any("has no work in" in each["text"] for each in told["findings"])
    change, share = promised(told)
    assert change.startswith("placement.strategy=") and change != "placement.strategy=separate"
    name = change.partition("=")[2]
    after = seconds_of(plan_of("I1" if name == "interleave" else name, 4), budget=16_384, **slow)
    assert share == pytest.approx(1 - after / before, rel=0.2)


def test_a_run_with_nothing_to_gain_is_told_so(tmp_path):
    record(tmp_path / "run", plan_of("flatten", 1), **USUAL)
    told = explain(tmp_path / "run")
    assert told["advice"] == [] and any(
        "No change that the simulator knows" in each["text"] for each in told["findings"]
    )


def test_a_run_that_is_not_sound_is_not_tuned(tmp_path):
    record(tmp_path / "run", plan_of("flatten", 1), **USUAL | {"verdict": 0.5})
    (tmp_path / "run" / "stacks-reward-000006.txt").write_text("…")
    told = explain(tmp_path / "run")
    assert not told["healthy"] and told["advice"] == [] and told["findings"][0]["level"] == "alarm"
    assert told["waits"][0]["stage"] == "reward"


def test_where_the_simulator_is_wrong_it_promises_nothing(tmp_path):
    record(tmp_path / "run", plan_of("flatten", 1), **USUAL | {"verdict": 0.5})
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"seconds/step": ', '"seconds/step": 9'))
    told = explain(tmp_path / "run")
    assert told["advice"] == [] and any("off what was measured" in each["text"] for each in told["findings"])


def test_what_a_recorded_run_does_not_say_is_no_error(tmp_path):
    told = explain(write_run(tmp_path / "bare", samples=False))
    assert told["healthy"] and told["advice"] == []


def test_lengths_are_those_of_sampled_tokens():
    rows = [trajectory(1, 0, attempt) for attempt in range(2)] + [trajectory(1, 1, 0) | {"conversations": []}]
    assert lengths_of(rows) == [(2, (3, 3)), (0, (0,))]


def test_the_terminal_says_the_same_in_lines(tmp_path):
    record(tmp_path / "run", plan_of("flatten", 1), **USUAL | {"verdict": 0.5})
    text = "\n".join(lines(tmp_path / "run", explain(tmp_path / "run")))
    assert "waiting for verdicts" in text and "would help most: run.reward_workers=" in text
