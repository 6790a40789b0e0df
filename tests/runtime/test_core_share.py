"""Threads keep to the cores that other programs leave them, as long as those want the rest."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from stretto.checks.machine.load import CoreUse
from stretto.runtime.core_share import CoreShare, core_share, keep_threads


class Machine:
    """Cores whose use a test tells; a look is a second after the one before."""

    def __init__(self, cores, first=0):
        self.at, self.own, self.used, self.kept = 0.0, 0.0, dict.fromkeys(range(cores), 0.0), []
        self.share = CoreShare(range(cores), measure=self.measure, keep=self.kept.append, first=lambda count: first)
        self.share.look()

    def measure(self, cores):
        assert list(cores) == sorted(self.used)
        return CoreUse(at=self.at, used=dict(self.used), own=self.own)

    def second(self, *used, own):
        """A second in which each core was in use so much, and this process computed so long; the cores then chosen."""
        self.at, self.own = self.at + 1, self.own + own
        for core, more in enumerate(used):
            self.used[core] += more
        self.share.look()
        return list(self.share.chosen)


def test_it_keeps_to_what_others_leave_and_spreads_when_cores_stand_idle():
    machine = Machine(2)
    assert machine.second(1.0, 1.0, own=2.0) == [0, 1], "all of that is its own"
    assert machine.second(1.0, 1.0, own=1.4) == [0, 1], "a burst of somebody's"
    assert machine.second(1.0, 1.0, own=1.0) == [0], "two others"
    assert machine.second(1.0, 0.95, own=1.0) == [0]
    assert machine.second(1.0, 1.0, own=0.3) == [0], "more of them, who take turns with it"
    assert machine.second(1.0, 0.5, own=1.0) == [0, 1], "they wait at times"
    assert machine.second(1.0, 1.0, own=1.0) == [0]
    assert machine.kept == [[0], [0, 1], [0]]


@pytest.mark.parametrize(("own", "first", "chosen"), [(2.0, 0, [0, 1]), (2.0, 3, [0, 3]), (1.1, 2, [2]), (0.0, 1, [1])])
def test_it_takes_neighbours_and_one_at_least(own, first, chosen):
    assert Machine(4, first).second(1.0, 1.0, 1.0, 1.0, own=own) == chosen


def test_a_system_that_stops_telling_changes_nothing():
    machine = Machine(2)
    machine.measure, machine.share.measure = None, lambda cores: None
    machine.share.look()
    machine.share.look()
    assert machine.kept == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux")
def test_threads_that_compute_are_kept_and_the_main_one_is_not():
    mine, end, told = os.sched_getaffinity(0), threading.Event(), []

    def compute():
        told.append(threading.get_native_id())
        end.wait(30)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        while not told:
            pass
        keep_threads({min(mine)})
        assert os.sched_getaffinity(told[0]) == {min(mine)} and os.sched_getaffinity(0) == mine
        keep_threads(mine)
        assert os.sched_getaffinity(told[0]) == mine
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize(
    ("spins", "devices", "threads", "watches"),
    [("0", 1, 2, True), ("20000", 1, 2, False), ("0", 2, 2, False), ("0", 1, 1, False)],
)
def test_only_several_threads_that_sleep_at_once_are_kept(spins, devices, threads, watches, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", spins)
    names = tuple(f"localhost/cpu:{index}" for index in range(devices))
    found = core_share(SimpleNamespace(devices=names), dict.fromkeys(names, threads))
    assert isinstance(found, CoreShare) == (watches and sys.platform.startswith("linux"))


def test_when_a_run_ends_threads_may_compute_everywhere():
    machine = Machine(2)
    machine.second(1.0, 1.0, own=1.0)
    machine.share.__exit__(None, None, None)
    assert machine.kept == [[0], [0, 1]]
