"""Functions that nobody can import run in copies of this process: with deadlines, and leaving nothing behind."""

import asyncio
import os
import signal
import subprocess
import threading

import pytest
import torch

from stretto.errors import SandboxDeadlineError, SandboxDiedError, SandboxError
from stretto.sandbox.fork_server import ForkServer
from stretto.sandbox.pool import Builtin, Pool

SEEN = ["before"]


def gone(pid):
    """True if no process has this id, or what is left of it waits to be buried by somebody else."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().split()[2] == "Z"
    except OSError:
        return True


async def until(condition):
    """Waits for what the kernel does in its own time."""
    for _ in range(1000):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


def hang(file=None):
    """Never returns, and leaves a child of its own unless somebody ends it."""
    child = subprocess.Popen(["sleep", "60"])
    if file:
        with open(file, "w", encoding="ascii") as out:
            out.write(f"{os.getpid()} {child.pid}")
    while True:
        pass


def fail():
    raise LookupError("no luck")


def within(functions, body, **options):
    """Runs `body` with a pool of such functions and proves that nothing survives it."""

    async def main(server):
        async with Pool(server=server, **options) as pool:
            result = await body(pool)
            pids = pool.pids
        assert all(gone(pid) for pid in pids)
        return result

    with ForkServer(functions) as server:
        result = asyncio.run(main(server))
    assert gone(server._pid)
    return result


def test_a_function_sees_what_there_was_and_changes_nothing_here():
    scale = 3

    def scaled(number):
        SEEN.append("there")
        print("nowhere")
        return [number * scale, *SEEN]

    async def body(pool):
        SEEN.append("later")
        first = await pool.call("<scaled>", 2, deadline=20)
        return (
            first,
            await pool.call("<scaled>", 3, deadline=20),
            await pool.call("math:floor", 2.5, deadline=20, builtin=Builtin()),
        )

    try:
        first, second, builtin = within({"<scaled>": scaled}, body, workers=1)
    finally:
        del SEEN[1:]
    assert (first, second, builtin) == ([6, "before", "there"], [9, "before", "there", "there"], 2)


def test_a_call_that_hangs_is_killed_with_its_children_and_its_worker_replaced(tmp_path):
    file = tmp_path / "pids"

    async def body(pool):
        before = await pool.call("pid", deadline=20)
        with pytest.raises(SandboxDeadlineError, match="hang did not answer within 1 s"):
            await pool.call("hang", str(file), deadline=1)
        worker, child = map(int, file.read_text().split())
        assert worker == before != await pool.call("pid", deadline=20)
        assert await until(lambda: gone(child))
        with pytest.raises(SandboxError, match=r"LookupError: no luck \(in fail\)\n.*in fail\n    raise LookupError"):
            await pool.call("fail", deadline=20)
        with pytest.raises(SandboxDiedError, match="exited with code 3"):
            await pool.call("leave", deadline=20)

    within({"pid": os.getpid, "hang": hang, "fail": fail, "leave": lambda: os._exit(3)}, body, workers=1)


def test_torch_computes_there_although_its_threads_ran_here():
    torch.set_num_threads(2)
    try:
        torch.ones(300, 300) @ torch.ones(300, 300)

        async def body(pool):
            return await pool.call("sum", deadline=20)

        assert within({"sum": lambda: (torch.ones(300, 300) @ torch.ones(300, 300)).sum()}, body) == 300**3
    finally:
        torch.set_num_threads(1)


def test_workers_die_with_the_server_and_are_not_made_without_it():
    async def body(pool):
        pid = await pool.call("pid", deadline=20)
        os.kill(pool._server._pid, signal.SIGKILL)
        assert await until(lambda: gone(pid))
        with pytest.raises(SandboxError, match=r"killed by signal SIGKILL|no worker process could be started"):
            await pool.call("pid", deadline=20)  # the idle worker, if the loop has not heard yet that it is gone
        with pytest.raises(SandboxError, match="no worker process could be started: the process that keeps functions"):
            await pool.call("pid", deadline=20)

    within({"pid": os.getpid}, body, workers=1)


def test_a_server_may_be_made_in_a_thread_that_ends():
    made = []
    thread = threading.Thread(target=lambda: made.append(ForkServer({"pid": os.getpid})))
    thread.start()
    thread.join()

    async def main():
        async with Pool(server=made[0]) as pool:
            return await pool.call("pid", deadline=20)

    assert asyncio.run(main()) != os.getpid()
    made[0].close()
    assert gone(made[0]._pid)
