"""A run begins again by itself only where it never had a checkpoint; all else it leaves as it is, and says so."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from running import Quiet, assert_same_run, lines, metrics, resume, start
from stretto.cli.main import main
from stretto.errors import CheckpointError, RecipeError, StateLostError
from stretto.runtime import loop, session
from stretto.runtime.recipe_file import recipe_text
from stretto.runtime.resume_point import set_aside, standing
from stretto.storage.checkpoint import Checkpoints
from stretto.storage.manifest import FORMAT


def folder_with(tmp_path, *steps, done=0, events=True):
    """A run's folder with checkpoints and lines of metrics up to a step."""
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("seed: 0\n")
    store = Checkpoints(folder / "checkpoints", keep=20, best=None)
    for step in steps:
        store.save(step, parts=[], write_model=lambda path: (path / "config.json").write_text("{}"), metrics={})
    told = [{"step": step} for step in range(done + 1)] if done else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    rows = [{"kind": "checkpoint", "step": step} for step in steps] if events else []
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [{"kind": "started", "step": 0}, *rows])
    )
    return store


def contents(folder):
    """Every file by its path, and every name."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(Path(folder).rglob("*"))}


def manifest_of(store, step):
    return store.folder / f"step-{step:06d}" / "state" / "manifest.json"


def newer(store, step):
    path = manifest_of(store, step)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1, "new": [1]}))


def torn(store, step):
    manifest_of(store, step).write_text('{"form')


def gone(store, step):
    manifest_of(store, step).unlink()


def nested(store, step):
    manifest_of(store, step).write_text("[" * 100_000)


def older(store, step):
    path = manifest_of(store, step)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 0}))


def a_file(store, step):
    path = store.folder / f"step-{step:06d}"
    shutil.rmtree(path)
    path.write_text("")


def dangling(store, step):
    path = store.folder / f"step-{step:06d}"
    shutil.rmtree(path)
    path.symlink_to("/nowhere/at/all")


def aside(store, step):
    path = store.folder / f"step-{step:06d}"
    path.rename(path.with_name(f"{path.name}.unreadable"))


DAMAGES = [torn, gone, nested, older, a_file, dangling]


@pytest.mark.parametrize("damage", [newer, *DAMAGES, aside])
def test_where_no_checkpoint_can_be_read_nothing_is_changed_and_a_restart_is_offered(tmp_path, damage):
    store = folder_with(tmp_path, 2, 4, done=5)
    for step in (2, 4):
        damage(store, step)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"resume .*--restart") as caught:
        standing(store, every=2)
    assert caught.value.exit_code == 1
    assert contents(tmp_path) == before


def unmounted(store):
    shutil.rmtree(store.folder)


def empty(store):
    shutil.rmtree(store.folder)
    store.folder.mkdir()


def link_to_nothing(store):
    shutil.rmtree(store.folder)
    store.folder.symlink_to("/mnt/scratch/that/is/away")


@pytest.mark.parametrize("events", [True, False], ids=["events", "metrics alone"])
@pytest.mark.parametrize("away", [unmounted, empty, link_to_nothing])
def test_checkpoints_that_are_away_are_missed(tmp_path, away, events):
    store = folder_with(tmp_path, 2, 4, done=5, events=events)
    away(store)
    with pytest.raises(CheckpointError, match="after step 4, which is not there" if events else "goes to step 5"):
        standing(store, every=2)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("where", ["folder", "manifest"])
def test_an_error_that_may_pass_is_no_damage(tmp_path, monkeypatch, number, where):
    store = folder_with(tmp_path, 2, 4, done=4)
    folder = where == "folder"
    owner, name, place = (Path, "iterdir", store.folder) if folder else (os, "open", manifest_of(store, 4))
    usual = getattr(owner, name)

    def fails(path, *rest, **more):
        if path == place:
            raise OSError(number, os.strerror(number), str(path))
        return usual(path, *rest, **more)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="cannot be read") as caught:
        patch.setattr(owner, name, fails)
        standing(store, every=2)
    assert not caught.value.damaged
    assert standing(store, every=2).latest == store.folder / "step-000004"


def test_a_newer_format_above_a_sound_checkpoint_stops_the_run(tmp_path):
    store = folder_with(tmp_path, 2, 4, done=4)
    newer(store, 4)
    before = contents(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"newer version of stretto in format {FORMAT + 1}.*\n.*\n.*end in \.unreadable"
    ):
        standing(store, every=2)
    assert contents(tmp_path) == before
    aside(store, 4)  # as the message says
    assert standing(store, every=2).latest == store.folder / "step-000002"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_skipped_for_a_sound_one_before_it(tmp_path, damage):
    store = folder_with(tmp_path, 2, 4, done=4)
    damage(store, 4)
    notes = []
    found = standing(store, every=2, note=notes.append)
    assert found.latest == store.folder / "step-000002"
    store.set_aside(*found.skipped)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-000002", "step-000004.unreadable"]
    assert "skipped step-000004, which is kept as step-000004.unreadable" in notes[0]


@pytest.mark.parametrize(
    ("done", "every"),
    [(0, 2), (1, 2), (2, 2), (4, 2), (50, 100)],
    ids=["at once", "step 1", "at the save", "while the first was written", "long before"],
)
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, done, every):
    store = folder_with(tmp_path, done=done)
    assert standing(store, every=every).latest is None
    store.folder.mkdir()
    (store.folder / ".step-000002.partial").mkdir()  # what the kill left
    assert standing(store, every=every).latest is None


@pytest.mark.parametrize("damage", [newer, torn, dangling])
def test_nothing_that_cannot_be_read_is_removed_by_a_later_save(tmp_path, damage):
    """Whoever saves: an old one that would be discarded, and one in the place of the new."""
    store = folder_with(tmp_path, 1, 3, 4)
    for step in (1, 4):
        damage(store, step)
    short = Checkpoints(store.folder, keep=1, best=None)
    for _ in range(2):
        short.save(4, parts=[], write_model=lambda path: (path / "config.json").write_text("new"), metrics={})
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["step-000001.unreadable", "step-000004", "step-000004.unreadable"]


def test_what_is_set_aside_twice_is_kept_twice(tmp_path):
    store = folder_with(tmp_path, 4)
    for _ in range(2):
        store.set_aside(store.folder / "step-000004")
        store = Checkpoints(store.folder, keep=1, best=None)
        store.save(4, parts=[], write_model=lambda path: (path / "config.json").write_text("new"), metrics={})
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["step-000004", "step-000004.unreadable", "step-000004.unreadable-2"]


def test_a_run_is_set_aside_as_a_run(tmp_path):
    store = folder_with(tmp_path, 2, done=2)
    kept = [set_aside(store.folder.parent).name, set_aside(store.folder.parent).name]
    assert kept == ["before-restart-001", "before-restart-002"]
    names = {path.name for path in (tmp_path / "run" / kept[0]).iterdir()}
    assert names == {"recipe.yaml", "checkpoints", "metrics.jsonl", "events.jsonl", "samples"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"recipe.yaml", *kept}


def test_a_restart_takes_no_run_of_a_logger_with_it(tmp_path):
    folder_with(tmp_path, 2, done=2)
    names = ("wandb.txt", "trackio.txt", "mlflow.txt")
    for name in names:
        (tmp_path / "run" / name).write_text("tiny-1\n")
    kept = set_aside(tmp_path / "run")
    assert all((kept / name).is_file() and not (tmp_path / "run" / name).exists() for name in names)


# With a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a run of three steps."""
    return start(tmp_path_factory.mktemp("short"), run__steps=3).folder


def test_a_resume_that_finds_no_checkpoint_stops_and_a_restart_is_the_same_run(short, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(short, tmp_path / "run")
    for path in (run / "checkpoints").glob("*/state/manifest.json"):
        path.write_text(path.read_text().replace(f'"format": {FORMAT}', '"format": 9'))
    before = contents(run)
    assert main(["resume", str(run)]) == 1
    assert "--restart" in capsys.readouterr().err
    assert contents(run) == before
    assert main(["resume", str(run), "--restart"]) == 0
    assert "before-restart-001" in capsys.readouterr().out
    assert_same_run(run, short, step=3)
    kept = run / "before-restart-001"
    there = contents(kept)
    missing = [path for path in before if kept / path.relative_to(run) not in there]
    assert missing == []


def test_a_resume_sets_a_damaged_checkpoint_aside_and_is_the_same_run(short, tmp_path):
    run = shutil.copytree(short, tmp_path / "run")
    bad = run / "checkpoints" / "step-000003"
    (bad / "state" / "optimizer.safetensors").write_bytes(b"\0" * 9)
    before = {path.relative_to(bad): path.read_bytes() for path in bad.rglob("*") if path.is_file()}
    resume(run)
    assert_same_run(run, short, step=3)
    kept = bad.with_name("step-000003.unreadable")
    assert {path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


def test_a_run_that_goes_back_does_not_begin_again_where_its_checkpoints_cannot_be_read(tmp_path, monkeypatch):
    """What a lost state goes back to is found by the same rule."""

    async def lost(parts, clock, *, step):
        if step == 2:
            for path in tmp_path.glob("run*/checkpoints/*/state/manifest.json"):
                path.write_text("torn")
            raise StateLostError("localhost/cpu:1: its process died")
        return await run_step(parts, clock, step=step)

    async def nothing(*rest, **more):
        """Nobody is left to ask for a checkpoint."""

    run_step = loop.run_step
    monkeypatch.setattr(loop, "run_step", lost)
    monkeypatch.setattr(loop, "save_before", nothing)
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        start(tmp_path)
    (run,) = tmp_path.glob("run*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    assert [row["step"] for row in metrics(run)] == [0, 1]


class Killed(BaseException):
    """Stands for a kill: nothing is written once it is raised."""


def spans(run):
    """(stage, step) of everything in the timeline; nothing stands there twice."""
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    written = [json.dumps(event, sort_keys=True) for event in events]
    assert len(set(written)) == len(written)
    return {(event["name"], event["args"]["step"]) for event in events}


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("_retain", 1),
        ("timeline", 2),
        *(pytest.param(*when, marks=pytest.mark.slow) for when in [("_retain", 2), ("_fill", 2)]),
        *(pytest.param(*when, marks=pytest.mark.slow) for when in [("metrics", 2), ("event", 2)]),
    ],
)
def test_after_a_kill_the_timeline_has_the_spans_of_every_step_that_has_metrics(
    short, tmp_path, monkeypatch, place, step
):
    """Killed before or after the checkpoint got its name, and at each thing that is written beside it."""
    owner = Checkpoints if place.startswith("_") else loop.Journal
    usual = getattr(owner, place)

    def dies(self, *told, **more):
        path = next(tmp_path.glob("run*"))
        if len(lines(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []) > step:
            raise Killed
        return usual(self, *told, **more)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, place, dies)
        start(tmp_path, run__steps=3)
    (run,) = tmp_path.glob("run*")
    resume(run)
    assert_same_run(run, short, step=3)
    assert spans(run) == spans(short)


# recipe.yaml ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"\x00\xff\xfe", "# root: /tmp\nmodel: {name: Größe}".encode("latin-1"), b"\x1f\x8b" * 99]
)
@pytest.mark.parametrize("command", ["resume", "eval"])
def test_a_recipe_of_a_run_that_is_no_text_is_refused(tmp_path, capsys, command, content):
    (tmp_path / "recipe.yaml").write_bytes(content)
    assert main([command, str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert "recipe.yaml" in error
    assert "bug" not in out + error


@pytest.mark.parametrize("name", ["plain", "with space ", "Größe", "a\nb", "\udcff", "x\x85y\u2028z", '"quoted"'])
def test_a_root_of_any_name_is_remembered(short, tmp_path, name):
    recipe, _ = session.load_run_recipe(short)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(recipe, tmp_path / name, tmp_path), encoding="utf-8")
    assert session.load_run_recipe(tmp_path) == (recipe, tmp_path / name)


def test_a_run_that_does_not_exist_has_no_lock(tmp_path):
    with pytest.raises(RecipeError):
        session.resume(tmp_path, progress=Quiet())
    assert list(tmp_path.iterdir()) == []
