"""The run folder is readable at every moment, survives torn lines and says which file a full disk refused."""

import json
import math
import os
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import RecipeError, StrettoError
from stretto.report.read_run import RunRecord
from stretto.report.timeline import Span, to_events
from stretto.storage import lock
from stretto.storage.atomic import Disk
from stretto.storage.checkpoint import Checkpoints
from stretto.storage.run_folder import Journal, claim_folder, free_folder
from stretto.storage.trace import TraceFile


def lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def spans(step, count=2):
    return to_events(
        [Span(stage="train", cell="cpu", start=float(step), seconds=0.5, step=step) for _ in range(count)], "host"
    )


def written(folder, steps=4):
    with Journal.create(folder, recipe="seed: 0\n", plan={"strategy": "flatten"}) as journal:
        for step in range(steps):
            journal.samples(step, [{"step": step, "prompt": "p"}])
            journal.timeline(spans(step))
            journal.metrics(step, {"loss": 1.0 / (step + 1)})
            journal.event("checkpoint", step=step)
    return folder


def test_a_new_folder_holds_the_recipe_and_the_plan(tmp_path):
    folder = written(tmp_path / "run")
    assert (folder / "recipe.yaml").read_text() == "seed: 0\n"
    assert json.loads((folder / "plan.json").read_text()) == {"strategy": "flatten"}


def test_a_metrics_line_starts_with_the_step_and_has_null_for_what_is_not_finite(tmp_path):
    with Journal.create(tmp_path / "run", recipe="", plan={}) as journal:
        values = {"loss": math.nan, "groups/used": np.int64(4), "ess": np.float32(0.5), "grad_norm": -math.inf}
        journal.metrics(3, values)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text == '{"step": 3, "ess": 0.5, "grad_norm": null, "groups/used": 4, "loss": null}\n'


def test_samples_may_hold_arrays_hostile_text_and_numbers_that_are_not_finite(tmp_path):
    row = {"text": "\ud800\n\x1b[2J", "logprobs": np.array([-math.inf, -0.5]), "reward": {"value": math.nan}}
    with Journal.create(tmp_path / "run", recipe="", plan={}) as journal:
        journal.samples(12, [row, {"tokens": np.arange(3)}])
    first, second = lines(tmp_path / "run" / "samples" / "step-000012.jsonl")
    assert first == {"text": "\ud800\n\x1b[2J", "logprobs": [None, -0.5], "reward": {"value": None}}
    assert second == {"tokens": [0, 1, 2]}


def test_samples_are_written_all_or_none(tmp_path):
    def rows():
        yield {"step": 0}
        raise RuntimeError("half-way")

    with Journal.create(tmp_path / "run", recipe="", plan={}) as journal, pytest.raises(RuntimeError):
        journal.samples(0, rows())
    assert list((tmp_path / "run" / "samples").iterdir()) == []


def test_an_event_belongs_to_the_step_under_way_unless_it_says_otherwise(tmp_path):
    with Journal.create(tmp_path / "run", recipe="", plan={}) as journal:
        journal.event("early")
        journal.metrics(0, {})
        journal.event("later", cell="cpu")
        journal.event("checkpoint", step=0)
    found = [(event["kind"], event["step"]) for event in lines(tmp_path / "run" / "events.jsonl")]
    assert found == [("started", 0), ("early", 0), ("later", 1), ("checkpoint", 0)]


@pytest.mark.parametrize("torn", ["", '{"step": 9, "lo', '{"step"', "\x00\x00", "[1]\n", "7\n"])
def test_reopening_drops_what_is_later_than_the_step_and_what_is_torn(tmp_path, torn):
    folder = written(tmp_path / "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        with (folder / name).open("a") as file:
            file.write(torn)
    with Journal.reopen(folder, step=1) as journal:
        journal.metrics(2, {"loss": 0.0})
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [0, 1, 2]
    kinds = [line["kind"] for line in lines(folder / "events.jsonl")]
    assert kinds == ["started", "checkpoint", "checkpoint", "resumed"]
    assert sorted(path.name for path in (folder / "samples").iterdir()) == ["step-000000.jsonl", "step-000001.jsonl"]
    trace = json.loads((folder / "timeline.json").read_text())
    assert [event["args"]["step"] for event in trace["traceEvents"]] == [0, 0, 1, 1]


def test_reopening_to_write_a_step_again_drops_its_metrics_and_keeps_its_samples(tmp_path):
    folder = written(tmp_path / "run")
    with Journal.reopen(folder, step=2, again=True) as journal:
        journal.metrics(2, {"loss": 0.5})
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [0, 1, 2]
    assert lines(folder / "metrics.jsonl")[2]["loss"] == 0.5
    assert sorted(path.name for path in (folder / "samples").iterdir())[-1] == "step-000002.jsonl"
    assert [event["kind"] for event in lines(folder / "events.jsonl")].count("started") == 1


def test_a_resumed_journal_equals_an_uninterrupted_one(tmp_path):
    whole, resumed = written(tmp_path / "whole", 4), written(tmp_path / "resumed", 3)
    with Journal.reopen(resumed, step=1) as journal:
        for step in (2, 3):
            journal.samples(step, [{"step": step, "prompt": "p"}])
            journal.timeline(spans(step))
            journal.metrics(step, {"loss": 1.0 / (step + 1)})
    for name in ("metrics.jsonl", "samples/step-000003.jsonl"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()
    assert json.loads((whole / "timeline.json").read_text()) == json.loads((resumed / "timeline.json").read_text())


def told_on_reopening(folder, step):
    notes = []
    Journal.reopen(folder, step=step, note=notes.append).close()
    return notes


CUTS = {
    "the second half": (lambda rows: rows[: len(rows) // 2], "metrics.jsonl lacks steps 4 to 7"),
    "the first half": (lambda rows: rows[len(rows) // 2 :], "metrics.jsonl lacks steps 1 to 3"),
    "one line": (lambda rows: rows[:5] + rows[6:], "metrics.jsonl lacks step 5"),
    "every other line": (lambda rows: rows[::2], "metrics.jsonl lacks steps 1, 3, 5, 7"),
    "all": (lambda rows: [], "metrics.jsonl lacks steps 1 to 7"),
    "the last line, half of it": (lambda rows: [*rows[:-1], rows[-1][:9]], "metrics.jsonl lacks step 7"),
    "nothing": (lambda rows: rows, ""),
}


@pytest.mark.parametrize("cut", CUTS)
def test_reopening_names_the_steps_whose_metrics_are_missing(tmp_path, cut):
    folder = written(tmp_path / "run", 8)
    change, told = CUTS[cut]
    path = folder / "metrics.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    notes = told_on_reopening(folder, 7)
    assert len(notes) == bool(told) and all(note.startswith(f"{told}: ") for note in notes)


def test_reopening_names_all_steps_when_metrics_and_events_were_removed(tmp_path):
    folder = written(tmp_path / "run", 4)
    for step in (1, 2, 3):
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    for name in ("metrics.jsonl", "events.jsonl"):
        (folder / name).unlink()
    first, second = told_on_reopening(folder, 3)
    assert first.startswith("metrics.jsonl lacks steps 1 to 3: ")
    assert second.startswith("events.jsonl lacks the start of the run and checkpoint events of steps 1 to 2: ")
    assert [event["kind"] for event in lines(folder / "events.jsonl")] == ["resumed"]


def test_reopening_misses_no_step_after_a_kill_between_a_checkpoint_and_its_event(tmp_path):
    folder = written(tmp_path / "run", 4)
    (folder / "checkpoints" / "step-000003").mkdir(parents=True)
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(events[:-1]))
    assert told_on_reopening(folder, 3) == []


def test_sync_forces_metrics_events_and_new_samples_to_the_medium(tmp_path):
    class Seen(Disk):
        def __init__(self):
            self.synced = []

        def sync(self, path):
            self.synced.append(path.name)
            super().sync(path)

    disk = Seen()
    with Journal.create(tmp_path / "run", recipe="", plan={}) as journal:
        for step in (1, 2, 3):
            journal.samples(step, [{"step": step}])
            journal.metrics(step, {"loss": 1.0})
        (tmp_path / "run/samples/step-000002.jsonl").unlink()
        journal.sync(disk)
        assert sorted(disk.synced) == [
            "events.jsonl", "metrics.jsonl", "run", "samples", "step-000001.jsonl", "step-000003.jsonl"
        ]  # fmt: skip
        disk.synced.clear()
        journal.sync(disk)
        assert sorted(disk.synced) == ["events.jsonl", "metrics.jsonl", "run", "samples"]


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 4), max_size=6), cut=st.integers(0, 2000))
def test_the_timeline_is_whole_after_every_step_and_loses_only_torn_events(tmp_path_factory, counts, cut):
    path = tmp_path_factory.mktemp("trace") / "timeline.json"
    trace, events = TraceFile(path), []
    for step, count in enumerate(counts):
        trace.append(spans(step, count))
        events += spans(step, count)
        assert json.loads(path.read_text())["traceEvents"] == events
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - cut)])
    TraceFile.reopen(path, step=100)
    kept = json.loads(path.read_text())["traceEvents"]
    assert kept == events[: len(kept)]
    assert cut > 3 or len(kept) == len(events)


def test_appending_a_step_writes_no_more_than_that_step(tmp_path):
    trace = TraceFile(tmp_path / "timeline.json")
    trace.append(spans(0, 500))
    before = (tmp_path / "timeline.json").stat()
    trace.append(spans(1, 1))
    after = (tmp_path / "timeline.json").stat()
    assert after.st_ino == before.st_ino, "the file was replaced as a whole"
    assert 0 < after.st_size - before.st_size < 300


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to("/dev/full")
    with pytest.raises(StrettoError, match=f"{name}: cannot be written .No space left on device"):
        Journal.create(folder, recipe="", plan={}).metrics(0, {"loss": 1.0})


def test_sinks_get_the_same_plain_numbers_and_are_closed(tmp_path):
    class Sink:
        def __init__(self):
            self.seen = []

        def metrics(self, step, values):
            self.seen.append((step, dict(values)))

        def samples(self, step, rows):
            self.seen.append((step, len(rows)))

        def close(self):
            self.seen.append("closed")

    sink = Sink()
    with Journal.create(tmp_path / "run", recipe="", plan={}, sinks=[sink]) as journal:
        journal.samples(1, [{"step": 1}] * 3)
        journal.metrics(1, {"loss": math.nan, "ess": 1})
    assert sink.seen == [(1, 3), (1, {"loss": None, "ess": 1}), "closed"]


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    folder = written(tmp_path / "run")
    with pytest.raises(RecipeError, match="stretto resume"):
        Journal.create(folder, recipe="other", plan={})
    with pytest.raises(RecipeError, match="exists already"):
        claim_folder(folder)


def test_free_folders_are_numbered_after_the_highest(tmp_path):
    root = tmp_path / "runs"
    assert free_folder("demo", root) == root / "demo-001"
    (root / "demo-007").mkdir()
    (root / "demo-x-009").mkdir()
    assert free_folder("demo", root) == root / "demo-008"
    assert free_folder("demo-x", root) == root / "demo-x-010"
    assert (root / "demo-x-010").is_dir()


def test_a_folder_is_claimed_once_by_many_who_ask_at_the_same_time(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: free_folder("demo", tmp_path), range(24)))
    assert len(set(folders)) == 24


@pytest.mark.parametrize("claim", [claim_folder, lambda folder: free_folder("demo", folder)])
def test_a_folder_that_cannot_be_made_is_a_problem_of_the_recipe(tmp_path, claim):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecipeError) as caught:
        claim(tmp_path / "file" / "runs")
    assert caught.value.problems[0].field == "run.folder"


def test_an_explicit_folder_is_made_with_its_parents(tmp_path):
    assert claim_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def special(path, kind):
    """Puts something that is no file of a run in the place of one."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless device":
        path.symlink_to("/dev/zero")
    elif kind == "terabyte":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.mkdir()
    return path


KINDS = ("pipe", "endless device", "terabyte", "folder")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "timeline.json"])
def test_special_file_is_refused_by_name_when_a_run_is_reopened(tmp_path, name, kind):
    folder = written(tmp_path / "run")
    special(folder / name, kind)
    with pytest.raises(StrettoError, match=rf"{name}: cannot be read .(not a regular file|1,099,511,627,776 bytes)"):
        Journal.reopen(folder, step=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["state/manifest.json", "adapter_config.json", "state/empty.json"])
def test_special_file_in_a_checkpoint_is_damage_that_a_resume_goes_around(tmp_path, name, kind):
    store = Checkpoints(tmp_path / "checkpoints", keep=9, best=None)

    def model(folder):
        (folder / "adapter_config.json").write_text("{}")
        (folder / "state").mkdir()
        (folder / "state/empty.json").touch()

    for step in (1, 2):
        store.save(step, parts=[], write_model=model, metrics={})
    special(tmp_path / "checkpoints/step-000002" / name, kind)
    skipped = []
    assert store.latest(lambda path, why: skipped.append(path.name)).name == "step-000001"
    assert skipped == ["step-000002"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [lock.NAME, "plan.json", "samples/step-000001.jsonl", "timeline.json"])
def test_special_file_ends_no_reader_of_a_run_otherwise_than_by_its_name(tmp_path, name, kind):
    folder = written(tmp_path / "run")
    special(folder / name, kind)
    run = RunRecord(folder)
    assert run.alive in (True, False)
    for read in (lambda: run.samples(1), lambda: run.spans, lambda: run.plan):
        with suppress(StrettoError):
            read()
