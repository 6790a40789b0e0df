"""A checkpoint is whole or it does not count, whatever happens while it is written and whatever happens to it later."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import CheckpointError
from stretto.storage import manifest as manifests
from stretto.storage.atomic import Disk
from stretto.storage.checkpoint import Checkpoints, metrics_of, step_of
from stretto.storage.manifest import describe, verify, write
from stretto.storage.tensors import read_parts, write_state


class Killed(BaseException):
    """Stands for SIGKILL: once raised, no later file operation of the process happens."""


class DyingDisk(Disk):
    """Dies at its `last`-th operation: before it, or half-way through it where it has a half."""

    def __init__(self, last, *, torn):
        self.left, self.torn = last, torn

    def _alive(self):
        self.left -= 1
        if self.left < 0:
            raise Killed
        return self.left > 0

    def write(self, path, make):
        if self._alive():
            return super().write(path, make)
        if self.torn:
            super().write(path, make)
            for file in [path, *path.rglob("*")]:
                if file.is_file():
                    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        raise Killed

    def sync(self, path):
        if not self._alive():
            raise Killed
        super().sync(path)

    def rename(self, source, target):
        alive = self._alive()
        if alive or self.torn:
            super().rename(source, target)
        if not alive:
            raise Killed

    def remove(self, folder):
        if self._alive():
            return super().remove(folder)
        if self.torn:
            shutil.rmtree(folder / "state")
        raise Killed


class Part:
    """A part that holds what it was told."""

    def __init__(self, name, value=0):
        self.name, self.value = name, value

    def state(self):
        return {"value": self.value, "tensor": torch.full((4,), float(self.value))}

    def restore(self, state):
        assert state["tensor"].tolist() == [state["value"]] * 4
        self.value = state["value"]


def model(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights" * 10)


def save(store, step, *, value=None, metrics=None, parts=("trainer", "cursor")):
    held = [Part(name, step if value is None else value) for name in parts]
    return store.save(step, parts=held, write_model=model, metrics=metrics or {})


def restored(store, path, names=("trainer", "cursor")):
    parts = [Part(name) for name in names]
    step = store.restore(path, parts)
    return step, [part.value for part in parts]


def steps(store):
    return [int(path.name[5:]) for path in sorted(store.folder.iterdir())]


def store_in(folder, *, keep=2, best=None, disk=None):
    return Checkpoints(folder / "checkpoints", keep=keep, best=best, disk=disk)


def test_a_checkpoint_restores_every_part_and_holds_the_model(tmp_path):
    store = store_in(tmp_path)
    path = save(store, 7)
    assert path == tmp_path / "checkpoints" / "step-000007"
    assert store.latest() == path
    assert restored(store, path) == (7, [7, 7])
    assert (path / "config.json").read_text() == "{}"


def test_the_step_of_a_checkpoint_is_in_its_name(tmp_path):
    assert step_of(save(store_in(tmp_path), 1_234_567)) == 1_234_567
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        step_of(tmp_path)


def test_a_run_without_checkpoints_has_no_latest(tmp_path):
    assert store_in(tmp_path).latest() is None
    assert store_in(tmp_path).best() is None


def operations_of_a_save(folder):
    disk = DyingDisk(10_000, torn=False)
    save(store_in(folder, keep=1), 1)
    save(store_in(folder, keep=1, disk=disk), 2)
    return 10_000 - disk.left


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, torn):
    count = operations_of_a_save(tmp_path / "probe")
    assert count > 10
    outcomes = set()
    for last in range(1, count + 1):
        folder = tmp_path / str(last)
        save(store_in(folder, keep=1), 1)
        with pytest.raises(Killed):
            save(store_in(folder, keep=1, disk=DyingDisk(last, torn=torn)), 2)
        after = store_in(folder, keep=1)
        for path in after.folder.glob("step-*"):
            verify(path)  # raises where a half-written or half-removed folder looks like a checkpoint
        step, values = restored(after, after.latest())
        assert values == [step, step]
        outcomes.add(step)
        save(after, 3)
        assert [path.name for path in after.folder.iterdir()] == ["step-000003"], "leftovers were not cleaned up"
    assert outcomes == {1, 2}


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_while_the_only_checkpoint_is_written_again_leaves_one(tmp_path, torn):
    """As after an evaluation that was made up for: the same step, with other metrics."""
    evaluated, outcomes, last = {"eval/accuracy": 1.0}, set(), 0
    while last < 200:
        last += 1
        folder = tmp_path / str(last)
        save(store_in(folder, keep=1), 1)
        try:
            save(store_in(folder, keep=1, disk=DyingDisk(last, torn=torn)), 1, metrics=evaluated)
        except Killed:
            after = store_in(folder, keep=1)
            after.recover()
            assert restored(after, after.latest()) == (1, [1, 1])
            outcomes.add(bool(metrics_of(after.latest())))
            save(after, 2)
            assert [path.name for path in after.folder.iterdir()] == ["step-000002"]
        else:
            break
    assert last > 10 and outcomes == {False, True}


def test_an_error_while_writing_leaves_no_half_written_folder(tmp_path):
    store = store_in(tmp_path)
    save(store, 1)

    def full(folder):
        model(folder)
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be written \(No space left on device\)"):
        store.save(2, parts=[], write_model=full, metrics={})
    assert steps(store) == [1]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_or_truncated_state_file_sends_the_run_to_the_checkpoint_before(tmp_path_factory, data):
    store = store_in(tmp_path_factory.mktemp("run"))
    good, bad = save(store, 1), save(store, 2)
    file = data.draw(st.sampled_from(sorted((bad / "state").iterdir())))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    file.write_bytes(content)
    skipped = {}
    assert store.latest(skipped.__setitem__) == good
    assert str(file.name) in skipped[bad] or "manifest" in skipped[bad]
    with pytest.raises(CheckpointError):
        restored(store, bad)


@pytest.mark.parametrize("name", ["model.safetensors", "state/trainer.safetensors", "state/manifest.json"])
def test_a_missing_file_sends_the_run_to_the_checkpoint_before(tmp_path, name):
    store = store_in(tmp_path)
    good, bad = save(store, 1), save(store, 2)
    (bad / name).unlink()
    assert store.latest() == good


def test_a_truncated_model_file_is_noticed(tmp_path):
    store = store_in(tmp_path)
    path = save(store, 1)
    (path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="7 bytes where the manifest says 70"):
        restored(store, path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("trainer", "cursor", "critic"), "holds no state of critic, which this run needs"),
        (("trainer",), "holds state of cursor, which this run does not have"),
    ],
)
def test_a_missing_or_superfluous_part_is_named_and_nothing_is_restored(tmp_path, names, message):
    store = store_in(tmp_path)
    path = save(store, 5)
    parts = [Part(name) for name in names]
    with pytest.raises(CheckpointError, match=message):
        store.restore(path, parts)
    assert [part.value for part in parts] == [0] * len(parts)


def test_what_older_versions_kept_of_an_engine_is_passed_over(tmp_path):
    store = store_in(tmp_path)
    path = save(store, 3, parts=("trainer", "cursor", "engine"))
    assert restored(store, path) == (3, [3, 3])


@pytest.mark.parametrize("names", [("a", "a"), ("../a",), ("",)])
def test_parts_without_a_name_of_their_own_are_refused(tmp_path, names):
    store = store_in(tmp_path)
    with pytest.raises(CheckpointError, match="different plain names"):
        save(store, 1, parts=names)
    assert steps(store) == []


def test_a_checkpoint_of_another_format_is_refused_by_its_number(tmp_path):
    store = store_in(tmp_path)
    path = save(store, 1)
    manifest = path / "state" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        restored(store, path)


def test_a_checkpoint_of_an_older_format_is_read(tmp_path, monkeypatch):
    store = store_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "FORMAT", 1)
        path = save(store, 1)
    assert json.loads((path / "state" / "manifest.json").read_text())["format"] == 1
    assert restored(store, path)[0] == 1


def test_what_those_who_hold_it_have_written_is_part_of_a_checkpoint(tmp_path):
    store = store_in(tmp_path)

    def model(folder):
        (folder / "state").mkdir()
        write_state(folder / "state", "optimizer", {"m": torch.ones(2)}, part=0, of=2)
        write_state(folder / "state", "optimizer", {"m": torch.zeros(2)}, part=1, of=2)

    path = store.save(1, parts=[], written=["optimizer"], write_model=model, metrics={})
    assert [part["m"].tolist() for part in read_parts(path / "state", "optimizer")] == [[1, 1], [0, 0]]
    assert store.restore(path, [], written=["optimizer"]) == 1
    with pytest.raises(CheckpointError, match="holds no state of trainer"):
        store.restore(path, [], written=["optimizer", "trainer"])
    (path / "state" / "optimizer-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer-2-of-2\.safetensors: cannot be read"):
        store.restore(path, [], written=["optimizer"])


def test_the_last_ones_and_the_best_are_kept_even_after_a_resume(tmp_path):
    for step, accuracy in enumerate([0.1, 0.9, 0.5, float("nan"), 0.9, 0.2], start=1):
        store = store_in(tmp_path, keep=2, best="eval/accuracy")
        save(store, step, metrics={"eval/accuracy": accuracy})
    assert steps(store) == [2, 5, 6]
    assert store.best() == store.folder / "step-000002"


def test_the_best_is_not_the_one_whose_hard_prompts_have_no_verdict(tmp_path):
    """0.505 over 91 of 100 prompts has shown 46 right answers, and 0.48 over all of them has shown 48."""
    store = store_in(tmp_path, keep=1, best="eval/accuracy")
    for step, (accuracy, n) in enumerate([(0.2, 100), (0.48, 100), (46 / 91, 91), (0.3, 100)], start=1):
        save(store, step, metrics={"eval/accuracy": accuracy, "eval/n": n, "eval/asked": 100})
    assert (steps(store), store.best().name) == ([2, 4], "step-000002")
    save(store, 5, metrics={"eval/accuracy": 50 / 91, "eval/n": 91, "eval/asked": 100})
    assert store.best().name == "step-000005", "50 right answers of 100 are more, whatever the others are"


@pytest.mark.parametrize("metric", ["loss", "kl/reference"])
def test_of_losses_and_divergences_the_smallest_is_best(tmp_path, metric):
    store = store_in(tmp_path, keep=1, best=metric)
    for step, value in enumerate([0.5, 0.1, 0.3], start=1):
        save(store, step, metrics={metric: value})
    assert steps(store) == [2, 3]


def test_checkpoints_without_the_metric_are_kept_by_age_alone(tmp_path):
    store = store_in(tmp_path, keep=1, best="eval/accuracy")
    for step in (1, 2, 3):
        save(store, step, metrics={"loss": 1.0})
    assert steps(store) == [3]
    assert store.best() is None


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=7), keep=st.integers(1, 3))
def test_retention_keeps_exactly_the_last_and_the_first_best(tmp_path_factory, values, keep):
    store = store_in(tmp_path_factory.mktemp("run"), keep=keep, best="score")
    for step, value in enumerate(values):
        save(store, step, metrics={} if value is None else {"score": value})
    numbers = [value for value in values if value is not None]
    best = {values.index(max(numbers))} if numbers else set()
    assert steps(store) == sorted(set(range(len(values))[-keep:]) | best)


def test_after_going_back_the_course_that_was_given_up_is_replaced(tmp_path):
    store = store_in(tmp_path, keep=5)
    for step in (10, 20, 30):
        save(store, step, value=1)
    again = store_in(tmp_path, keep=5)
    restored(again, again.folder / "step-000010")
    path = save(again, 20, value=2)
    assert steps(again) == [10, 20]
    assert restored(again, path) == (20, [2, 2])


def test_the_step_just_restored_is_not_written_again(tmp_path):
    path = save(store_in(tmp_path), 10)
    again = store_in(tmp_path)
    restored(again, path)
    born = path.stat().st_ino
    assert save(again, 10) == path
    assert path.stat().st_ino == born


def test_a_step_that_was_evaluated_later_is_written_again_with_its_metrics(tmp_path):
    store = store_in(tmp_path, keep=1, best="eval/accuracy")
    path = save(store, 10, metrics={"loss": float("nan")})
    again = store_in(tmp_path, keep=1, best="eval/accuracy")
    restored(again, path)
    assert math.isnan(metrics_of(path)["loss"])
    save(again, 10, metrics={"loss": float("nan"), "eval/accuracy": 0.5})
    assert again.best() == path
    assert metrics_of(path)["eval/accuracy"] == 0.5
    save(again, 20, metrics={"eval/accuracy": 0.4})
    assert steps(again) == [10, 20]


def test_a_checkpoint_of_an_older_version_is_checked_as_far_as_it_says(tmp_path):
    store = store_in(tmp_path)
    path = save(store, 1)
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "/old/base", "r": 2}')
    listed = describe(path, step=1, metrics={}, parts=("trainer", "cursor"))
    old = {name: replace(entry, sha256=None) for name, entry in listed.files.items() if not name.startswith("state/")}
    held = {name: entry for name, entry in listed.files.items() if name.startswith("state/") and "manifest" not in name}
    write(path / "state" / "manifest.json", replace(listed, files=old | held))
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "/a/new/base", "r": 2}')
    assert store.latest() == path
    (path / "model.safetensors").write_bytes(b"weights")
    assert store.latest() is None


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ('{"r": 2, "base_model_name_or_path": "/somewhere/else"}', True),
        ('{"r": 3, "base_model_name_or_path": "/old/base"}', False),
        ('{"r": 2, "base_model_name_or_path": "/old/base", "more": 1}', False),
        ("[]", False),
        ("{", False),
        ("", False),
    ],
)
def test_of_an_adapter_only_the_path_of_its_base_may_change(tmp_path, text, sound):
    def adapter(folder):
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/old/base", "r": 2}')

    store = store_in(tmp_path)
    path = store.save(1, parts=[Part("trainer")], write_model=adapter, metrics={})
    (path / "adapter_config.json").write_text(text)
    assert (store.latest() == path) == sound


def test_a_byte_of_a_model_file_that_changed_is_noticed(tmp_path):
    store = store_in(tmp_path)
    path = save(store, 1)
    (path / "model.safetensors").write_bytes(b"weightz" * 10)
    with pytest.raises(CheckpointError, match="content changed"):
        restored(store, path)
