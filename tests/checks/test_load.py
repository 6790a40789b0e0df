"""How much of a machine others use, by what the kernel counts, and how many threads are left for a run."""

import os
import re
import time

import pytest

from stretto.checks.machine.load import CpuShare, busy_cores, cpu_share, seconds_idle, seconds_in_use

TABLE = """cpu  900 0 0 9000 0 0 0 0 0 0
cpu0 100 20 30 5000 7 1 2 9 0 0
cpu1 300 0 0 4000 0 0 0 0 0 0
cpu10 500 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


def test_only_cores_that_the_process_may_use_count_and_idling_does_not():
    assert seconds_in_use(TABLE, {0}, ticks=100) == pytest.approx(1.53)
    assert seconds_in_use(TABLE, {0, 1}, ticks=100) == pytest.approx(4.53)


@pytest.mark.parametrize(
    ("cores", "busy", "threads", "competes"),
    [
        (2, 0.0, 2, False),
        (2, 0.4, 2, False),
        (2, 1.1, 1, False),
        (16, 8.2, 8, False),
        (16, 1.6, 14, False),
        (2, 2.0, 2, True),
        (2, 9.0, 2, True),
        (16, 12.0, 16, True),
        (1, 0.3, 1, False),
        (1, 1.0, 1, True),
    ],
)
def test_threads_are_those_of_free_cores_until_there_are_too_few(cores, busy, threads, competes):
    share = cpu_share(cores, busy)
    assert (share.threads, share.competes) == (threads, competes)


def test_it_is_said_why_there_are_fewer():
    assert str(CpuShare(cores=4, busy=0)) == "4 threads on 4 cores"
    assert str(CpuShare(cores=4, busy=1)) == "3 threads on 4 cores: other programs keep 1 of them busy"
    assert "for which it competes: other programs keep 2 of them busy" in str(CpuShare(cores=2, busy=2))


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A kernel that counts what a test says: hundredths of a second in use, at each look."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    stat, hertz = tmp_path / "stat", os.sysconf("SC_CLK_TCK")

    def looks(*seconds):
        given, spent = iter(seconds), 0.0

        def sleep(_):
            nonlocal spent
            time.sleep(0.01)
            spent += next(given)
            stat.write_text(f"cpu0 {int(spent * hertz)} 0 0 0 0 0 0 0 0 0\n")

        stat.write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
        return busy_cores(stat, sleep)

    return looks


def test_a_burst_is_not_taken_for_load(counted):
    assert counted(5.0, 0.0) == 0.0
    assert counted(0.0, 5.0) == 0.0
    assert counted(5.0, 5.0) > 1.0


def test_what_this_process_does_itself_is_not_load(tmp_path):
    stat, hertz = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
    spent = 0

    def work(_):
        nonlocal spent
        begun = sum(os.times()[:2])
        while sum(os.times()[:2]) < begun + 0.1:
            pass
        spent += int(0.1 * hertz)
        cores = "".join(f"cpu{core} {spent if core == mine else 0} 0 0 0 0 0 0 0 0 0\n" for core in range(256))
        stat.write_text(cores)

    mine = min(os.sched_getaffinity(0))
    assert busy_cores(stat, work) < 0.5


def test_a_system_that_does_not_tell_has_no_load(tmp_path):
    assert busy_cores(tmp_path / "missing", lambda _: None) == 0.0


def test_a_core_is_idle_where_nothing_is_done_that_does_not_step_back(tmp_path, monkeypatch):
    stat, hertz = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    stat.write_text(TABLE)
    monkeypatch.setattr(os, "getpriority", lambda *of: 0)
    assert seconds_idle([0], stat) == pytest.approx((20 + 5000 + 7) / hertz)
    assert seconds_idle([0, 10], stat) == pytest.approx((20 + 5000 + 7) / hertz)
    monkeypatch.setattr(os, "getpriority", lambda *of: 10)  # niced itself
    assert seconds_idle([0], stat) == pytest.approx((5000 + 7) / hertz)
    assert seconds_idle([0, 7], stat) is None
    assert seconds_idle([0], tmp_path / "missing") is None
    stat.write_text(re.sub(r" \d+", " 0", TABLE))
    assert seconds_idle([0], stat) is None, "a sandbox's table of zeros says nothing"
