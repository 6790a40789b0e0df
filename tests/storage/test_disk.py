"""What a full or failing disk does to a run: it ends readably, blocks nothing, and loses nothing that was whole."""

import json
import resource
from contextlib import contextmanager

import pytest
from safetensors import SafetensorError

from running import Quiet, assert_same_run, metrics, recipe_in, resume, start
from stretto.errors import CheckpointError, RecipeError, StrettoError
from stretto.planner.run_lengths import recorded_answers
from stretto.report.timeline import Span, to_events
from stretto.runtime import session
from stretto.runtime.forecast import measured
from stretto.storage.atomic import refusal, storing
from stretto.storage.json_lines import read_rows
from stretto.storage.run_folder import Journal
from stretto.storage.trace import TraceFile


@contextmanager
def no_file_above(size):
    """As a disk that is full: no file of this process may become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on a disk with room."""
    return start(tmp_path_factory.mktemp("whole"), run__steps=1).folder


@pytest.mark.parametrize(
    ("size", "at"),
    [
        (0, r"\.lock"),
        (1000, r"recipe\.yaml"),
        (3000, "base"),  # the tokenizer's files
        (9000, "base"),  # the weights
        (20_000, r"\.model\.draft"),
    ],
)
def test_a_run_on_a_full_disk_ends_readably_and_the_same_recipe_can_be_tried_again(whole, tmp_path, size, at):
    recipe = recipe_in(tmp_path, run__folder=str(tmp_path / "run"), run__steps=1)

    def go():
        session.start(recipe, name="tiny", root=tmp_path, progress=Quiet())

    with no_file_above(size), pytest.raises(StrettoError, match=rf"run/{at}.*: cannot be written \(.*File too large"):
        go()
    assert not list(tmp_path.rglob("*draft*")) + list(tmp_path.rglob("*partial*"))
    if "model" in at:  # it had begun
        with no_file_above(size), pytest.raises(CheckpointError):
            resume(tmp_path / "run")
        resume(tmp_path / "run")
    else:
        assert not (tmp_path / "run").exists()
        go()
    assert_same_run(tmp_path / "run", whole, step=1)


def test_a_draft_of_the_base_that_a_kill_left_is_no_part_of_it(whole, tmp_path):
    draft = tmp_path / "run" / ".base.draft"
    draft.mkdir(parents=True)
    (draft / "leftover.safetensors").write_text("of a larger model")
    (tmp_path / "run" / "recipe.yaml").write_bytes((whole / "recipe.yaml").read_bytes())
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole, step=1)
    assert not list((tmp_path / "run").rglob("leftover*"))


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("no number"), "no number"),
        (SafetensorError("Error while serializing: I/O error: whatever (os error 28)"), "No space left on device"),
        (Exception("Dateisystem ist schreibgeschützt (os error 30)"), "Read-only file system"),
    ],
)
def test_the_system_is_understood_in_whichever_exception_it_comes(tmp_path, failure, reason):
    assert refusal(failure)[1] == reason
    with pytest.raises(StrettoError, match=f"x: cannot be written .{reason}"), storing(tmp_path / "x"):
        raise failure


def test_what_is_not_the_systems_stays_what_it_is(tmp_path):
    with pytest.raises(ZeroDivisionError), storing(tmp_path):
        raise ZeroDivisionError
    with pytest.raises(RecipeError), storing(tmp_path):
        raise RecipeError.of("a", "b", "c")


# Damaged lines --------------------------------------------------------------------------------------------------------

DAMAGED = [
    b"{",
    b"[1]",
    b"7",
    b"null",
    b'{"loss": 1}',
    b'{"step": null}',
    b'{"step": "2"}',
    b'{"step": true}',
    b'{"step": NaN}',
    b'{"step": 1.5}',
    b'{"step": 1' + b"0" * 5000 + b"}",
    b"[" * 100_000,
    b'{"step": 1, "loss": "\xff\xfe"}',
    b"\x00" * 64,
    b'{"step": 1, "lo\x00ss": 1}',
    b'{"step": [1]}',
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line[:24]))
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_damaged_lines_are_left_out_and_what_they_stood_in_is_kept(tmp_path, name, line):
    folder = tmp_path / "run"
    with Journal.create(folder, recipe="", plan={}) as journal:
        journal.metrics(1, {"loss": 1.0})
    path = folder / name
    before = line + b"\n" + path.read_bytes()
    path.write_bytes(before)
    notes = []
    Journal.reopen(folder, step=1, note=notes.append).close()
    assert (folder / f"{name}.unreadable").read_bytes() == before
    assert notes == [f"{name}: damaged lines were left out (1); all of it is in {name}.unreadable"]
    assert not read_rows(path).damaged
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line[:24]))
def test_a_torn_end_is_dropped_without_a_word(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line)
    rows = read_rows(path)
    assert ([row["step"] for row in rows], rows.damaged) == ([1], 0)


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line[:24]))
def test_what_a_run_took_is_measured_from_the_lines_that_are_whole(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "seconds/step": 2.0, "seconds/train": 1.0, "seconds/old": None, "idle": "x"} for n in (1, 2)]
    path.write_bytes(b"\n".join([line, *(json.dumps(row).encode() for row in rows), line]))
    assert measured(path, after=0, memory={})["seconds"] == {"step": 2.0, "train": 1.0}
    assert measured(tmp_path / "absent.jsonl", after=0, memory={}) is None


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X"},
        {"ph": "X", "name": "train", "args": None},
        {"ph": "X", "name": "train", "args": []},
        {"ph": "X", "name": "train", "args": {"step": None}},
        {"ph": "X", "name": "train", "args": {"step": "1"}},
        {"ph": "X", "args": {"step": 1}},
        [1],
        "text",
    ],
)
def test_a_damaged_event_of_the_timeline_is_left_out(tmp_path, event):
    path = tmp_path / "timeline.json"
    kept = to_events([Span(stage="train", cell="cpu", start=0.0, seconds=0.5, step=1)], "host")
    TraceFile(path, [event, *kept, event])
    path.write_bytes(path.read_bytes().replace(b"\n]}", b",\n\xff\xfe\x00\n" + b"[" * 100_000 + b"\n]}"))
    TraceFile.reopen(path, step=1)
    assert json.loads(path.read_text())["traceEvents"] == kept


def test_an_evaluation_that_will_be_made_again_is_not_in_the_timeline_twice(tmp_path):
    path = tmp_path / "timeline.json"
    spans = [Span(stage=s, cell="cpu", start=0.0, seconds=0.5, step=n) for n in (1, 2) for s in ("train", "evaluate")]
    TraceFile(path, to_events(spans, "host"))
    TraceFile.reopen(path, step=2, again=True)
    left = [(event["name"], event["args"]["step"]) for event in json.loads(path.read_text())["traceEvents"]]
    assert left == [("train", 1), ("evaluate", 1), ("train", 2)]


def test_samples_that_cannot_be_read_are_passed_over(tmp_path):
    folder = tmp_path / "run" / "samples"
    (folder / "step-000003.jsonl").mkdir(parents=True)
    (folder / "step-000002.jsonl").write_bytes(b"\n".join(DAMAGED))
    row = {"conversations": [{"trained": [0, 0, 1, 1, 1]}]}
    (folder / "step-000001.jsonl").write_text(json.dumps(row))
    prompt, lengths, *_ = recorded_answers(str(tmp_path / "run"), tmp_path, cap=9)
    assert (prompt, lengths.mean) == (2, 3)


def test_a_resume_over_damaged_files_is_the_same_run(tmp_path):
    usual = {"run__steps": 3, "checkpoint__every": 2}
    (tmp_path / "whole").mkdir()
    other = start(tmp_path / "whole", **usual).folder

    def die(name, *told):
        if name == "step" and told[0] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, at=die, **usual)
    run = next(path for path in tmp_path.glob("run*"))
    for name in ("metrics.jsonl", "events.jsonl", "timeline.json"):
        with (run / name).open("ab") as file:
            file.write(b"\n".join(DAMAGED))
    (run / "samples" / "step-000003.jsonl").write_bytes(b"\xff")
    resume(run)
    assert_same_run(run, other, step=3)
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
