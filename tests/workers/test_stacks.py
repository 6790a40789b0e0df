"""Where processes stand: what they say themselves, and what the kernel says of one that does not answer."""

import asyncio
import os
import signal
import subprocess
import sys
import time

from stretto.workers import stacks


def test_a_process_tells_the_stacks_of_its_threads():
    assert "in test_a_process_tells_the_stacks_of_its_threads" in stacks.own()


def test_of_a_process_that_is_stopped_the_kernel_knows_that():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 30
        while "stopped" not in stacks.outside(child.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert stacks.outside(child.pid).startswith(f"process {child.pid} is stopped, as by SIGSTOP")
    finally:
        child.kill()
        child.communicate()
    assert stacks.outside(child.pid) == f"process {child.pid} is gone"


def test_who_answers_is_heard_and_who_does_not_is_named(monkeypatch):
    monkeypatch.setattr(stacks, "PATIENCE", 0.01)

    async def says():
        return "here"

    async def dies():
        raise OSError("no route")

    async def scenario():
        return await asyncio.gather(
            stacks.asked("first", says(), "asleep"),
            stacks.asked("second", asyncio.sleep(60, ""), "asleep"),
            stacks.asked("third", dies(), "asleep"),
        )

    stands = asyncio.run(scenario())
    assert stacks.culprits(stands) == (
        "second: it does not answer; asleep\nthird: it cannot be asked (no route); asleep\n"
    )
    assert stacks.page(stands).startswith("=== first\nhere\n\n=== second\n")
