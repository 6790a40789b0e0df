"""Programs that want to do harm: none does, none gets at the secret, none outlives its deadline by a second.

They stand in hostile.txt. A program is right if it prints the secret, which is where these tests have put it: in the
environment and the memory of their own process, in a file, behind sockets of this machine. Where the file and the
sockets are is told to the programs; what is in them is not.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.sandbox.isolated import ProgramLimits, ProgramResult, Sandbox

PROGRAMS = {
    name: text.rstrip("\n").replace("NULL", "\0")
    for name, _, text in (
        part.partition("\n") for part in Path(__file__).with_name("hostile.txt").read_text("utf-8").split("### ")[1:]
    )
}
LIMITS = ProgramLimits(seconds=0.6, memory_mb=256, output_kb=256, scratch_mb=16)
BOMBS, PATIENT = ("memory bomb at once", "memory in many processes"), replace(LIMITS, seconds=10.0)
"""What a busy machine takes longer than that to fill memory with, and which end by that all the same."""


def serve(listening: socket.socket, secret: str) -> None:
    """Tells the secret to whoever connects."""
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            connection.sendall(secret.encode())
            connection.close()


class Host:
    """What programs try to get at."""

    def __init__(self, folder: Path) -> None:
        self.secret = secrets.token_hex(16)
        self.file = folder / "stretto-secret"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        for each in (folder, *folder.parents[:-2]):
            each.chmod(0o755)
        os.environ["STRETTO_TEST_SECRET"] = self.secret
        self.sockets = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        addresses = [("127.0.0.1", 0), f"\0stretto-secret-{os.getpid()}", f"{self.file}.sock"]
        for each, address in zip(self.sockets, addresses, strict=True):
            each.bind(address)
            each.listen()
        self.serving = [threading.Thread(target=serve, args=(each, self.secret)) for each in self.sockets]
        for thread in self.serving:
            thread.start()

    def program(self, text: str) -> str:
        port = self.sockets[0].getsockname()[1]
        text = text.replace("SECRET_FILE", str(self.file)).replace("PORT", str(port))
        return text.replace("PARENT", str(os.getpid()))

    def close(self) -> None:
        del os.environ["STRETTO_TEST_SECRET"]
        for each, thread in zip(self.sockets, self.serving, strict=True):
            each.shutdown(socket.SHUT_RDWR)  # which ends waiting for a connection
            thread.join()
            each.close()


async def run_all(host: Host, isolation: str) -> tuple[dict[str, ProgramResult], list[str]]:
    """Every program, and what the servers still have running when all are done."""
    async with Sandbox(workers=4, isolation=isolation) as sandbox:
        runs = [
            sandbox.run_program(host.program(text), limits=PATIENT if name in BOMBS else LIMITS)
            for name, text in PROGRAMS.items()
        ]
        results = dict(zip(PROGRAMS, await asyncio.gather(*runs), strict=True))
        inside = 2 if isolation == "bubblewrap" else 0  # its own first process and the server
        for _ in range(100):  # a keeper has answered a moment before it is gone
            left = [each for pid in sandbox.pids for each in [*below(pid)[inside:], *processes_of(2_000_000_000 + pid)]]
            if not left:
                break
            await asyncio.sleep(0.01)
        assert (await sandbox.run_program("print(6 * 7)")).stdout == "42\n"
    return results, left


def below(pid: int) -> list[str]:
    """The processes that a process has started, and theirs; none of one that has just ended."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in found for each in [child, *below(int(child))]]


def processes_of(uid: int) -> list[str]:
    """Processes of the user that a server makes for its programs, if it is root."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if status.stat().st_uid == uid:
                found.append(status.read_text())
    return found


BUBBLEWRAP = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")]
MODES = ["namespaces", pytest.param("limits", marks=pytest.mark.slow), pytest.param("bubblewrap", marks=BUBBLEWRAP)]


@pytest.fixture(scope="module", params=MODES)
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Host, dict[str, ProgramResult], list[str]]]:
    host = Host(tmp_path_factory.mktemp("host"))
    before = set(os.listdir(tempfile.gettempdir()))
    try:
        results, left = asyncio.run(run_all(host, request.param))
        after = [name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("stretto-program")]
        yield host, results, left + after
    finally:
        host.close()


def test_there_are_at_least_sixty_hostile_programs():
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_is_never_right_and_never_late(ran, name):
    host, results, _ = ran
    result = results[name]
    assert host.secret not in result.stdout + result.stderr, result
    assert result.verdict in ("ok", "error", "timeout", "memory"), result
    assert result.seconds < (PATIENT if name in BOMBS else LIMITS).seconds + 1, result
    assert len(result.stdout) <= LIMITS.output_kb * 1024


@pytest.mark.parametrize(
    "name", ["limits, cores and niceness of its parent and of everybody", "signals through a descriptor of its own"]
)
def test_other_processes_are_out_of_reach(ran, name):
    _, results, _ = ran
    assert (results[name].verdict, results[name].stdout) == ("ok", "")


def test_hostile_programs_leave_nothing_behind_and_change_nothing(ran):
    host, _, left = ran
    assert left == []
    assert host.file.read_text() == host.secret
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("hostile")]
    assert not [name for name in os.listdir("/tmp") if name.startswith("hostile")]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("an endless loop", "timeout"),
        ("sleeping for ever", "timeout"),
        ("a loop inside C: a catastrophic pattern", "timeout"),
        ("ignoring every signal", "timeout"),
        *((each, "memory") for each in BOMBS),
        ("time that it grants itself on the descriptor of results", "timeout"),
        ("ten gigabytes printed", "error"),
        ("a shell by exec", "error"),
        ("a connection to this machine", "error"),
        ("reading a file of the host", "error"),
        ("leaving early", "ok"),
    ],
)
def test_the_verdict_says_what_ended_a_program(ran, name, verdict):
    assert ran[1][name].verdict == verdict
