"""Readers next to a training run: what they read stays, and what vanished all the same is chosen again."""

import os
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from running import Quiet, metrics, start
from stretto.errors import CheckpointError, RecipeError
from stretto.export.saved_model import using
from stretto.runtime import questions, session
from stretto.runtime.reading import TRIES, read_checkpoint
from stretto.storage import checkpoint as checkpoints
from stretto.storage.checkpoint import Checkpoints, leased

LORA = {"kind": "lora", "rank": 2, "alpha": 4.0}
RECIPE = SimpleNamespace(checkpoint=SimpleNamespace(keep=1, best=None))


def written(step, path):
    (path / "model").write_text(str(step))


def saved(folder, *steps, keep=9):
    store = Checkpoints(folder / "checkpoints", keep=keep, best=None)
    for step in steps:
        store.save(step, parts=[], write_model=partial(written, step), metrics={})
    return store


def there(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_checkpoint_that_is_read_is_removed_only_afterwards(tmp_path):
    store = saved(tmp_path, 1, keep=1)

    def use(path):
        for step in (2, 3):
            store.save(step, parts=[], write_model=lambda path: None, metrics={})
        assert there(tmp_path) == ["step-000001", "step-000003"]
        return (path / "model").read_text()

    assert read_checkpoint(tmp_path, RECIPE, use) == "1"
    store.save(4, parts=[], write_model=lambda path: None, metrics={})
    assert there(tmp_path) == ["step-000004"]


def test_lease_of_a_reader_that_was_killed_ends_with_it(tmp_path):
    store = saved(tmp_path, 1, keep=1)
    child = os.fork()
    if child == 0:
        with leased(tmp_path / "checkpoints/step-000001"):
            os._exit(0)
    os.waitpid(child, 0)
    store.save(2, parts=[], write_model=lambda path: None, metrics={})
    assert there(tmp_path) == ["step-000002"]


def test_later_checkpoints_of_a_course_that_was_given_up_go_although_they_are_read(tmp_path):
    saved(tmp_path, 1, 8)
    with leased(tmp_path / "checkpoints/step-000008"):
        Checkpoints(tmp_path / "checkpoints", keep=9, best=None).save(
            2, parts=[], write_model=lambda path: None, metrics={}
        )
    assert there(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize("how", ["while it is used", "while it is verified"])
def test_newest_checkpoint_is_taken_again_when_the_one_before_vanished(tmp_path, monkeypatch, how):
    store, asked, verify = saved(tmp_path, 1), [], checkpoints.manifests.verify

    def vanish(path):
        asked.append(path.name)
        if len(asked) < 3:
            store.save(len(asked) + 1, parts=[], write_model=lambda path: None, metrics={})
            shutil.rmtree(path)

    def verified(path):
        vanish(path)
        return verify(path)

    def use(path):
        if how == "while it is used":
            vanish(path)
        return (path / "state/manifest.json").read_bytes() and path.name

    if how == "while it is verified":
        monkeypatch.setattr(checkpoints.manifests, "verify", verified)
    notes = []
    assert read_checkpoint(tmp_path, RECIPE, use, note=notes.append) == "step-000003"
    assert notes == [], "a checkpoint that vanished is not damaged"


def test_reader_gives_up_with_what_to_do_when_every_checkpoint_vanishes(tmp_path):
    store, asked = saved(tmp_path, 1), []

    def use(path):
        asked.append(path)
        store.save(len(asked) + 1, parts=[], write_model=lambda path: None, metrics={})
        shutil.rmtree(path)
        raise FileNotFoundError(path)

    with pytest.raises(CheckpointError, match=rf"removed each of {TRIES} checkpoints(.|\n)*checkpoint\.keep"):
        read_checkpoint(tmp_path, RECIPE, use)
    assert len(asked) == TRIES


def test_failure_that_is_not_a_removal_is_raised_once(tmp_path):
    saved(tmp_path, 1)
    asked = []

    def use(path):
        asked.append(path)
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        read_checkpoint(tmp_path, RECIPE, use)
    assert len(asked) == 1
    with pytest.raises(RecipeError, match="holds no checkpoint of step 7"):
        read_checkpoint(tmp_path, RECIPE, use, which="7")


def test_where_files_have_no_locks_a_checkpoint_is_read_all_the_same(tmp_path, monkeypatch):
    def none(handle, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(checkpoints.fcntl, "flock", none)
    store = saved(tmp_path, 1, keep=1)
    assert read_checkpoint(tmp_path, RECIPE, lambda path: path.name) == "step-000001"
    store.save(2, parts=[], write_model=lambda path: None, metrics={})
    assert there(tmp_path) == ["step-000002"]


@pytest.mark.slow
def test_run_that_trains_on_is_evaluated_and_exported_meanwhile(tmp_path):
    """It keeps one checkpoint, and writes one after each step, between which the readers begin and end."""
    run = start(
        tmp_path,
        run__steps=2,
        checkpoint__keep=1,
        evaluate__every=0,
        model__adapter={"kind": "lora", "rank": 2, "alpha": 4.0},
    ).folder
    found, failures, over = [], [], threading.Event()

    def read():
        try:
            while not over.is_set():
                found.append(questions.evaluate_run(run).n)
                found.append(using(run, "newest", lambda model: model.load("float32") and model.step))
        except Exception as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    changes = ["run.steps=12"]
    session.resume(run, changes=changes, allow=["run.steps"], progress=Quiet())
    over.set()
    reader.join()
    assert failures == [] and len(found) >= 2
    assert metrics(run)[-1]["step"] == 12
