"""Programs in the sandbox: what they are given, what comes of them, and what happens when the sandbox itself breaks."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.sandbox.isolated import Calls, ProgramLimits, ProgramResult, Sandbox
from stretto.sandbox.isolated.protection import Protection

QUICK = ProgramLimits(seconds=0.5, total_seconds=3.0)

Work = Callable[[Sandbox], Awaitable[Any]]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the sandbox that all tests share."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["namespaces", "limits"])
def using(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Callable[[Work], Any]]:
    """What comes of some work with the sandbox, in each of its modes."""
    sandbox = Sandbox(workers=2, isolation=request.param)
    yield lambda work: runner.run(work(sandbox))
    runner.run(sandbox.close())


@pytest.fixture
def called(using: Callable[[Work], Any]) -> Callable[..., ProgramResult]:
    """What comes of calling the function f of a program."""

    def call(code: str, *arguments: Any, limits: ProgramLimits = QUICK) -> ProgramResult:
        calls = Calls(function="f", arguments=arguments)
        return using(lambda sandbox: sandbox.run_program(code, calls=calls, limits=limits))

    return call


def with_another(work: Work, **settings: Any) -> Any:
    """What comes of some work with a sandbox that it may break."""

    async def run() -> Any:
        async with Sandbox(packages=(), **settings) as sandbox:
            return await work(sandbox)

    return asyncio.run(run())


def test_a_script_reads_its_input_and_what_it_prints_comes_back(using):
    async def work(sandbox: Sandbox) -> None:
        result = await sandbox.run_program(
            "import sys\nprint(input().upper())\nprint(sys.stdin.read(), end='')", stdin="é\nb\nc"
        )
        assert (result.verdict, result.stdout) == ("ok", "É\nb\nc")
        failed = await sandbox.run_program("def f():\n    return 1 / 0\nprint('before')\nf()")
        assert (failed.verdict, failed.stdout, failed.detail) == (
            "error",
            "before\n",
            "ZeroDivisionError: division by zero",
        )
        assert 'File "program.py", line 2, in f\n    return 1 / 0' in failed.stderr
        assert "child.py" not in failed.stderr
        assert (
            await sandbox.run_program("if __name__ == '__main__':\n    print('main')\n    exit()")
        ).stdout == "main\n"
        assert (await sandbox.run_program("import sys\nsys.exit('no')")).verdict == "error"

    using(work)


def test_a_function_is_called_with_arguments_of_its_own_each_time(called):
    result = called("def f(x, y=1):\n    x.append(y)\n    return tuple(x)", [[1]], {"x": [2], "y": 3}, [[]])
    assert [each.value for each in result.calls] == [[1, 1], [2, 3], [1]]
    assert called("class Solution:\n    def f(self, n):\n        return n + 1", [1], [2]).calls[1].value == 3
    arrays = called(
        "import numpy as np\ndef f(n):\n    return {'grid': np.eye(n, dtype=int), 'sum': np.float64(n)}", [2]
    )
    assert arrays.calls[0].value == {"grid": [[1, 0], [0, 1]], "sum": 2.0}
    missing = called("def g(x): return x", [1], [2])
    assert [each.verdict for each in missing.calls] == ["error", "error"]
    assert "no function 'f'" in missing.detail


def test_a_call_that_hangs_or_crashes_costs_that_call_only(called):
    code = (
        "import os, time\ndef f(x):\n    if x == 1: time.sleep(60)\n    if x == 2: os._exit(0)\n"
        "    if x == 3: raise KeyError(x)\n    return x"
    )
    result = called(code, [0], [1], [2], [3], [4])
    assert [each.verdict for each in result.calls] == ["ok", "timeout", "error", "error", "ok"]
    assert result.verdict == "timeout"
    assert result.calls[3].detail == "KeyError: 3"
    assert result.calls[4].value == 4


def test_a_function_gains_no_time_by_lines_of_its_own(called):
    code = (
        "import os, sys, time\n"
        "def f():\n"
        "    for kind in ('loaded 0', 'value 1', 'raised 7'):\n"
        "        time.sleep(0.3)\n"
        "        os.write(3, f'{sys._getframe(1).f_locals[\"out\"]._nonce} {kind} null\\n'.encode())\n"
    )
    assert called(code, []).calls[0].verdict == "timeout"


SHARING = """\
import ctypes, os, threading, time
size, map = 80 * 2**20, ctypes.CDLL(None).mmap
map.restype = ctypes.c_void_p
def shared():
    found = map(None, ctypes.c_size_t(size), 3, 0x21, -1, ctypes.c_long(0))
    found = (ctypes.c_char * size).from_address(found)
    for i in range(0, size, 4096): found[i] = 1
    return found
"""


def test_shared_memory_counts_and_what_processes_share_counts_once(using):
    once = (
        "x, y = bytearray(size), shared()\n"
        "for i in range(0, size, 4096): x[i] = 1\n"
        "for n in range(3):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.2)\n"
        "        os._exit(sum(x[::4096]) != sum(y[::4096]))\n"
        "print([os.wait()[1] for n in range(3)])\n"
    )
    several = (  # a thread's children are the program's, too
        "def start():\n"
        "    for n in range(4):\n"
        "        if os.fork() == 0: time.sleep(60 * bool(shared()))\n"
        "    time.sleep(60)\n"
        "threading.Thread(target=start).start()\n"
    )
    limits = ProgramLimits(memory_mb=250)
    result = using(lambda sandbox: sandbox.run_program(SHARING + once, limits=limits))
    assert (result.verdict, result.stdout) == ("ok", "[0, 0, 0]\n"), result
    result = using(lambda sandbox: sandbox.run_program(SHARING + several, limits=limits))
    assert result.verdict == "memory", result


def test_a_program_that_never_gets_to_its_function_is_not_run_again_for_every_call(called):
    result = called("while True: pass\ndef f(x): return x", *([[n] for n in range(40)]))
    assert [each.verdict for each in result.calls] == ["timeout"] * 40
    assert result.seconds < 1.5


def test_all_calls_together_have_a_limit_too(called):
    limits = replace(QUICK, seconds=5.0, total_seconds=1.4)  # room for a busy machine
    result = called("import time\ndef f(x): time.sleep(0.4); return x", *([[n] for n in range(9)]), limits=limits)
    assert [each.verdict for each in result.calls][:2] == ["ok", "ok"]
    assert [each.verdict for each in result.calls][3:] == ["timeout"] * 6


def test_processes_that_a_function_forks_answer_nothing(called):
    result = called("import os\ndef f(x):\n    os.fork()\n    return x", [1], [2], [3])
    assert [each.value for each in result.calls] == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        ("float('nan')", "ok"),
        ("float('inf')", "ok"),
        ("2 ** 10000", "ok"),
        ("10 ** 5000", "error"),
        ("{1, 2}", "error"),
        ("object()", "error"),
        ("b'bytes'", "error"),
        ("lambda: 1", "error"),
        ("'\\ud800'", "ok"),
        ("{'a': {'b': [1, (2, 3)]}}", "ok"),
        ("{(1, 2): 3}", "error"),
        ("'x' * 10**7", "error"),
        ("deep()", "error"),
        ("itself()", "error"),
        ("type('I', (int,), {'__repr__': lambda s: '] haha'})(3)", "ok"),
        ("type('A', (), {'tolist': lambda s: s})()", "error"),
    ],
)
def test_whatever_a_function_returns_is_read_as_json_or_refused(called, value, verdict):
    code = (
        "def deep():\n    x = []\n    for _ in range(100000): x = [x]\n    return x\n"
        "def itself():\n    x = []\n    x.append(x)\n    return x\n"
        f"def f():\n    return {value}"
    )
    assert called(code, []).verdict == verdict


def test_the_same_program_says_the_same_in_every_server():
    code = "import random\nprint(hash('a'), list({'x', 'yy', 'zzz', 'wwww'}), random.random())"
    first, second = (with_another(lambda sandbox: sandbox.run_program(code)).stdout for _ in range(2))
    assert first == second != ""
    assert math.isfinite(float(first.rsplit(" ", 1)[1]))


@pytest.mark.slow
def test_two_hundred_programs_come_to_an_end_while_their_servers_are_killed():
    async def work(sandbox: Sandbox) -> None:
        done = 0

        async def one(number: int) -> str:
            nonlocal done
            result = await sandbox.run_program("print(input())", stdin=str(number))
            done += 1
            if done % 20 == 0:
                os.kill(sandbox.pids[done % len(sandbox.pids)], signal.SIGKILL)
            assert result.verdict == "infra" or result.stdout == f"{number}\n"
            return result.verdict

        verdicts = await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(200))), 100)
        assert verdicts.count("ok") > 180
        assert sandbox.retried > 0

    with_another(work, workers=4)


def test_a_sandbox_that_keeps_breaking_is_no_fault_of_the_program():
    async def work(sandbox: Sandbox) -> None:
        async def killing() -> None:
            while True:
                sandbox.kill()
                await asyncio.sleep(0.01)

        killer = asyncio.create_task(killing())
        script = await sandbox.run_program("print(1)")
        function = await sandbox.run_program("def f(): return 1", calls=Calls(function="f", arguments=[[], []]))
        killer.cancel()
        assert script.verdict == function.verdict == "infra"
        assert [each.verdict for each in function.calls] == ["infra", "infra"]

    with_another(work)


@pytest.mark.parametrize("mode", ["namespaces", "limits"])
@pytest.mark.parametrize("struck", ["server", "keeper"])
def test_a_program_fails_when_it_breaks_two_servers(struck, mode, monkeypatch):
    async def work(sandbox: Sandbox) -> None:
        calls = Calls(function="f", arguments=[[], []])
        code = "import time\ntime.sleep(60)\ndef f(): pass"
        task = asyncio.create_task(sandbox.run_program(code, calls=calls, limits=ProgramLimits(seconds=60)))
        for _ in range(2):
            running = await until(lambda: [each for pid in sandbox.pids if len(each := [pid, *below(pid)]) > 2])
            os.kill(running[0][struck == "keeper"], signal.SIGKILL)
            await until(lambda pid=running[0][1]: not alive(pid))
        result = await task
        assert [result.verdict, *(each.verdict for each in result.calls)] == ["error"] * 3, result
        assert "like the server before it" in result.detail
        assert (await sandbox.run_program("print(2)")).stdout == "2\n"

    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir="/tmp"))
    os.chmod(tempfile.gettempdir(), 0o755)
    with_another(work, workers=1, isolation=mode)
    os.rmdir(tempfile.gettempdir())  # nothing is left in it


DENIED = """
import ctypes, errno, os, platform
libc, arm = ctypes.CDLL(None, use_errno=True), platform.machine() == "aarch64"
def refused(call, *arguments):
    ctypes.set_errno(0)
    return call(*arguments) == -1 and errno.errorcode[ctypes.get_errno()]
r, w = os.pipe()
vector = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(4096)), 4096)
print(refused(libc.vmsplice, w, vector, 1, 0), refused(libc.splice, r, None, w, None, 1, 0))
print(refused(libc.tee, r, w, 1, 0))
print(refused(libc.syscall, 0 if arm else 206, 32000, (ctypes.c_ulong * 1)()), refused(libc.inotify_init1, 0))
print(refused(libc.mmap, None, 2**21, 3, 0x40022, -1, 0), refused(libc.fcntl, w, 1031, 2**20))
print({refused(libc.syscall, number, 0, 0, 0, 0, 0) for number in (437, *range(452, 600), 2000, 2**30 + 39)})
"""


def test_calls_that_take_what_no_limit_counts_are_denied(using):
    result = using(lambda sandbox: sandbox.run_program(DENIED))
    said = "EPERM EPERM\nEPERM\nEPERM EPERM\nEPERM EPERM\n{'ENOSYS'}\n"
    assert (result.verdict, result.stdout) == ("ok", said), result


def test_a_program_that_nobody_waits_for_any_more_is_killed():
    async def work(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.run_program("while True: pass", limits=ProgramLimits(seconds=60)))
        await asyncio.sleep(0.5)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert (await sandbox.run_program("print(2)")).stdout == "2\n"

    with_another(work, workers=1)


FORKED = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
time.sleep(60)
"""


def test_what_it_has_started_is_killed_with_it_where_there_are_no_namespaces():
    def here() -> set[str]:
        return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("stretto-program-")}

    async def scenario() -> None:
        async with Sandbox(workers=1, isolation="limits") as sandbox:
            before, limits = here(), ProgramLimits(seconds=60)
            task = asyncio.create_task(sandbox.run_program(FORKED, limits=limits))
            (server,) = await until(lambda: sandbox.pids)
            started = await until(lambda: below(server) if len(below(server)) == 3 else ())
            assert here() - before
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert await until(lambda: not any(map(alive, started)))
            assert await until(lambda: here() == before)

    asyncio.run(scenario())


async def until(found: Callable[[], Any]) -> Any:
    """What is found, in the end."""
    for _ in range(300):
        if told := found():
            return told
        await asyncio.sleep(0.02)
    return pytest.fail("it never came")


def alive(pid: int) -> bool:
    """True unless it is gone, or was not waited for yet."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    with suppress(OSError):
        found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [each for child in found for each in (child, *below(child))]
    return []


def test_what_is_not_protected_is_said():
    everything = Protection(namespaces=True, unprivileged=True, seccomp=True, landlock=True)
    assert everything.missing == ()
    nothing = Protection(namespaces=False, unprivileged=False, seccomp=False, landlock=False, refused="unshare: no")
    said = " ".join(nothing.missing)
    for words in (
        "unshare: no",
        "network",
        "every file of yours",
        "as your user",
        "kill every process",
        "fill the disk",
    ):
        assert words in said
    assert "every file of yours" not in " ".join(replace(nothing, unprivileged=True).missing)


def test_a_machine_says_what_it_protects():
    found = with_another(lambda sandbox: sandbox.protection(), isolation="limits")
    assert not found.namespaces
    assert "not tried" in found.missing[0]
