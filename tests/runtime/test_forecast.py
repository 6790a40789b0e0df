"""What a run is planned with, and what it says at its end."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from running import PROBES, Quiet, checked_recipe, recipe_in, start, tensors
from stretto.placement import cluster
from stretto.placement.devices import GB
from stretto.planner.run_lengths import recorded_answers
from stretto.planner.saved_calibration import SavedCalibration, keep, this_machine
from stretto.runtime import session
from stretto.runtime.forecast import ForecastCorrection, compare_to_forecast, expectation, planned, table
from stretto.runtime.plans import devices_of, make_plan


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told_of(recipe, root):
    notes = []
    return planned(recipe, root, notes.append), notes


def test_one_device_has_its_one_plan_and_nothing_is_said(here):
    recipe = recipe_in(here)
    told, notes = told_of(recipe, here)
    assert (told.plan, told.expected, notes) == (make_plan(recipe), None, [])


def test_of_a_server_that_runs_already_nothing_is_expected(here):
    recipe, served = recipe_in(here), SimpleNamespace(workload=SimpleNamespace(served=True))
    assert expectation(recipe, served, make_plan(recipe)) is None


def test_auto_on_several_devices_is_the_planners_plan_said_in_a_line(here):
    recipe = recipe_in(here, placement={"cluster": "2xcpu"})
    (told, notes), (again, _) = told_of(recipe, here), told_of(recipe, here)
    assert told == again
    assert told.expected["seconds"]["step"] > 0
    (line,) = notes
    assert line.startswith(f"plan: {told.plan.strategy} on ")
    assert "another machine's until `stretto plan --measure`" in line
    assert all(cell.token_budget for cell in told.plan.cells if cell.role != "generate")


def test_auto_counts_with_what_was_measured_here(here):
    recipe = recipe_in(here, placement={"cluster": "2xcpu"})
    guessed, _ = told_of(recipe, here)
    common = {"device": "cpu", "model": "m", "date": "2026-11-20", "steps": 9, "error": 0.1}
    keep(SavedCalibration(machine=this_machine(), rates={"tick": 10.0}, **common))
    told, (line,) = told_of(recipe, here)
    assert told.expected["seconds"]["generate"] > guessed.expected["seconds"]["generate"] + 10
    assert "measured on this machine on 2026-11-20" in line


def test_a_cluster_file_says_which_devices_and_how_fast_they_are(here):
    (here / "mine.yaml").write_text("hosts: [{device: cpu, devices: 2}]\nrates: {tick: 10.0}\n")
    usual, mine = (recipe_in(here, placement={"cluster": cluster}) for cluster in ("2xcpu", "mine.yaml"))
    (guessed, _), (told, _) = (told_of(recipe, here) for recipe in (usual, mine))
    assert devices_of(mine.placement) == devices_of(usual.placement)
    assert told.expected["seconds"]["generate"] > guessed.expected["seconds"]["generate"] + 10


@pytest.mark.parametrize("strategy", ["flatten", "separate", "elastic"])
def test_a_strategy_that_is_named_is_followed_and_forecast(strategy, here):
    recipe = recipe_in(here, placement={"cluster": "2xcpu", "strategy": strategy})
    told, notes = told_of(recipe, here)
    assert notes == []
    assert told.plan == make_plan(recipe)
    assert told.to_json()["predicted"]["memory_gb"].keys() == {"localhost/cpu:0", "localhost/cpu:1"}


TOO_LARGE = {
    "model__dtype": "bfloat16",
    "model__scratch__width": 1024,
    "model__scratch__layers": 4,
    "batch__token_budget": 256,
}
"""All that training a copy takes is 2.1 GB, and half of it on each of two devices 1.7 GB."""


def with_memory(monkeypatch, gigabytes):
    monkeypatch.setattr(cluster, "_own_memory", lambda: gigabytes * GB)


@pytest.mark.parametrize(
    ("devices", "strategy", "cells"),
    [
        (2, "flatten", [("gather:train", 1)] * 2 + [("own", 2)]),
        (2, "elastic", [("gather:train", 1)] * 2 + [("own", 2)]),
        (4, "separate", [("own", 1)] * 2 + [("own", 2)]),
        (11, "separate", [("own", 1)] * 5 + [("own", 2)] * 3),
        (4, "flatten", [("gather:train-0", 1)] * 2 + [("gather:train-1", 1)] * 2 + [("own", 2)] * 2),
    ],
)
def test_a_copy_that_is_too_large_for_a_device_is_cut(devices, strategy, cells, here, monkeypatch):
    with_memory(monkeypatch, 2.08 * devices)
    monkeypatch.setattr("os.cpu_count", lambda: devices)
    recipe = recipe_in(here, placement={"cluster": f"{devices}xcpu", "strategy": strategy}, **TOO_LARGE)
    told, notes = told_of(recipe, here)
    assert notes == [
        "plan: 2 devices train one copy together, each with a slice, because one device is too small for it"
    ]
    assert [(cell.weights, len(cell.devices)) for cell in told.plan.cells] == cells
    assert {cell.sleeps for cell in told.plan.cells if cell.weights != "own"} <= (
        {("train",)} if strategy == "flatten" else {()}
    )
    if devices != 11:  # the planner looks at round shares only, so it has no forecast for 5 of 11
        assert max(told.expected["memory_gb"].values()) < 2.08


@pytest.mark.parametrize(("gigabytes", "tokens"), [(1.98, 576), (2.085, 1152)])
def test_a_cell_of_several_devices_gets_micro_batches_that_fit_because_it_cannot_cut_them(
    gigabytes, tokens, here, monkeypatch
):
    with_memory(monkeypatch, 2 * gigabytes)
    large = TOO_LARGE | {"batch__token_budget": "auto"}
    told, (line,) = told_of(recipe_in(here, placement={"cluster": "2xcpu", "strategy": "flatten"}, **large), here)
    assert f"each with a slice, in micro-batches of {tokens} tokens, because" in line
    assert [(len(c.devices), c.token_budget) for c in told.plan.cells if c.role == "train"] == [(2, tokens)]
    assert max(told.expected["memory_gb"].values()) < gigabytes


def test_a_copy_that_fits_with_small_micro_batches_and_recomputing_stays_whole(here, monkeypatch):
    with_memory(monkeypatch, 2 * 2.485)
    recipe = recipe_in(
        here, placement={"cluster": "2xcpu", "strategy": "flatten"}, **TOO_LARGE | {"batch__token_budget": 50_000}
    )
    told, notes = told_of(recipe, here)
    assert (told.plan, notes) == (make_plan(recipe), [])


@pytest.mark.parametrize("gigabytes", [2.585, 1.185])
def test_a_copy_that_fits_stays_whole_and_so_does_what_fits_nowhere(gigabytes, here, monkeypatch):
    with_memory(monkeypatch, 2 * gigabytes)
    recipe = recipe_in(here, placement={"cluster": "2xcpu", "strategy": "flatten"}, **TOO_LARGE)
    told, notes = told_of(recipe, here)
    assert (told.plan, notes) == (make_plan(recipe), [])


def test_auto_cuts_what_is_too_large_for_a_device(here, monkeypatch):
    with_memory(monkeypatch, 2.08 * 2)
    told, (line,) = told_of(recipe_in(here, placement={"cluster": "2xcpu"}, **TOO_LARGE), here)
    assert " on 2 of 2 devices" in line
    assert [(len(cell.devices), cell.token_budget) for cell in told.plan.cells if cell.role == "train"] == [(2, 256)]


@pytest.mark.slow
def test_a_run_trains_a_copy_that_its_strategy_cut(here, monkeypatch):
    plain = start(here, run__steps=2).folder
    # The model is too small for the truth.
    monkeypatch.setattr("stretto.planner.forecast.width_of", lambda *_, **__: (2, 9999))
    cut = start(here, run__steps=2, placement={"cluster": "2xcpu", "strategy": "flatten"}).folder
    cells = json.loads((cut / "plan.json").read_text())["cells"]
    assert [len(cell["devices"]) for cell in cells] == [1, 1, 2]
    ours, theirs = (tensors(folder / "checkpoints" / "step-000002") for folder in (cut, plain))
    weights = [
        key for key in theirs if key[0] == "model.safetensors"
    ]  # the optimizer's state is in parts in one of them
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in weights) < 1e-4


def test_cells_by_hand_are_followed_without_a_forecast(here):
    first, second = "localhost/cpu:0", "localhost/cpu:1"
    cells = [
        {"role": "generate", "devices": [first]},
        *({"role": "train", "devices": [each]} for each in (first, second)),
    ]
    recipe = recipe_in(here, placement={"cluster": "2xcpu", "cells": cells})
    told, notes = told_of(recipe, here)
    assert (told.expected, notes, len(told.plan.cells)) == (None, [], 3)
    assert "predicted" not in told.to_json()


ROWS = [
    {"step": 0, "eval/accuracy": 0.5},
    {"step": 1, "seconds/step": 9.0, "seconds/train": 8.0, "idle": 0.0, "length/mean": 4.0},
    {"step": 2, "seconds/step": 3.0, "seconds/train": 2.0, "idle": 0.2, "length/mean": 6.0},
    {"step": 3, "seconds/step": 4.0, "seconds/train": 2.5, "idle": 0.1, "length/mean": 5.0},
]


def test_the_table_has_the_medians_of_this_session_beside_what_was_expected(here):
    recipe = recipe_in(here, placement={"price_per_gpu_hour": 3600.0})
    (here / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    told, _ = told_of(recipe, here)
    lines = compare_to_forecast(here, told, recipe, here, after=1, memory={"localhost/cpu:0": 0.25})
    assert "predicted" in lines[0] and lines[0].endswith("(median of 2 steps)")
    by_name = {line.partition("  ")[0]: line.split()[-1] for line in lines[1:]}
    wanted = {"step s": "3.5", "train s": "2.25", "GB localhost/cpu:0": "0.25", "cost of a step": "3.50"}
    assert wanted.items() <= by_name.items()
    plan = json.loads((here / "plan.json").read_text())
    assert plan["measured"]["steps"] == 2
    assert plan["measured"]["answer_tokens"] == 5.5
    whole = plan["measured"]["run"]
    assert (whole["seconds"], whole["steps"], whole["cost"]) == (16.0, 3, 16.0)  # those before the resume, too
    assert by_name["cost of the run"] == "16.00"
    assert plan["predicted"]["run"]["interval"] is plan["predicted"]["run"]["cost_interval"] is None
    assert plan["predicted"]["seconds"]["step"] > 0
    assert plan["strategy"] == "flatten"


def test_a_session_without_a_step_has_nothing_to_compare(here):
    recipe = recipe_in(here)
    (here / "metrics.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    told, _ = told_of(recipe, here)
    assert compare_to_forecast(here, told, recipe, here, after=0, memory={}) == ()


def test_what_was_not_expected_is_a_dash():
    took = {"seconds": {"step": 1.0}, "memory_gb": {}, "answer_tokens": 2.0, "cost_per_step": None, "steps": 1}
    lines = table(None, took)
    assert lines[0].endswith("(one step)")
    assert lines[1].split() == ["step", "s", "-", "1"]


@pytest.mark.slow
def test_a_run_on_two_devices_follows_the_planner_and_measures_what_it_did(here):
    recipe = recipe_in(here, placement={"cluster": "2xcpu"}, run__steps=2, run__folder=str(here / "run"))
    told, _ = told_of(recipe, here)
    session.start(recipe, name="tiny", root=here, progress=Quiet())
    plan = json.loads((here / "run" / "plan.json").read_text())
    assert {key: plan[key] for key in told.plan.to_json()} == json.loads(json.dumps(told.plan.to_json()))
    assert plan["predicted"].keys() >= told.expected.keys()
    assert plan["predicted"]["run"]["steps"] == plan["measured"]["run"]["steps"] == 2
    assert plan["measured"]["run"]["seconds"] > 0
    assert plan["measured"]["steps"] == 2
    assert plan["measured"]["seconds"].keys() >= {"step", "generate", "train", "publish"}
    assert plan["measured"]["memory_gb"].keys() == plan["predicted"]["memory_gb"].keys()


STATED = {"prompt": 3, "response": {"mean": 2.0, "sigma": 0.5, "cap": 4}}


def test_the_interval_of_a_run_is_printed_only_for_stated_lengths(here):
    (here / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    lines = {}
    for name, changes in {"assumed": {}, "stated": {"batch__lengths": STATED}}.items():
        recipe = recipe_in(here, **changes)
        told, _ = told_of(recipe, here)
        rows = compare_to_forecast(here, told, recipe, here, after=0, memory={})
        (lines[name],) = (row for row in rows if row.startswith("whole run"))
    assert re.search(r"\(.* to .*\)", lines["stated"])
    assert "(" not in lines["assumed"]


def forecast_of_run(folder, **changes):
    """The notes that begin with "forecast", and plan.json, of a run."""
    progress, root = Quiet(), Path(folder)
    recipe = recipe_in(root, run__folder=str(root / "forecast-run"), **changes)
    session.start(recipe, name="tiny", root=root, progress=progress)
    notes = [line for line in progress.notes().splitlines() if line.startswith("forecast")]
    plan = json.loads((root / "forecast-run" / "plan.json").read_text())
    (summary,) = (values for name, *values in progress.told if name == "finish")
    return notes, plan, summary[0]


def test_a_run_prints_the_assumptions_of_its_forecast(here):
    (time, lengths), plan, _ = forecast_of_run(here, run__steps=2)
    assert re.match(r"forecast: \S+ s per step, \S+ s for 2 steps and 2 evaluations \(assumed: device speed; ", time)
    assert re.fullmatch(
        r"forecast: prompts of \d+ tokens \(mean of 10\), 2 completion tokens per trajectory "
        r"\(assumed: 2 of at most 4 tokens per reply\)",
        lengths,
    )
    assert plan["predicted"]["assumed"] == ["lengths are assumed: 2 of at most 4 tokens per reply"]


def test_a_run_forecasts_the_prompt_tokens_that_it_reads(here):
    _, plan, _ = forecast_of_run(here, run__steps=1)
    samples = (here / "forecast-run" / "samples" / "step-000001.jsonl").read_text().splitlines()
    prompts = [json.loads(row)["conversations"][0]["trained"].index(1) for row in samples]
    assert min(prompts) <= plan["predicted"]["prompt_tokens"] <= max(prompts)


def test_a_run_forecasts_stated_lengths_without_an_assumption(here):
    (_, lengths), plan, _ = forecast_of_run(here, run__steps=1, batch__lengths=STATED)
    assert lengths == "forecast: prompts of 3 tokens (batch.lengths), 2 completion tokens per trajectory"
    assert (plan["predicted"]["prompt_tokens"], plan["predicted"]["assumed"]) == (3, [])


def test_a_run_forecasts_the_lengths_of_another_run(here):
    start(here, run__steps=1)
    (_, lengths), plan, _ = forecast_of_run(here, run__steps=1, batch__lengths={"from_run": "run0"})
    assert "(samples of run0)" in lengths and "assumed" not in lengths
    measured = json.loads((here / "run0" / "plan.json").read_text())["measured"]
    assert plan["predicted"]["answer_tokens"] == pytest.approx(measured["answer_tokens"])


def test_recorded_answers_count_conversations_per_trajectory(here):
    (here / "old" / "samples").mkdir(parents=True)
    row = {"conversations": [{"trained": [0, 1, 1]}, {"trained": [0, 0, 1]}, {"trained": [0]}]}
    (here / "old" / "samples" / "step-000001.jsonl").write_text(json.dumps(row) + "\n")
    found = recorded_answers("old", here, cap=9)
    assert (found.conversations, found.lengths.mean) == (2.0, 1.5)


def test_the_forecast_names_what_an_environment_does_not_state(here):
    (here / "mine.py").write_text(
        "async def run(prompt, model):\n"
        "    from stretto.types import Outcome\n"
        "    return Outcome(answer=(await model.chat(prompt.messages)).text)\n"
    )
    (_, lengths), _, _ = forecast_of_run(here, run__steps=1, environment={"kind": "mine:run"})
    words = "one reply per trajectory, because the environment states no max"
    assert f"(assumed: {words}; 2 of at most 4 tokens per reply)" in lengths


def test_a_run_corrects_its_forecast_after_ten_steps(here):
    (*_, line), plan, summary = forecast_of_run(here, run__steps=12, evaluate__every=0)
    assert re.fullmatch(
        r"forecast corrected by steps 2 to 10: \S+ s per step, \S+ completion tokens per trajectory, "
        r"\S+ s for the other 2 steps",
        line,
    )
    assert plan["corrected"]["after"] == 10
    (row,) = (each for each in summary if each.startswith("after step 10"))
    assert len(row.split()) == 7  # its name, seconds of the forecast and of the steps


def test_a_correction_counts_the_steps_and_evaluations_left(here):
    recipe = recipe_in(here, run__steps=30, evaluate__every=10)
    course, _ = told_of(recipe, here)
    correction = ForecastCorrection(recipe, course, here)
    assert correction.seen(0, {"seconds/evaluate": 3.0}) is None
    rows = [{"seconds/step": 9.0 if step == 1 else 2.0, "length/mean": 5.0} for step in range(1, 12)]
    lines = [correction.seen(step, row) for step, row in enumerate(rows, 1)]
    told = "2 s per step, 5 completion tokens per trajectory, 46 s for the other 20 steps and 2 evaluations"
    assert [line for line in lines if line] == [f"forecast corrected by steps 2 to 10: {told}"]
    assert lines.index(f"forecast corrected by steps 2 to 10: {told}") == 9
    assert json.loads((here / "plan.json").read_text())["corrected"]["rest"] == 46.0


RECIPES = Path(__file__).parents[2] / "recipes"
FILES = {"id": "p", "goal": "0", "files": [{"name": f"{name}.py", "task": "1"} for name in ("a", "b", "c")]}
PROJECT = {
    "model__scratch__characters": "01=|abc.py",
    "model__scratch__warmup_steps": 0,
    "task": {
        "source": {"kind": "jsonl", "path": "rows.jsonl"},
        "prompt": "{goal}",
        "holdout": {"prompts": 1},
    },
    "environment": {"kind": "project", "write": "{goal}|{notes}|{name}|{file}=", "empty": "0"},
    "algorithm__name": "multi_conv",
    "rewards": [{"name": "one", "kind": "one:one"}],
    "evaluate": {"every": 0, "prompts": 1},
    "run__steps": 2,
}


def of_task(predicted, measured):
    """True if a forecast of tokens per trajectory is at most a factor of two off."""
    return 0.5 <= predicted["answer_tokens"] / measured["answer_tokens"] <= 2


def test_tokens_of_a_project_are_forecast_within_a_factor_of_two(here):
    rows = [FILES | {"id": str(number), "goal": f"{number:b}"} for number in range(4)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "one.py").write_text("def one(answer, prompt, signals):\n    return float(len(answer) % 2)\n")
    (_, lengths), plan, _ = forecast_of_run(here, **PROJECT)
    assert ", 3 conversations and " in lengths
    assert of_task(plan["predicted"], plan["measured"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny", "3.2 of at most 8 tokens per reply"),
        ("tiny-memory", "2 of at most 2 tokens per memory, 2 of at most 2 per answer"),
        ("tiny-tools", "1.7 of at most 3 turns, 8 of at most 20 tokens per reply"),
        ("tiny-game", "3 of at most 3 turns, 2 of at most 2 tokens per reply"),
    ],
)
def test_tokens_of_a_recipe_are_forecast_within_a_factor_of_two(name, words, here):
    changes = ["run.steps=2", "evaluate.every=0", "batch.prompts=4", "run.folder=run", "guards.min_disk_gb=0"]
    changes += ["model.scratch.warmup_steps=60", "optimizer.warmup=0"]
    recipe = checked_recipe(RECIPES / f"{name}.yaml", changes, root=RECIPES, probes=PROBES)
    progress = Quiet()
    session.start(recipe, name=name, root=RECIPES, progress=progress)
    assert f"(assumed: {words})" in progress.notes()
    plan = json.loads((here / "run" / "plan.json").read_text())
    assert of_task(plan["predicted"], plan["measured"])
