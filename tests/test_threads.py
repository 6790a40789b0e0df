"""Calls that block beside an event loop: nobody waits for them to the end, not even the end of the program."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from stretto.threads import Daemons, begun, beside, left_behind, run, within


@pytest.fixture
def stuck():
    """A call that blocks until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def names(prefix):
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_what_a_call_returns_or_raises_comes_back():
    async def scenario():
        assert await beside(sorted, [3, 1], reverse=True) == [3, 1]
        with pytest.raises(ZeroDivisionError):
            await beside(lambda: 1 / 0)
        return await asyncio.to_thread(threading.current_thread)

    assert run(scenario()).daemon
    assert within(60, pow, 2, 3) == 8
    with pytest.raises(KeyError):
        within(60, {}.__getitem__, 1)


@pytest.mark.parametrize(
    "call", [beside, asyncio.to_thread, lambda f: asyncio.get_running_loop().run_in_executor(None, f)]
)
def test_a_loop_ends_without_a_call_that_blocks(call, stuck):
    async def scenario():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await call(stuck)
        return "went on"

    assert run(scenario()) == "went on"
    mine = [name for name in left_behind() if not name.startswith("localhost/")]  # tests of workers leave some
    assert len(mine) == 1


def test_without_a_loop_too(stuck):
    with pytest.raises(TimeoutError):
        within(0.01, stuck)


def test_a_call_that_ends_after_its_loop_disturbs_nobody(stuck, capfd):
    answered = threading.Event()

    def late():
        stuck()
        answered.set()

    async def scenario():
        waits = asyncio.ensure_future(beside(late))
        await asyncio.sleep(0)
        return waits

    run(scenario())
    stuck.__self__.set()
    assert answered.wait(60)
    assert capfd.readouterr().err == ""


def test_calls_of_a_pool_run_side_by_side_up_to_its_most_and_the_rest_wait():
    pool, go, seen = Daemons(2, "few"), threading.Semaphore(0), []

    def call(number):
        seen.append(number)
        go.acquire()
        return number

    futures = [pool.submit(call, number) for number in range(5)]
    go.release(5)
    assert [future.result(60) for future in futures] == [0, 1, 2, 3, 4]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert len(names("few")) == 2
    pool.shutdown()


def test_a_pool_of_one_keeps_the_order():
    pool, seen = Daemons(1, "one"), []
    for future in [pool.submit(seen.append, number) for number in range(50)]:
        future.result(60)
    assert seen == list(range(50))
    pool.shutdown()


def test_a_pool_that_is_shut_down_finishes_what_it_was_given_and_takes_no_more():
    pool = Daemons(1, "shut")
    futures = [pool.submit(int) for _ in range(3)]
    pool.shutdown(wait=True)
    pool.shutdown()
    assert [future.result(60) for future in futures] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)
    end = time.monotonic() + 60
    while names("shut") and time.monotonic() < end:
        time.sleep(0.001)
    assert names("shut") == []


def test_what_waits_can_be_called_off(stuck):
    pool = Daemons(1, "off")
    first, second, third = (pool.submit(stuck) for _ in range(3))
    assert second.cancel()
    pool.shutdown(cancel_futures=True)
    assert third.cancelled()
    assert not first.done()


def test_a_thread_of_its_own_ends_with_its_call():
    thread = begun(threading.current_thread).result(60)
    thread.join(60)
    assert not thread.is_alive()


BLOCKS = """
import asyncio, atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from stretto import threads
from stretto.cli import main

threads.LAST = threads.LAST_OF_GOOD = 0.3

async def work():
    {work}
    await asyncio.sleep(0.05)

def command(given):
    print("said", end="")
    print("told", end="", file=sys.stderr)
    threads.run(work())
    return 3

main._run = command
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    "work",
    [
        "pass",
        "asyncio.ensure_future(asyncio.to_thread(time.sleep, 3600))",
        "asyncio.ensure_future(threads.beside(time.sleep, 3600))",
        "threading.Thread(target=time.sleep, args=(3600,)).start()",
        "ThreadPoolExecutor(1).submit(time.sleep, 3600)",
        "atexit.register(time.sleep, 3600)",
    ],
)
def test_the_program_ends_with_its_code_and_all_it_said_whatever_blocks(work):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS.format(work=work)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "told")
