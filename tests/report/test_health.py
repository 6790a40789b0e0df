"""A run that hangs, fails or teaches nothing is found out before anybody tunes it; a step's time is divided truly."""

import json
import os
import socket

import pytest

from recorded import metrics_row, write_run
from stretto.report.health import health, idle_cells, shares, waits
from stretto.report.read_run import RunRecord
from stretto.report.timeline import Span
from stretto.runtime.explain_run import explain
from stretto.storage import lock


def alarms(folder, **options):
    return [each.text for each in health(RunRecord(folder), **options) if each.level == "alarm"]


def test_a_sound_run_has_no_alarm(tmp_path):
    found = health(RunRecord(write_run(tmp_path / "one")))
    assert [each.level for each in found] == ["fine"]


def test_a_run_without_a_step_is_not_sound(tmp_path):
    assert alarms(write_run(tmp_path / "one", metrics=[metrics_row(0) | {"seconds/step": 0}], samples=False)) == [
        "No step has ended yet."
    ]


def test_a_deadline_that_passed_is_named_with_its_stage_and_step(tmp_path):
    folder = write_run(tmp_path / "one")
    (folder / "stacks-generate-000004.txt").write_text("…")
    assert alarms(folder) == ["generate passed its deadline in step 4"]


def test_answers_without_a_verdict_are_counted(tmp_path):
    rows = [metrics_row(step) | {"trajectories/failed": 2} for step in (1, 2)]
    assert alarms(write_run(tmp_path / "one", metrics=rows)) == ["4 of 16 answers of the last 2 steps have no verdict."]


def test_steps_that_teach_nothing_are_an_alarm(tmp_path):
    rows = [metrics_row(step) | {"groups/dead": 2} for step in (1, 2, 3)]
    (told,) = alarms(write_run(tmp_path / "one", metrics=rows))
    assert told.startswith("3 of the last 3 steps taught nothing")
    assert alarms(write_run(tmp_path / "two", metrics=rows, recipe={"algorithm": {"name": "ppo"}})) == []


def test_a_run_that_stopped_says_how_to_go_on(tmp_path):
    folder = write_run(tmp_path / "one", recipe={"run": {"steps": 12}})
    (finding,) = [each for each in health(RunRecord(folder)) if each.level == "notice"]
    assert finding.text == "It stopped after step 3 of 12." and finding.fix == f"go on with: stretto resume {folder}"


def test_a_run_that_is_alive_and_silent_may_hang(tmp_path):
    folder = write_run(tmp_path / "one", recipe={"run": {"steps": 12}})
    with lock.held(folder):
        assert RunRecord(folder).alive and not RunRecord(folder, over=True).alive
        written = (folder / "metrics.jsonl").stat().st_mtime
        assert alarms(folder, now=written + 30) == []
        (told,) = alarms(folder, now=written + 300)
        assert told.startswith("Nothing was written for 300 s")
    assert not RunRecord(folder).alive


def test_the_lock_of_a_dead_process_is_none(tmp_path):
    folder = write_run(tmp_path / "one")
    with lock.held(folder):
        text = (folder / lock.NAME).read_text()
    (folder / lock.NAME).write_text(text.replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    assert not RunRecord(folder).alive, socket.gethostname()


def span(stage, start, stop, cell=None, step=1):
    return Span(stage=stage, cell=cell or stage, start=start, seconds=stop - start, step=step)


def test_reward_functions_count_only_while_no_cell_works():
    spans = [span("generate", 0, 4), span("reward", 2, 7, "judges"), span("train", 8, 10)]
    assert shares(spans) == {"generate": 4.0, "reward": 3.0, "nothing": 1.0, "train": 2.0}


def test_stages_that_overlap_share_the_time():
    spans = [span("generate", 0, 4, "a"), span("train", 2, 6, "b"), span("train", 3, 5, "c")]
    assert shares(spans) == pytest.approx({"generate": 3.0, "train": 3.0})


def test_what_no_span_covers_is_nothing_and_all_adds_up_to_the_step(tmp_path):
    spans = [span("generate", 0, 1), span("train", 1, 1.5), span("evaluate", 1.5, 9, "generate")]
    run = RunRecord(write_run(tmp_path / "one", steps=1, spans=spans))
    assert {each.stage: each.seconds for each in waits(run)} == pytest.approx(
        {"generate": 1.0, "train": 0.5, "nothing": 0.5}
    )
    assert idle_cells(run) == pytest.approx({"generate": 0.5, "train": 0.75})


def test_what_the_console_warned_of_is_said_first(tmp_path):
    folder = write_run(tmp_path / "one", steps=40)
    events = [
        {"kind": "diagnosis", "step": 2, "rule": "few", "text": "5 of 8 groups taught nothing"},
        {"kind": "diagnosis", "step": 30, "rule": "cut_off", "text": "40% of answers hit the limit"},
        {"kind": "diagnosis", "step": 38, "rule": "cut_off", "text": "52% of answers hit the limit"},
        {"kind": "warning", "step": 39, "guard": "max_memory", "text": "memory grows"},
        {"kind": "diagnosis", "step": 39, "rule": "rate", "text": None},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = health(RunRecord(folder))
    assert [(each.level, each.text) for each in found] == [
        ("alarm", "Step 38: 52% of answers hit the limit"),
        ("alarm", "Step 39: memory grows"),
        ("notice", "Step 2: 5 of 8 groups taught nothing"),
    ]
    assert not explain(folder)["healthy"]


def test_a_guard_and_the_rule_that_says_the_same_are_said_once(tmp_path):
    folder = write_run(tmp_path / "one")
    events = [
        {"kind": "diagnosis", "step": 2, "rule": "rate", "text": "the rate is too high"},
        {"kind": "warning", "step": 3, "guard": "reward_collapse", "text": "the reward fell"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert alarms(folder) == ["Step 3: the reward fell"]
