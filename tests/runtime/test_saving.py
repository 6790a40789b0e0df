"""Checkpoints are written while the run goes on; what they hold and what is said of them is as if it had waited."""

import threading
import time

import pytest

from running import assert_same_run, lines, metrics, resume, start
from stretto.errors import CheckpointError, DeadlineError
from stretto.models.load import Policy
from stretto.runtime import saving
from stretto.storage.atomic import Disk
from stretto.storage.checkpoint import Checkpoints
from stretto.workers import model_state
from stretto.workers.worker import Worker

USUAL = {"run__steps": 5, "evaluate__every": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose checkpoints are written as fast as they may be."""
    return start(tmp_path_factory.mktemp("whole"), **USUAL).folder


class Slow:
    """Lets every checkpoint take its time, and notes what happens meanwhile."""

    def __init__(self, monkeypatch, *, seconds):
        self.writing, self.most, self.lock, self.threads = 0, 0, threading.Lock(), set()
        save, write = Checkpoints.save, Policy.save

        def slowly(checkpoints, *arguments, **named):
            with self.lock:
                self.writing += 1
                self.most = max(self.most, self.writing)
            self.threads.add(threading.current_thread())
            time.sleep(seconds)
            try:
                return save(checkpoints, *arguments, **named)
            finally:
                with self.lock:
                    self.writing -= 1

        def late(policy, *arguments, **named):
            time.sleep(seconds)
            write(policy, *arguments, **named)

        monkeypatch.setattr(Checkpoints, "save", slowly)
        monkeypatch.setattr(Policy, "save", late)


def test_slow_checkpoints_change_nothing_and_there_is_one_at_a_time(whole, tmp_path, monkeypatch):
    slow = Slow(monkeypatch, seconds=0.1)
    begun, said = {}, []

    def at(name, *told):
        if name == "step":
            begun[told[0]] = slow.writing
            said.append([row["step"] for row in lines(run() / "events.jsonl") if row["kind"] == "checkpoint"])

    def run():
        (folder,) = tmp_path.glob("run*")
        return folder

    start(tmp_path, at=at, **USUAL)
    assert_same_run(run(), whole, step=5)
    assert slow.most == 1
    assert threading.main_thread() not in slow.threads
    for step, told in enumerate(said, start=1):
        assert set(told) <= set(range(step)), "said before it was there"
    assert [row["step"] for row in lines(run() / "events.jsonl") if row["kind"] == "checkpoint"] == [1, 2, 3, 4, 5]


def test_a_worker_generates_while_its_own_files_are_written(tmp_path, monkeypatch):
    """A write waits for the next step's generation, to which a worker that does one thing at a time would not come."""
    generated, met = threading.Event(), []
    write, generate = model_state.write, Worker.generate

    def until_it_generates(*arguments, **named):
        last = len(met) == 4  # no step follows
        generated.clear()
        met.append(last or generated.wait(timeout=20))
        return write(*arguments, **named)

    def noted(*arguments):
        generated.set()
        return generate(*arguments)

    monkeypatch.setattr(model_state, "write", until_it_generates)
    monkeypatch.setattr(Worker, "generate", noted)
    start(tmp_path, **USUAL)
    assert met == [True] * 5


def test_a_checkpoint_of_every_other_step_lets_the_next_step_go_on(tmp_path, monkeypatch):
    """The first checkpoint waits until the step after it is over."""
    third, met = threading.Event(), []
    save = Checkpoints.save

    def until_step_three(*arguments, **named):
        met.append(third.wait(timeout=20))
        return save(*arguments, **named)

    monkeypatch.setattr(Checkpoints, "save", until_step_three)
    start(tmp_path, at=lambda name, *told: third.set() if (name, *told[:1]) == ("step", 3) else None,
          run__steps=4, evaluate__every=0, checkpoint__every=2)  # fmt: skip
    assert met == [True] * 2


def test_an_error_in_the_background_ends_the_run_as_it_would_have(tmp_path, monkeypatch):
    rename = Disk.rename

    def full(disk, source, target):
        if target.name == "step-000002":
            raise OSError(28, "No space left on device", str(target))
        rename(disk, source, target)

    monkeypatch.setattr(Disk, "rename", full)
    with pytest.raises(CheckpointError, match=r"step-000002: cannot be written \(No space left on device\)\n.*resume"):
        start(tmp_path, **USUAL)
    (run,) = tmp_path.glob("run*")
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000001"]
    monkeypatch.undo()
    resume(run)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5]


def test_a_disk_that_never_answers_ends_the_run_by_name(tmp_path, monkeypatch):
    answers, fill = threading.Event(), Checkpoints._fill
    monkeypatch.setattr(saving, "CLOSING", 0.1)
    monkeypatch.setattr(Checkpoints, "_fill", lambda *arguments: (answers.wait(60), fill(*arguments)))
    try:
        with pytest.raises(DeadlineError, match=r"(?s)run0 is not there after 0\.5 s.*deadlines\.checkpoint"):
            start(tmp_path, deadlines__checkpoint=0.5, **USUAL)
    finally:
        answers.set()


def test_a_run_that_fails_waits_for_the_checkpoint_that_is_on_its_way(tmp_path, monkeypatch):
    Slow(monkeypatch, seconds=0.2)

    def die(name, *told):
        if name == "step" and told[0] == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(tmp_path, at=die, **USUAL)
    (run,) = tmp_path.glob("run*")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
