"""What hangs ends a run with code 3 or is dropped and counted, is named, and leaves no process: real trainings."""

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

pytestmark = pytest.mark.slow

HANGING = """
import asyncio, sys, time
from stretto.cli.main import main
from stretto.environments import single_turn

plain = single_turn.run

async def run(prompt, model):
    outcome = await plain(prompt, model)
    if prompt.reference.startswith("0"):
        await asyncio.sleep(3600)
    return outcome

single_turn.run = run
sys.exit(main())
"""
"""A `stretto` whose environment hangs at some prompts."""

REWARD = """
import time

def judge(answer, prompt, signals):
    if len(answer) % 2:
        time.sleep(3600)
    return 1.0
"""
"""A reward that hangs at some answers."""

TINY = {
    "deadlines": {"start": 300, "generate": 6, "train": 6, "publish": 6, "reward": 60},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 1000},
}


END = 10
"""Seconds after a deadline in which a run has ended, or goes on without what hung."""


def in_time():
    """The same on this machine as it is now: as many times that as processes share a core."""
    return END * max(1.0, os.getloadavg()[0] / os.cpu_count())


class Command:
    """A `stretto` command of a recipe as a process; everything that it starts carries a mark of the test's."""

    def __init__(self, folder, program, command="train", **changes):
        self.folder, self.mark = folder, uuid.uuid4().hex
        recipe = written(folder, run__folder=str(folder / "run"), **TINY | changes)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, command, str(recipe)],
            cwd=folder,
            env={**os.environ, "STRETTO_TEST": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def marked(self):
        """Ids and names of all processes that it has started and that are left."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"STRETTO_TEST={self.mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                    found[int(place.name)] = (place / "cmdline").read_text().strip("\0")
        return found

    def until(self, ready):
        """What `ready` says as soon as it says something, while the run goes on."""
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            if found := ready():
                return found
            time.sleep(0.1)
        self.process.kill()
        raise AssertionError(self.process.communicate()[0])

    def ended(self):
        """Its exit code, what it said, and the processes that it left."""
        said, _ = self.process.communicate(timeout=150)
        end = time.monotonic() + 20  # the watcher that ends the rest ends last
        while (left := self.marked()) and time.monotonic() < end:
            time.sleep(0.1)
        return self.process.returncode, said, left

    def workers(self):
        """Ids of the processes that serve cells."""
        return [process for process, name in self.marked().items() if name.startswith("ray::WorkerActor")]


def steps_taken(folder):
    """How many steps a run has written down."""
    path = folder / "run" / "metrics.jsonl"
    return len(lines(path)) if path.exists() else 0


PLAIN = "import sys; from stretto.cli.main import main; sys.exit(main())"


def test_a_worker_that_is_stopped_ends_the_run_and_is_named(tmp_path):
    placement = {"cluster": "2xcpu", "strategy": "elastic"}
    run = Command(tmp_path, PLAIN, placement=placement, run__steps=100_000)
    run.until(lambda: steps_taken(tmp_path))
    workers = run.workers()
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGSTOP)
    stopped = time.monotonic()
    code, said, left = run.ended()
    took = time.monotonic() - stopped
    assert code == 3, said
    assert left == {}
    assert f"it does not answer; process {workers[1]} is stopped" in " ".join(said.split())
    (stacks,) = (tmp_path / "run").glob("stacks-*.txt")
    written = stacks.read_text()
    assert written.count("=== ") == 3, "this process and two workers"
    assert "workers/launchers/ray.py" in written, "the other worker tells its stacks"
    assert took < TINY["deadlines"]["generate"] + in_time()


@pytest.mark.parametrize("cluster", ["2xcpu"])
def test_what_hangs_in_an_environment_or_a_reward_is_dropped_and_counted(cluster, tmp_path):
    (tmp_path / "hanging.py").write_text(REWARD)
    run = Command(
        tmp_path,
        HANGING,
        placement={"cluster": cluster},
        environment={"deadline": 1},
        rewards=[{"name": "slow", "kind": "hanging:judge", "deadline": 1.0}],
        guards={"min_disk_gb": 0, "reward_error_share": 1.0},
        run__steps=1,
    )
    code, said, left = run.ended()
    assert code == 0, said
    assert left == {}
    (step,) = lines(tmp_path / "run" / "metrics.jsonl")
    rows = lines(tmp_path / "run" / "samples" / "step-000001.jsonl")
    reasons = [row["failure"] for row in rows if row["failure"]]
    assert step["trajectories/failed"] == len(reasons)
    assert any("environment: not finished within 1 s outside the engine" in reason for reason in reasons)
    slow = sum("hanging:judge did not answer within 1 s" in reason for reason in reasons)
    assert slow
    assert step["seconds/step"] < 1 + slow + in_time(), "environments hang at once, rewards one after another"


SPINS = """
from pathlib import Path
from stretto import Outcome

async def play(prompt, model):
    reply = await model.chat(prompt.messages)
    while Path(__file__).with_name("spin").exists():
        pass
    return Outcome(answer=reply.text)
"""


@pytest.mark.parametrize("pressed", [False, True])
def test_an_environment_that_never_awaits_ends_the_run_and_is_named(pressed, tmp_path):
    (tmp_path / "spins.py").write_text(SPINS)
    environment = {"kind": "spins:play", "deadline": 3600 if pressed else 1}
    run = Command(tmp_path, PLAIN, environment=environment, run__steps=100_000)
    run.until(lambda: steps_taken(tmp_path))
    (tmp_path / "spin").touch()
    if pressed:
        time.sleep(2)
        run.process.send_signal(signal.SIGINT)
    code, said, left = run.ended()
    assert code == (130 if pressed else 3), said
    assert left == {} and "Traceback" not in said
    assert pressed or f"{tmp_path / 'spins.py'}, line 7, in play has blocked step" in " ".join(said.split())
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")), "a step that was taken is kept"


VALUE = {
    "algorithm": {"name": "astar_po", "vstar": {"samples": 1000}},
    "batch": {"prompts": 6, "samples": 1},
    "placement": {"cluster": "2xcpu", "strategy": "flatten"},
    "engine": {"max_new_tokens": 16},
}
"""A table of V* that takes longer than the test."""


def answers_kept(folder):
    """How many answers tables of V* hold."""
    return sum(len(lines(path)) - 1 for path in (folder / ".stretto" / "vstar").glob("*.jsonl"))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGINT])
def test_a_table_of_values_survives_whatever_ends_its_making(number, tmp_path):
    run = Command(tmp_path, PLAIN, "value", **VALUE)
    run.until(lambda: answers_kept(tmp_path) > 0)  # of a file that is just made, not even the first line is there
    workers = run.workers()
    assert len(workers) == 2
    os.kill(run.process.pid if number == signal.SIGINT else workers[1], number)
    code, said, left = run.ended()
    told = " ".join(said.split())
    assert left == {}
    assert 0 < answers_kept(tmp_path) < 10_000, "it would have gone on"
    stacks = list(tmp_path.glob("stacks-*.txt"))
    if number == signal.SIGSTOP:
        assert code == 3 and f"it does not answer; process {workers[1]} is stopped" in told, said
        assert stacks[0].name in told and stacks[0].read_text().count("=== ") == 3
    elif number == signal.SIGKILL:
        assert code == 1 and "its process has died fix: run the same command again" in told, said
    else:
        assert code == 130 and not stacks, said


SILENT = """
import os, socket, sys, threading
from stretto.cli.main import main

server, callers = socket.create_server(("127.0.0.1", 0)), []
threading.Thread(target=lambda: [callers.append(server.accept()) for _ in range(10**6)], daemon=True).start()
os.environ["RAY_ADDRESS"] = "127.0.0.1:%d" % server.getsockname()[1]
sys.exit(main())
"""
"""A `stretto` that is sent to a Ray cluster which takes every call and never answers."""

NOBODY = """
import os, socket, sys
from stretto.cli.main import main

with socket.create_server(("127.0.0.1", 0)) as server:
    os.environ["RAY_ADDRESS"] = "127.0.0.1:%d" % server.getsockname()[1]
sys.exit(main())
"""
"""One that is sent to a port at which nobody listens."""

BLOCKING = """
import asyncio, sys, time
from stretto.cli.main import main
from stretto.environments import single_turn

plain = single_turn.run

async def run(prompt, model):
    outcome = await plain(prompt, model)
    if prompt.reference.startswith("0"):
        await asyncio.to_thread(time.sleep, 3600)
    return outcome

single_turn.run = run
sys.exit(main())
"""
"""One whose environment blocks in a thread at some prompts."""

LATE = """
import sys, time
from stretto.cli.main import main
from stretto.workers.launchers import ray

class Stuck(ray.RayLauncher):
    def {what}(self, *given):
        time.sleep(3600)

ray.RayLauncher = Stuck
sys.exit(main())
"""
"""One in which a call of Ray blocks in a thread."""


@pytest.mark.parametrize(
    ("command", "program", "says"),
    [
        ("train", NOBODY, "nobody answers at 127.0.0.1:"),
        ("eval", SILENT, "what listens at RAY_ADDRESS=127.0.0.1:"),
        ("train", LATE.format(what="_join"), "where every process stands is in"),
        ("train", LATE.format(what="_actor"), "where every process stands is in"),
    ],
)
def test_a_ray_that_never_answers_ends_the_command_with_3(command, program, says, tmp_path):
    deadlines = {**TINY["deadlines"], "start": 12}
    begun = time.monotonic()
    run = Command(
        tmp_path, program, command, placement={"cluster": "2xcpu", "strategy": "flatten"}, deadlines=deadlines
    )
    if program != NOBODY and command == "train":
        run.until(lambda: (tmp_path / "run").exists())
        begun = time.monotonic()
    code, said, left = run.ended()
    took = time.monotonic() - begun
    assert code == 3, said
    assert says in " ".join(said.split())
    assert left == {}
    assert command == "eval" or took < deadlines["start"] + in_time()


@pytest.mark.parametrize("cluster", ["1xcpu", "2xcpu"])
def test_an_environment_that_blocks_in_a_thread_keeps_no_run_from_its_end(cluster, tmp_path):
    environment = {"deadline": 1}
    guards = {"min_disk_gb": 0, "reward_error_share": 1.0}
    run = Command(
        tmp_path, BLOCKING, placement={"cluster": cluster}, environment=environment, guards=guards, run__steps=1
    )
    code, said, left = run.ended()
    assert code == 0, said
    assert left == {}
    assert "samples  " in said, "all that was said"


def test_ray_that_cannot_be_shut_down_keeps_no_run_from_its_end(tmp_path):
    impatient = "import ray\nfrom stretto.workers import worker_group\n\nworker_group.CLOSING = 2\n"
    program = LATE.format(what="_leave").replace("import ray\n", impatient)
    run = Command(tmp_path, program, placement={"cluster": "2xcpu", "strategy": "flatten"}, run__steps=1)
    code, said, left = run.ended()
    assert code == 0, said
    assert left == {}
