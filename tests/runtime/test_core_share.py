"""Threads keep to half of the cores while others fill the other half, and only where that helps."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from running import start
from stretto.runtime import core_share as rules
from stretto.runtime import session
from stretto.runtime.core_share import LONGEST, LOOK, PAUSE, SET, CoreShare, core_share

ON_LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux")


class Machine:
    """Cores that stand idle for as long as a test says."""

    def __init__(self, cores=2, *, second=False):
        self.at, self.stood, self.moves, self.asked = 0.0, 0.0, [], []
        self.share = CoreShare(
            range(cores), move=self.move, idle=self.idle, clock=lambda: self.at, second=lambda: second
        )

    def move(self, before, cores):
        assert list(before) == (self.moves[-1] if self.moves else list(self.share.cores))
        self.moves.append(list(cores))

    def idle(self, cores):
        self.asked.append(list(cores))
        return self.stood

    def after(self, seconds, idle):
        """A look, after so many seconds of which the other half stood idle for a share."""
        self.at += seconds
        self.stood = None if idle is None else self.stood + seconds * idle * len(self.asked[-1] if self.asked else [])
        return self.share.look()


@pytest.mark.parametrize(
    ("cores", "second", "kept", "rest"),
    [
        (2, False, [0], [1]),
        (2, True, [1], [0]),
        (5, True, [2, 3, 4], [0, 1]),
        (5, False, [0, 1, 2], [3, 4]),
        (3, False, [0, 1], [2]),
    ],
)
def test_threads_keep_to_half_while_others_fill_the_other(cores, second, kept, rest):
    machine = Machine(cores, second=second)
    assert [machine.after(1, idle) for idle in (0, 0.0, 0.3, 0.5)] == [LOOK] * 4
    assert machine.moves == [kept] and machine.asked == [rest] * 4


def test_they_spread_when_it_stands_idle_and_try_again_ever_later():
    machine = Machine()
    pauses = []
    for _ in range(6):
        assert machine.after(1, 1.0) == LOOK
        pauses.append(machine.after(1, 0.6))
        assert machine.moves[-1] == [0, 1]
    assert pauses == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE, LONGEST, LONGEST]
    machine.after(1, 1.0)
    machine.after(1, 0.0)
    assert machine.after(1, 1.0) == PAUSE, "they were there"
    assert len(machine.moves) == 14


def test_a_system_that_does_not_tell_is_left_to_itself():
    machine = Machine()
    machine.after(1, None)
    assert machine.after(1, None) == PAUSE and machine.moves == [[0], [0, 1]]


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_looks_as_long_as_it_lasts_and_leaves_threads_free(broken, monkeypatch):
    monkeypatch.setattr(rules, "LOOK", 0.0)
    machine = Machine()

    def idle(cores):
        machine.asked.append(cores)
        if broken and len(machine.asked) == 5:
            raise RuntimeError("this machine is odd")
        return 0.0

    machine.share.idle = idle

    async def run():
        with machine.share:
            while len(machine.asked) < 5 or (broken and not machine.share.looking.done()):
                await asyncio.sleep(0)
        looking = machine.share.looking
        await asyncio.gather(looking, return_exceptions=True)

    asyncio.run(run())
    assert machine.moves == [[0], [0, 1]]


MOVES = """
import json, os, sys, threading
import torch
from stretto.runtime.core_share import move_threads

device, mine = "localhost/cpu:0", os.sched_getaffinity(0)
half, end, ready, told = {min(mine)}, threading.Event(), threading.Barrier(3), {}

def wait(computes):
    if computes:
        torch.set_num_threads(2)
        torch.ones(1 << 20).exp()
    told[threading.current_thread().name] = threading.get_native_id()
    ready.wait(30)
    end.wait(30)

known = [threading.Thread(target=wait, args=(name == "1",), name=f"{device}-{name}") for name in "1"]
known += [threading.Thread(target=wait, args=(False,), name="tools-1")]
for thread in known:
    thread.start()
ready.wait(30)
by = {thread.native_id for thread in threading.enumerate()}
computing = [int(task) for task in os.listdir("/proc/self/task") if int(task) not in by]
begun_meanwhile = told["tools-1"]
masks = lambda: [sorted(os.sched_getaffinity(task)) for task in (told[f"{device}-1"], begun_meanwhile, os.getpid())]
seen = [masks()]
move_threads(device, mine, half)
seen.append(masks())
shared = bool(computing) and all(os.sched_getaffinity(task) == half for task in computing)
os.sched_setaffinity(begun_meanwhile, half)
move_threads(device, half, mine)
seen.append(masks())
end.set()
json.dump([shared, sorted(mine), sorted(half), seen], sys.stdout)
"""


@ON_LINUX
def test_a_devices_thread_is_moved_with_those_that_compute_for_it_and_no_other():
    path = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", MOVES], env=path, capture_output=True, text=True, check=True)
    shared, mine, half, (first, then, last) = json.loads(done.stdout)
    assert shared, "those that share its operations"
    assert first == [mine, mine, mine] and then == [half, mine, mine]
    assert last == [mine, mine, mine], "also what a thread that was kept has begun"


def test_a_run_is_kept_to_its_share_while_it_trains(tmp_path, monkeypatch):
    """The thread of its device has the name by which it is found."""
    seen = []

    @contextmanager
    def recorded(plan, threads):
        named = [thread for thread in threading.enumerate() if thread.name.startswith(plan.devices[0])]
        seen.append((len(named), dict(threads)))
        yield
        seen.append([path.read_text().count("\n") for path in tmp_path.rglob("metrics.jsonl")])

    monkeypatch.setattr(session, "core_share", recorded)
    start(tmp_path, run__steps=2, evaluate__every=0)
    assert seen == [(1, {"localhost/cpu:0": 1}), [2]]


@pytest.mark.parametrize(
    ("change", "watches"),
    [
        ({}, True),
        ({"spins": "20000"}, False),
        ({"devices": 2}, False),
        ({"threads": 3}, False),
        ({"quota": 3}, False),
        ({"engine": "vllm"}, False),
        ({"idle": None}, False),
        *(({"said": name}, False) for name in SET),
    ],
    ids=str,
)
def test_it_is_for_runs_that_compete_for_all_cores(change, watches, monkeypatch):
    for name in SET:
        monkeypatch.delenv(name, raising=False)
    if "said" in change:
        monkeypatch.setenv(change["said"], "2")
    monkeypatch.setenv("GOMP_SPINCOUNT", change.get("spins", "0"))
    monkeypatch.setattr(rules, "shown", lambda: 4)
    monkeypatch.setattr(rules, "cores", lambda: change.get("quota", 4))
    monkeypatch.setattr(rules, "seconds_idle", lambda cores: change.get("idle", 1.0))
    names = tuple(f"localhost/cpu:{index}" for index in range(change.get("devices", 1)))
    cells = [SimpleNamespace(engine=change.get("engine")), SimpleNamespace(engine=None)]
    found = core_share(SimpleNamespace(devices=names, cells=cells), dict.fromkeys(names, change.get("threads", 4)))
    watches = watches and sys.platform.startswith("linux")
    assert isinstance(found, CoreShare if watches else nullcontext)
