"""Whole programs that are sent a signal: on two cells with all that they have started, and while a base is prepared."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from running import lines, written

MARK = "STRETTO_TEST_MARK"


class Program:
    """`stretto train` of the tiny recipe, in a session of its own, and everything that it starts."""

    def __init__(self, folder, **changes):
        self.run, self.mark = folder / "run", uuid.uuid4().hex
        recipe = written(folder, run__folder=str(self.run), evaluate__every=0, **changes)
        self.out = folder / "out"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("stretto"), "train", recipe],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )

    def when(self, happened, seconds=170):
        end = time.monotonic() + seconds
        while not happened():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()  # what it has started ends with it
                pytest.fail(self.out.read_text() + self.process.communicate()[1])
            time.sleep(0.05)

    def steps(self):
        path = self.run / "metrics.jsonl"
        return [row["step"] for row in lines(path)] if path.exists() else []

    def told(self, seconds=60):
        """Its exit code and the last line on standard error; nothing of it may be left."""
        _, error = self.process.communicate(timeout=seconds)
        end = time.monotonic() + 10
        while (left := self.marked()) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == []
        print(error)
        return self.process.returncode, error.rstrip().rpartition("\n")[2]

    def marked(self):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                gone = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not gone and f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes()[:80])
        return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_two_cells_save_although_everything_they_have_started_hears_the_signal_too(tmp_path, number):
    """As Slurm signals all processes of a job step, and a terminal those of a group."""
    changes = {"run__steps": 100_000, "checkpoint__every": 100_000}
    program = Program(tmp_path, placement={"cluster": "2xcpu", "strategy": "elastic"}, **changes)
    program.when(lambda: len(program.steps()) >= 2)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            if f"{MARK}={program.mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), number)
    code, last = program.told()
    (saved,) = (program.run / "checkpoints").glob("step-*")
    assert code == 128 + number
    assert last == f"stopped after step {int(saved.name[5:])} of 100000; go on with: stretto resume {program.run}"
    assert int(saved.name[5:]) == program.steps()[-1]
    assert "waiting for Ray to start" in program.out.read_text()


@pytest.mark.slow
def test_a_base_that_is_prepared_is_left_and_the_run_can_begin_again(tmp_path):
    scratch = {"layers": 1, "width": 16, "heads": 2, "characters": "01=", "warmup_steps": 10**6, "context": 32}
    program = Program(tmp_path, model__scratch=scratch, deadlines__start=600)
    program.when(lambda: "warm-up" in program.out.read_text())
    program.process.send_signal(signal.SIGTERM)
    code, last = program.told()
    assert (code, last) == (
        143, f"stopped before a checkpoint; begin again with: stretto resume {program.run}"
    )  # fmt: skip
