"""User code raises, hangs, dies and prints; the pool says so, replaces the worker and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import SandboxDeadlineError, SandboxDiedError, SandboxError
from stretto.sandbox.pool import Limits, Pool

USER = """
import decimal, fractions, os, re, signal, subprocess, sys, time

def double(x): return 2 * x
def give(*args): return list(args)
def pid(): return os.getpid()
def modules(): return sorted(sys.modules)
def spin():
    while True: pass
def backtrack(): return bool(re.match(r"(a|aa)+$", "a" * 200 + "b"))
def backtrack_noted(file):
    open(file, "w").close()
    return backtrack()
def leave_a_child(): os.system("sleep 60 &"); os._exit(3)
def sleep(seconds): time.sleep(seconds)
def stamp(file, text):
    with open(file, "a") as log: log.write(text + "\\n")
    return text
def fail(text): raise LookupError(text)
def leave(): sys.exit(4)
def vanish(): os._exit(3)
def die(): os.kill(os.getpid(), signal.SIGTERM)
def close_all(): os.closerange(3, 65536); time.sleep(60)
def garbage():
    for fd in range(3, 4096):
        try: os.write(fd, b"[1]\\n")
        except OSError: pass
    time.sleep(60)
def shout():
    print("x" * 10_000_000); sys.stdout.write('{"result": "forged"}\\n'); sys.stdout.flush()
    os.write(1, b'{"result": "forged"}\\n')
    return "said"
def huge(): return "x" * (17 * 2**20)
def allocate(gb): return len(bytearray(int(gb * 2**30)))
def hidden(): return object()
def spawn_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
def spawn_and_hang(file):
    child = spawn_child()
    with open(file, "w") as out: out.write(f"{os.getpid()} {child}")
    spin()
class Item:
    def item(self): return 0.5
def number(): return {"a": Item()}
def exact(): return [decimal.Decimal("0.5"), fractions.Fraction(1, 4)]
def complex_number(): return 1 + 2j
def generator(): yield 1
def itself():
    found = []
    found.append(found)
    return found
"""


def gone(pid: int) -> bool:
    """True if no process has this id, not even a zombie that we would have to bury."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(condition: Callable[[], bool]) -> bool:
    """Waits for what the kernel does in its own time."""
    for _ in range(1000):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.fixture
def user(tmp_path: Path) -> str:
    (tmp_path / "user_code.py").write_text(USER)
    return str(tmp_path)


def within(user: str, body: Callable[[Pool], Awaitable[Any]], **options: Any) -> Any:
    """Runs `body` with a pool and proves that no worker survives it."""

    async def main() -> Any:
        async with Pool(paths=[user], **options) as pool:
            result = await body(pool)
            pids = pool.pids
        assert pool.pids == ()
        assert all(gone(pid) for pid in pids)
        return result

    return asyncio.run(main())


def test_a_call_returns_what_the_function_returns(user: str) -> None:
    async def body(pool: Pool) -> Any:
        values = [1, 2.5, None, True, "é\u2028\ud800\n", {"k": [1]}]
        assert await pool.call("user_code:give", *values, deadline=20) == values
        assert await pool.call("user_code:number", deadline=20) == {"a": 0.5}
        assert await pool.call("user_code:exact", deadline=20) == [0.5, 0.25]
        return await pool.call("user_code:double", 21, deadline=20)

    assert within(user, body) == 42


def test_workers_start_lazily_and_are_reused(user: str) -> None:
    async def body(pool: Pool) -> None:
        assert pool.pids == ()
        first = await pool.call("user_code:pid", deadline=20)
        assert await pool.call("user_code:pid", deadline=20) == first
        assert pool.pids == (first,)

    within(user, body)


def test_a_worker_loads_nothing_heavy(user: str) -> None:
    async def body(pool: Pool) -> Any:
        return await pool.call("user_code:modules", deadline=20)

    assert not {"numpy", "torch", "pydantic", "asyncio", "stretto"} & set(within(user, body))


@pytest.mark.parametrize("function", ["spin", "backtrack"])
def test_a_call_that_hangs_is_killed_at_its_deadline_and_its_worker_replaced(user: str, function: str) -> None:
    async def body(pool: Pool) -> None:
        before = await pool.call("user_code:pid", deadline=20)
        with pytest.raises(SandboxDeadlineError, match=rf"user_code:{function} did not answer within 0\.3 s"):
            await pool.call(f"user_code:{function}", deadline=0.3)
        assert gone(before)
        assert await pool.call("user_code:pid", deadline=20) != before

    within(user, body, workers=1)


def test_an_exception_arrives_with_type_message_and_place(user: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError) as caught:
            await pool.call("user_code:fail", "no\x1b[2Jluck", deadline=20)
        assert type(caught.value) is SandboxError
        first, *rest = str(caught.value).splitlines()
        assert first == "LookupError: no\ufffd[2Jluck (in user_code:fail)"
        assert "user_code.py" in rest[0]
        assert rest[1].strip() == "def fail(text): raise LookupError(text)"
        assert not any("worker.py" in line for line in rest)
        with pytest.raises(SandboxError, match="SystemExit: 4"):
            await pool.call("user_code:leave", deadline=20)
        assert len(pool.pids) == 1, "an exception costs no worker"

    within(user, body)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("user_code:nothing", "AttributeError: .*no attribute 'nothing'"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_code:f", r"SyntaxError: .*broken_code\.py, line 1"),
        ("user_code", "not of the form module:name"),
        ("user_code:hidden", "holds a object, which is not a JSON value"),
        ("user_code:huge", "the result has 17[0-9]+ bytes, more than the 16777216 allowed"),
    ],
)
def test_a_bad_target_or_result_is_told_in_words(user: str, target: str, says: str) -> None:
    Path(user, "broken_code.py").write_text("def f(:\n")

    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError, match=says):
            await pool.call(target, deadline=20)
        assert await pool.call("user_code:double", 1, deadline=20) == 2

    within(user, body)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("complex_number", "TypeError: the result holds a complex, which is not a JSON value"),
        ("generator", "TypeError: the result holds a generator, which is not a JSON value"),
        ("itself", "ValueError: Circular reference detected"),
    ],
)
def test_a_result_that_is_no_json_value_is_told_in_one_line(user: str, function: str, says: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError) as raised:
            await pool.call(f"user_code:{function}", deadline=20)
        assert str(raised.value) == f"{says} (in user_code:{function})"

    within(user, body)


def test_arguments_must_be_json(user: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError, match="arguments for user_code:double are not JSON"):
            await pool.call("user_code:double", object(), deadline=20)

    within(user, body)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("vanish", "exited with code 3"),
        ("leave_a_child", "exited with code 3"),
        ("die", "was killed by signal SIGTERM"),
        ("close_all", "was killed by signal SIGKILL"),
        ("garbage", "wrote no valid answer"),
    ],
)
def test_a_worker_that_dies_or_babbles_is_named_and_replaced(user: str, function: str, says: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxDiedError, match=f"user_code:{function} {says}"):
            await pool.call(f"user_code:{function}", deadline=20)
        assert await pool.call("user_code:double", 1, deadline=20) == 2

    within(user, body)


def test_an_idle_worker_that_was_killed_is_replaced_without_a_word(user: str) -> None:
    async def body(pool: Pool) -> None:
        victim = await pool.call("user_code:pid", deadline=20)
        process = pool._idle[0]
        os.kill(victim, signal.SIGKILL)
        assert await until(lambda: not process.alive)
        assert await pool.call("user_code:pid", deadline=20) != victim

    within(user, body)


def test_prints_cannot_corrupt_the_protocol_or_reach_the_terminal(user: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def body(pool: Pool) -> Any:
        return await pool.call("user_code:shout", deadline=20)

    assert within(user, body) == "said"
    assert capfd.readouterr().out == ""


def test_fifty_calls_share_two_workers(user: str) -> None:
    async def body(pool: Pool) -> None:
        results = await asyncio.gather(*(pool.call("user_code:give", i, deadline=20) for i in range(50)))
        assert results == [[i] for i in range(50)]
        assert len(pool.pids) == 2

    within(user, body)


def test_waiting_calls_are_served_in_the_order_they_came(user: str, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def body(pool: Pool) -> None:
        calls = [asyncio.ensure_future(pool.call("user_code:sleep", 0.1, deadline=20))]
        await asyncio.sleep(0)
        calls += [asyncio.ensure_future(pool.call("user_code:stamp", str(log), str(i), deadline=20)) for i in range(9)]
        await asyncio.gather(*calls)

    within(user, body, workers=1)
    assert log.read_text().split() == [str(i) for i in range(9)]


def test_a_deadline_does_not_count_the_wait_for_a_worker(user: str) -> None:
    async def body(pool: Pool) -> list[Any]:
        await pool.call("user_code:pid", deadline=20)
        long = pool.call("user_code:sleep", 1.2, deadline=20)
        return await asyncio.gather(long, pool.call("user_code:double", 1, deadline=1.0))

    assert within(user, body, workers=1) == [None, 2]


def test_cancelling_a_call_kills_its_worker(user: str) -> None:
    async def body(pool: Pool) -> None:
        pid = await pool.call("user_code:pid", deadline=20)
        call = asyncio.ensure_future(pool.call("user_code:spin", deadline=60))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert gone(pid)
        assert await pool.call("user_code:double", 4, deadline=20) == 8

    within(user, body, workers=1)


def test_cancelling_a_call_that_waits_costs_nothing(user: str) -> None:
    async def body(pool: Pool) -> None:
        busy = asyncio.ensure_future(pool.call("user_code:sleep", 0.2, deadline=20))
        waiting = asyncio.ensure_future(pool.call("user_code:spin", deadline=60))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await busy
        assert await pool.call("user_code:double", 4, deadline=20) == 8
        assert len(pool.pids) == 1

    within(user, body, workers=1)


def test_close_kills_running_calls_and_refuses_waiting_ones(user: str) -> None:
    async def main() -> None:
        pool = Pool(workers=1, paths=[user])
        pid = await pool.call("user_code:pid", deadline=20)
        calls = [asyncio.ensure_future(pool.call("user_code:spin", deadline=60)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await pool.close()
        assert gone(pid)
        running, waiting = await asyncio.gather(*calls, return_exceptions=True)
        assert "was killed because the pool was closed" in str(running)
        assert "is closed" in str(waiting)
        assert pool.pids == ()
        with pytest.raises(SandboxError, match="is closed"):
            await pool.call("user_code:pid", deadline=20)
        await pool.close()

    asyncio.run(main())


def test_another_thread_can_kill_every_worker_while_the_loop_is_busy(user: str) -> None:
    async def body(pool: Pool) -> None:
        workers = [await pool.call("user_code:pid", deadline=20)]
        hung = asyncio.create_task(pool.call("user_code:backtrack", deadline=60))
        await asyncio.sleep(0.05)
        thread = threading.Thread(target=pool.kill)
        thread.start()
        thread.join()
        with pytest.raises(SandboxDiedError, match="SIGKILL"):
            await hung
        assert pool.pids == ()
        assert await until(lambda: all(map(_ended, workers)))

    within(user, body)


def test_a_worker_that_cannot_start_in_time_is_a_deadline(user: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxDeadlineError, match=r"did not start within 1e-06 s"):
            await pool.call("user_code:pid", deadline=20)

    within(user, body, start_deadline=1e-6)


def test_processes_that_user_code_started_go_with_its_worker(user: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"

    async def body(pool: Pool) -> None:
        call = asyncio.ensure_future(pool.call("user_code:spawn_and_hang", str(note), deadline=60))
        assert await until(lambda: note.exists() and len(note.read_text().split()) == 2)
        call.cancel()
        await asyncio.wait([call])
        worker, child = map(int, note.read_text().split())
        assert gone(worker)
        assert await until(lambda: _ended(child))

    within(user, body)


def _ended(pid: int) -> bool:
    """True if it is gone or waits, dead, for whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_memory_beyond_the_limit_is_an_exception_and_the_limit_ends_with_the_call(user: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError, match="MemoryError"):
            await pool.call("user_code:allocate", 1.0, deadline=20, limits=Limits(memory_gb=0.5))
        assert await pool.call("user_code:allocate", 0.6, deadline=20) == int(0.6 * 2**30)
        assert len(pool.pids) == 1

    within(user, body)


def test_processor_time_beyond_the_limit_kills_the_worker(user: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxDiedError, match=r"SIGXCPU .*CPU time was used up"):
            await pool.call("user_code:spin", deadline=30, limits=Limits(cpu_seconds=0.2))

    within(user, body)


def test_kill_9_of_the_parent_takes_a_hung_worker_along(user: str, tmp_path: Path) -> None:
    note = tmp_path / "hung"
    script = f"""
import asyncio
from stretto.sandbox.pool import Pool
async def main():
    pool = Pool(paths=[{user!r}])
    print(await pool.call("user_code:pid", deadline=20), flush=True)
    await pool.call("user_code:backtrack_noted", {str(note)!r}, deadline=600)
asyncio.run(main())
"""
    source = str(Path(__file__).parents[2] / "src")
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert asyncio.run(until(note.exists))
    parent.kill()
    parent.communicate()
    assert asyncio.run(until(lambda: _ended(worker)))
