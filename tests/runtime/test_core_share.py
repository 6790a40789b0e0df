"""Threads keep to half of the cores while others fill the other half, and only where that helps."""

import asyncio
import os
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from stretto.runtime import core_share as rules
from stretto.runtime.core_share import LONGEST, LOOK, PAUSE, SET, CoreShare, core_share, keep_threads

ON_LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux")


class Machine:
    """Cores that stand idle for as long as a test says."""

    def __init__(self, cores=2, *, second=False):
        self.at, self.stood, self.moves, self.asked = 0.0, 0.0, [], []
        self.share = CoreShare(
            range(cores), keep=self.moves.append, idle=self.idle, clock=lambda: self.at, second=lambda: second
        )

    def idle(self, cores):
        self.asked.append(list(cores))
        return self.stood

    def after(self, seconds, idle):
        """A look, after so many seconds of which the other half stood idle for a share."""
        self.at += seconds
        self.stood = None if idle is None else self.stood + seconds * idle * len(self.asked[-1] if self.asked else [])
        return self.share.look()


@pytest.mark.parametrize(
    ("cores", "second", "kept", "rest"), [(2, False, [0], [1]), (2, True, [1], [0]), (5, True, [2, 3, 4], [0, 1])]
)
def test_threads_keep_to_half_while_others_fill_the_other(cores, second, kept, rest):
    machine = Machine(cores, second=second)
    assert [machine.after(1, idle) for idle in (0, 0.0, 0.3, 0.5)] == [LOOK] * 4
    assert [list(each) for each in machine.moves] == [kept] and machine.asked == [rest] * 4


def test_they_spread_when_it_stands_idle_and_try_again_ever_later():
    machine = Machine()
    pauses = []
    for _ in range(6):
        assert machine.after(1, 1.0) == LOOK
        pauses.append(machine.after(1, 0.6))
        assert list(machine.moves[-1]) == [0, 1]
    assert pauses == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE, LONGEST, LONGEST]
    machine.after(1, 1.0)
    machine.after(1, 0.0)
    assert machine.after(1, 1.0) == PAUSE, "they were there"
    assert len(machine.moves) == 14


def test_a_system_that_does_not_tell_is_left_to_itself():
    machine = Machine()
    machine.after(1, None)
    assert machine.after(1, None) == PAUSE and [list(each) for each in machine.moves] == [[0], [0, 1]]


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
    assert [list(each) for each in machine.moves] == [[0], [0, 1]]


@ON_LINUX
def test_a_devices_thread_is_kept_and_no_other_that_python_knows():
    mine, end, told = os.sched_getaffinity(0), threading.Event(), {}

    def wait():
        told[threading.current_thread().name] = threading.get_native_id()
        end.wait(30)

    started = [threading.Thread(target=wait, name=name) for name in ("localhost/cpu:0-1", "tools-1")]
    for thread in started:
        thread.start()
    try:
        while len(told) < 2:
            pass
        masks = []
        for cores in ({min(mine)}, mine):
            keep_threads("localhost/cpu:0", cores)
            masks.append([os.sched_getaffinity(task) for task in (*told.values(), 0)])
        assert masks == [[{min(mine)}, mine, mine], [mine, mine, mine]]
    finally:
        end.set()
        for thread in started:
            thread.join()


@pytest.mark.parametrize(
    ("change", "watches"),
    [
        ({}, True),
        ({"spins": "20000"}, False),
        ({"devices": 2}, False),
        ({"threads": 2}, False),
        ({"quota": 3}, False),
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
    names = tuple(f"localhost/cpu:{index}" for index in range(change.get("devices", 1)))
    found = core_share(SimpleNamespace(devices=names), dict.fromkeys(names, change.get("threads", 4)))
    watches = watches and sys.platform.startswith("linux")
    assert isinstance(found, CoreShare if watches else nullcontext)
