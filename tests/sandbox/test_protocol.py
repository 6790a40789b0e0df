"""What user code does beside answering cannot become the answer of another call, and no file of a user's replaces a
library: forks, stray writes, slow imports, and files that are called like something else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import SandboxDeadlineError, SandboxDiedError, SandboxError, SandboxStartError
from stretto.sandbox.pool import Builtin, Pool

USER = r"""
import ctypes, functools, math, multiprocessing, os, sys, threading, time
from builtins import exec as run
from math import sqrt
from os import system
from subprocess import getoutput

def double(x): return 2 * x
def leave_fd():
    for fd in range(3, 64):
        try: os.write(fd, b'2 {"result": "forged"}\n')
        except OSError: pass
def fork_returns(x):
    os.fork()
    return 2 * x
def fork_raises(x):
    if os.fork() == 0: raise ValueError("the child")
    return 2 * x
def fork_exits(x):
    if os.fork() == 0: sys.exit(3)
    return 2 * x
def fork_writes(x):
    child = os.fork()
    if child == 0: leave_fd(); os._exit(0)
    os.waitpid(child, 0)
    return 2 * x
def forks_fork(x):
    os.fork(); os.fork()
    return 2 * x
def process(x):
    child = multiprocessing.get_context("fork").Process(target=leave_fd)
    child.start(); child.join()
    return 2 * x
def libc_fork(x):
    ctypes.CDLL(None).fork()
    return 2 * x
def thread(x):
    threading.Thread(target=print, args=("1 {}",)).start()
    return 2 * x
def forge(number):
    for fd in range(3, 64):
        try: os.write(fd, b'%d {"result": "forged"}\n' % number)
        except OSError: pass
    return "mine"

def three(a, b): return a + b
partly = functools.partial(three, 1)
hidden = functools.partial(exec)
@functools.lru_cache
def kept(x): return 2 * x
class Judge:
    def __call__(self, x): return 2 * x
judge = Judge()
number = 3
"""


@pytest.fixture
def user(tmp_path: Path) -> str:
    (tmp_path / "user_code.py").write_text(USER)
    return str(tmp_path)


def within(user: str, body: Callable[[Pool], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with Pool(workers=1, paths=[user], **options) as pool:
            return await body(pool)

    return asyncio.run(main())


FORKS = ["fork_returns", "fork_raises", "fork_exits", "fork_writes", "forks_fork", "process", "libc_fork", "thread"]


@pytest.mark.parametrize("function", FORKS)
def test_answers_stay_with_their_calls_whatever_a_call_leaves_behind(user: str, function: str) -> None:
    async def body(pool: Pool) -> list[Any]:
        return [await pool.call(f"user_code:{function}", x, deadline=20) for x in range(4)] + [
            await pool.call("user_code:double", x, deadline=20) for x in range(4)
        ]

    assert within(user, body) == [0, 2, 4, 6] * 2


@pytest.mark.parametrize("number", [1, 2, 4, 99])
def test_an_answer_to_another_request_costs_the_worker(user: str, number: int) -> None:
    async def body(pool: Pool) -> Any:
        assert await pool.call("user_code:double", 1, deadline=20) == 2  # requests 1 and 2; the import of forge is 3
        with pytest.raises(SandboxDiedError, match="wrote no valid answer"):
            await pool.call("user_code:forge", number, deadline=20)
            await pool.call("user_code:double", 7, deadline=20)
        return await pool.call("user_code:double", 21, deadline=20)

    assert within(user, body) == 42


def test_an_import_has_the_deadline_for_starting_and_not_that_of_a_call(user: str) -> None:
    Path(user, "slow.py").write_text("import time\ntime.sleep(0.4)\ndef f(): return 5\n")
    Path(user, "slower.py").write_text("import time\ntime.sleep(60)\n")

    async def body(pool: Pool) -> None:
        assert await pool.call("slow:f", deadline=0.3) == 5
        pool._start_deadline = 0.2
        with pytest.raises(SandboxStartError, match=r"importing slower took longer than 0\.2 s \(for slower:f\)"):
            await pool.call("slower:f", deadline=20)

    within(user, body)


def test_what_has_to_be_loaded_first_is_loaded_once_and_counts_as_starting(
    user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", user)
    Path(user, "loads.py").write_text(
        "import time\nTIMES = []\n"
        "def load(key): time.sleep(0.4); TIMES.append(key)\n"
        "def never(): time.sleep(60)\n"
        "def seen(): return TIMES\n"
    )

    async def main() -> Any:
        async with Pool(workers=1) as pool:
            first = Builtin(prepare=("loads:load", "a"))
            for _ in range(2):
                assert await pool.call("loads:seen", deadline=0.3, builtin=first) == ["a"]
            pool._start_deadline = 0.2
            with pytest.raises(SandboxStartError):
                await pool.call("loads:seen", deadline=20, builtin=Builtin(prepare=("loads:never",)))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["json", "logging", "sympy", "yaml", "stretto", "collections", "numpy"])
def test_a_file_beside_a_recipe_replaces_no_library(user: str, name: str) -> None:
    Path(user, f"{name}.py").write_text("raise RuntimeError('not the library')\n")
    Path(user, "uses.py").write_text(f"import helper, {name}\ndef f(): return [helper.H, {name}.__file__]\n")
    Path(user, "helper.py").write_text("H = 3\n")

    async def body(pool: Pool) -> None:
        helper, file = await pool.call("uses:f", deadline=20)
        assert helper == 3 and not file.startswith(user)
        same = await pool.call("stretto.rewards.answer:exact", "a", "a", deadline=20, builtin=Builtin())
        assert same == 1.0

    within(user, body)


def test_a_built_in_function_is_called_where_the_user_s_folder_is_unknown(user: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError, match="No module named 'user_code'"):
            await pool.call("user_code:double", 1, deadline=20, builtin=Builtin())
        assert await pool.call("user_code:double", 1, deadline=20) == 2

    within(user, body)


def test_a_user_s_file_is_loaded_from_its_place_even_if_a_library_has_its_name(user: str) -> None:
    Path(user, "antlr4.py").write_text("def f(): return 'mine'\n")
    Path(user, "package").mkdir()
    Path(user, "package", "__init__.py").write_text("")
    Path(user, "package", "inner.py").write_text("from . import other\ndef f(): return other.X\n")
    Path(user, "package", "other.py").write_text("X = 'beside'\n")

    async def body(pool: Pool) -> None:
        assert await pool.call("antlr4:f", deadline=20) == "mine"
        assert await pool.call("package.inner:f", deadline=20) == "beside"

    within(user, body)


def test_a_user_s_file_with_a_name_of_python_s_own_is_told_to_change_it(user: str) -> None:
    Path(user, "statistics.py").write_text("def f(): return 1\n")

    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError, match="'statistics' is the name of a module of Python's own"):
            await pool.call("statistics:f", deadline=20)

    within(user, body)


@pytest.mark.parametrize("name", ["run", "system", "sqrt", "getoutput", "hidden", "number", "os"])
def test_what_a_file_only_imported_from_python_is_no_function_of_the_user_s(user: str, name: str) -> None:
    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxError, match=r"TypeError: user_code:.* is no function"):
            await pool.call(f"user_code:{name}", "1", deadline=20)

    within(user, body)


@pytest.mark.parametrize("name", ["partly", "kept", "judge"])
def test_functions_in_disguise_are_called(user: str, name: str) -> None:
    async def body(pool: Pool) -> Any:
        return await pool.call(f"user_code:{name}", 2, deadline=20)

    assert within(user, body) in (3, 4)


def test_moved_says_when_a_call_last_ended_and_excuses_what_starts(user: str) -> None:
    Path(user, "slow.py").write_text("import time\ntime.sleep(0.4)\ndef f(): return 5\n")

    async def body(pool: Pool) -> None:
        before = pool.moved
        await pool.call("user_code:double", 1, deadline=20)
        ended = pool.moved
        assert ended > before
        importing = asyncio.ensure_future(pool.call("slow:f", deadline=20))
        await asyncio.sleep(0.1)
        assert pool.moved > ended + 20, "an import may take until its deadline"
        await importing
        assert ended < pool.moved < ended + 20

    within(user, body)


def test_a_call_that_is_too_slow_is_still_a_deadline(user: str) -> None:
    Path(user, "sleeps.py").write_text("import time\ndef f(): time.sleep(60)\n")

    async def body(pool: Pool) -> None:
        with pytest.raises(SandboxDeadlineError, match=r"sleeps:f did not answer within 0\.2 s") as caught:
            await pool.call("sleeps:f", deadline=0.2)
        assert not isinstance(caught.value, SandboxStartError)

    within(user, body)
