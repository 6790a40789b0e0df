"""One process trains in a folder; one that is dead, however it died, is in nobody's way."""

import os
import platform
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.cli.main import main
from stretto.errors import RecipeError, StrettoError
from stretto.storage import lock
from stretto.storage.atomic import to_json
from stretto.storage.lock import held, here, lives, start_of, still_held
from stretto.storage.run_folder import Journal

ME = here()
ALIVE = {"locked": False, "silent": 0.0}
HOLDS = """
import sys, time
from pathlib import Path
from stretto.storage.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def written(folder, **changes):
    """A lock's file as another process has left it."""
    told = {field: getattr(ME, field) for field in ("host", "machine", "boot", "space", "pid", "started")}
    (folder / lock.NAME).write_text(to_json({**told, **changes}))


@pytest.fixture
def other(tmp_path):
    """A process that holds the folder's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_second_is_refused_by_the_name_of_the_first_and_may_go_on_once_that_is_killed(tmp_path, other):
    with (
        pytest.raises(RecipeError, match=f"process {other.pid} on {platform.node()} is training there") as caught,
        held(tmp_path),
    ):
        pass
    assert caught.value.exit_code == 2
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody has waited for it yet
    with held(tmp_path):
        assert lock._owner(tmp_path / lock.NAME) == ME
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_process_still_holds_it(tmp_path, other):
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(RecipeError), held(tmp_path):
        pass


def test_one_process_cannot_hold_it_twice_and_leaves_nothing_behind(tmp_path):
    for _ in range(2):
        with held(tmp_path), pytest.raises(RecipeError, match=f"process {os.getpid()} on"), held(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []


def test_it_is_let_go_of_when_the_run_fails(tmp_path):
    with pytest.raises(ValueError), held(tmp_path):
        raise ValueError
    with held(tmp_path):
        pass


def test_a_forked_child_does_not_keep_it_alive(tmp_path):
    """Neither by its copy of the descriptor nor by leaving the block."""
    ready, child_says = os.pipe()
    wait, go = os.pipe()
    with held(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(child_says, b"x")
            os.read(wait, 1)
            os._exit(0)
        os.read(ready, 1)
    with held(tmp_path):
        pass
    os.write(go, b"x")
    os.waitpid(child, 0)
    for handle in (ready, child_says, wait, go):
        os.close(handle)


@pytest.mark.parametrize(
    ("changes", "told", "alive"),
    [
        ({}, {}, True),
        ({"started": "1"}, {}, False),  # its number was given to another
        ({"pid": 2**22 + 1}, {}, False),
        ({"pid": -1}, {}, False),
        ({"pid": 10**30}, {}, False),
        ({"pid": 2**22 + 1}, {"locked": True}, True),  # in another container, maybe
        ({"space": "pid:[1]"}, {}, False),
        ({"space": "pid:[1]"}, {"locked": None}, True),
        ({"space": "pid:[1]"}, {"locked": None, "silent": 121.0}, False),
        ({"boot": "another"}, {"silent": 31.0}, False),  # this machine, before it was started again
        ({"boot": "another"}, {"silent": 3.0}, True),
        ({"boot": "another", "host": "node7"}, {"silent": 119.0}, True),
        ({"boot": "another", "host": "node7"}, {"silent": 121.0}, False),
        ({"boot": "another", "host": "node7"}, {"silent": 121.0, "locked": True}, True),
        ({"boot": "another", "host": "node7"}, {"silent": -60.0}, True),
        ({"boot": "another", "host": "node7", "pid": 2**22 + 1}, {"silent": 1.0, "locked": None}, True),
    ],
)
def test_who_lives(changes, told, alive):
    assert lives(replace(ME, **changes), ME, **(ALIVE | told)) is alive


@pytest.mark.parametrize(
    ("locked", "silent", "alive"), [(False, 0.0, False), (True, 999.0, True), (None, 1.0, True), (None, 121.0, False)]
)
def test_a_lock_that_names_nobody(locked, silent, alive):
    assert lives(None, ME, locked=locked, silent=silent) is alive


@pytest.mark.parametrize("known", [True, False])
def test_where_nobody_says_when_a_process_was_started_the_lock_decides(monkeypatch, known):
    monkeypatch.setattr(lock, "_read", lambda path: "")
    assert start_of(os.getpid()) == ""
    owner = replace(ME, started=ME.started if known else "")
    assert lives(owner, ME, locked=None, silent=0.0)
    assert not lives(owner, ME, locked=False, silent=0.0)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "1"}', "\x00" * 9, '{"host": 1}', "[" * 100_000])
def test_a_torn_lock_is_taken(tmp_path, content):
    (tmp_path / lock.NAME).write_text(content)
    with held(tmp_path):
        assert lock._owner(tmp_path / lock.NAME) == ME


def test_another_machine_counts_as_dead_when_it_was_silent(tmp_path):
    written(tmp_path, host="node7", boot="another")
    with pytest.raises(RecipeError, match=r"process .* on node7 is training there") as caught, held(tmp_path):
        pass
    assert "silent for 120 s (now 0 s)" in caught.value.problems[0].fix
    told = os.stat(tmp_path / lock.NAME)
    os.utime(tmp_path / lock.NAME, (told.st_atime, told.st_mtime - 121))
    with held(tmp_path):
        pass


def test_where_there_are_no_locks_the_name_decides(tmp_path, monkeypatch):
    def none(handle, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with held(tmp_path), pytest.raises(RecipeError, match=f"process {os.getpid()}"), held(tmp_path):
        pass
    written(tmp_path, pid=2**22 + 1)
    with held(tmp_path):
        pass


def test_it_is_touched_while_it_is_held(tmp_path, monkeypatch):
    touched = lock.threading.Event()
    monkeypatch.setattr(lock, "BEAT", 0.001)
    monkeypatch.setattr(lock.os, "utime", lambda handle: touched.set())
    with held(tmp_path):
        assert touched.wait(5)


def test_who_was_frozen_until_another_took_over_stops_and_leaves_the_others_lock(tmp_path):
    with held(tmp_path):
        still_held(tmp_path)
        written(tmp_path, host="node7", pid=77)
        with pytest.raises(StrettoError, match="process 77 on node7 trains there by now"):
            still_held(tmp_path)
    assert lock._owner(tmp_path / lock.NAME).pid == 77


@pytest.mark.parametrize("then", ["gone", "held by another", "replaced by the same process"])
def test_journal_raises_before_it_writes_when_the_lock_was_removed(tmp_path, then):
    with held(tmp_path):
        journal = Journal.create(tmp_path, recipe="", plan={})
        journal.metrics(1, {"loss": 1.0})
        (tmp_path / lock.NAME).unlink()
        if then == "held by another":
            written(tmp_path, host="node7", pid=77)
        elif then == "replaced by the same process":
            written(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        writes = (
            lambda: journal.metrics(2, {"loss": 1.0}),
            lambda: journal.event("checkpoint"),
            lambda: journal.samples(2, [{"step": 2}]),
            lambda: journal.timeline([{"name": "train"}]),
        )
        for write in writes:
            with pytest.raises(StrettoError, match="this process stops\n    fix: look at the run") as caught:
                write()
            assert ("process 77 on node7" in str(caught.value)) is (then == "held by another")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert (tmp_path / lock.NAME).exists() is (then != "gone"), "the lock of the other process was removed"


def test_run_folder_that_was_renamed_ends_the_process_that_trained_there(tmp_path):
    (tmp_path / "run").mkdir()
    with held(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(StrettoError, match="this process stops"):
            still_held(tmp_path / "run")


def test_lock_is_found_after_the_working_directory_changed(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with held(Path("run")):
        monkeypatch.chdir(tmp_path / "there")
        written(Path("run"), host="node7", pid=77)
    assert lock._owner(tmp_path / "there/run" / lock.NAME).pid == 77
    assert not (tmp_path / "here/run" / lock.NAME).exists()


def test_where_there_is_no_lock_nobody_is_stopped(tmp_path):
    still_held(tmp_path)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*told):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lock, "write_all", full)
    with pytest.raises(StrettoError, match=r"\.lock: cannot be written .No space left"), held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_resume_is_refused_with_2_while_another_trains_and_eval_is_not(tmp_path, monkeypatch, capsys):
    from running import start

    run = start(tmp_path, run__steps=1).folder
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with held(run):
        for more in ([], ["--restart"]):
            assert main(["resume", str(run), *more]) == 2
            assert f"process {os.getpid()} on {platform.node()} is training there" in capsys.readouterr().err
        assert main(["eval", str(run)]) == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert main(["resume", str(run)]) == 0
