"""The process that an engine runs in when it has a Python environment of its own: started, asked, and seen to die.

Questions and answers are small JSON frames over a socket that both inherit; tensors go through files in memory
(`tensor_file`). Every question has a deadline. The process knows nothing of whoever started this one: variables of
launchers are taken away, because an engine that finds RANK or MASTER_ADDR waits for peers that never come. It ends with
its parent, and what it prints is kept in a file whose last lines are shown when it dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from stretto.errors import DeadlineError, EngineDiedError, EngineError, RecipeError

PROGRAM = Path(__file__).with_name("host.py")
"""What runs in the process, by the engine's own Python."""

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
"""Variables by which launchers tell a process who it is among others."""

FOREIGN = ("MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "TORCH_NCCL_ASYNC", "ROLE_", "PYTHON", "VIRTUAL_ENV")
"""What else begins like this is meant for this process, or for another environment, and not for the engine's."""

SHOWN = 12
"""Lines of the log that are shown when something is wrong."""

SEND = 30
"""Seconds for a question to be taken in; one that does not fit the socket's buffer waits for whoever reads it."""

LONGEST = 1e6
"""Seconds of one wait; what the system can be asked for ends at 24 days."""

KEYS = {"start": "deadlines.start", **dict.fromkeys(("submit", "step", "abort"), "deadlines.generate")}
"""Question -> the key of its deadline; that of others, which are about weights, is deadlines.publish."""

ENDING = 5.0
"""Seconds for the process to end when it is asked to."""

LEAVING, TRACKING = 6.0, 2.0
"""Seconds for its children to end by themselves, which takes Python a while, and then for the one that ends last."""

TRACKER = "resource_tracker"
"""What that one is called: Python's own, which removes what the others share in memory when all of them have ended."""


class EngineProcess:
    """A process that answers."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is given the number of its end of the socket, and of its parent. `name` is what messages call it,
        `environment` what is set for it besides."""
        self.name, self.log, said = name, log, opened(log)
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND, 0))
        with theirs, said:
            said.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} {' '.join(command)}\n".encode())
            said.flush()
            try:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**cleaned(os.environ), **(environment or {})},
                )
            except OSError as error:
                ours.close()
                reason = f"{command[0]} cannot be started: {error.strerror or error}"
                raise RecipeError.of("engine.python", reason, "name the Python that has vLLM") from None
        self.connection = Connection(ours.detach())
        self.ended = False

    def call(self, what: str, seconds: float, /, **arguments: Any) -> dict[str, Any]:
        """The answer to a question, which must come in time."""
        try:
            self._send({"call": what, **arguments})
            if not self.connection.poll(min(seconds, LONGEST)):
                fix = f"look what it waits for, or raise {KEYS.get(what, 'deadlines.publish')}"
                raise self._late(f"{what} has not answered for {seconds:.0f} s", fix)
            answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as gone:
            raise EngineDiedError(self.last_words()) from gone
        if refused := answer.get("refused"):
            raise RecipeError.of(*refused)
        if failed := answer.get("failed"):
            short = any(words in failed for words in ("out of memory", "allocate memory"))
            fix = "lower engine.memory_share, or " if short else ""
            raise EngineError(f"{self.name}: {what} failed: {failed}\n    fix: {fix}see {self.log}")
        return answer

    def _send(self, question: Mapping[str, Any]) -> None:
        """A question, which must be taken in soon, however long its answer may take."""
        try:
            self.connection.send_bytes(json.dumps(question).encode())
        except BlockingIOError:
            told = f"{question['call']} was not taken in for {SEND} s"
            raise self._late(told, "look there why it reads nothing; no deadline of the recipe changes this") from None

    def _late(self, told: str, fix: str) -> DeadlineError:
        """What to say of a process that is ended because something took too long."""
        self.kill()
        return DeadlineError(f"{self.name}: {told}; its process was ended\n{self.last_lines()}    fix: {fix}")

    def last_words(self) -> str:
        """How the process has ended, with the end of its log."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING)
        code = self.process.poll()
        self.kill()
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return f"{self.name}: its process {how}\n{self.last_lines()}".rstrip()

    def last_lines(self) -> str:
        """The end of the log, as messages show it."""
        with self.log.open("rb") as said:
            said.seek(max(0, self.log.stat().st_size - SHOWN * 400))
            lines = said.read().decode(errors="replace").splitlines()[-SHOWN:]
        return "".join(f"    | {line}\n" for line in [*lines, f"(from {self.log})"])

    def kill(self) -> None:
        """Ends the process and its children, whatever they do; one that removes what they share comes last."""
        if not self.ended:  # once: the number of its group may be another's later
            self.ended, group = True, self.process.pid
            gone = (ProcessLookupError, PermissionError)  # which of them, differs between systems
            with suppress(*gone):
                os.killpg(group, signal.SIGTERM)  # which the tracker does not heed
            self._wait_for_all(LEAVING)
            for each in members(group):
                with suppress(*gone):
                    if TRACKER not in each.command:
                        os.kill(each.number, signal.SIGKILL)
            self._wait_for_all(TRACKING)
            with suppress(*gone):
                os.killpg(group, signal.SIGKILL)
            self.process.wait()

    def _wait_for_all(self, seconds: float) -> None:
        """Waits until none of its group lives, but not longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (self.process.poll() is None or members(self.process.pid)):
            time.sleep(0.02)

    def close(self) -> None:
        """Lets it end by itself, for a moment; its children are ended with it."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING)
        self.kill()


def opened(log: Path) -> BinaryIO:
    """A log, to whose end is written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        reason = f"the engine's log {log} cannot be written: {error.strerror or error}"
        raise RecipeError.of("run.folder", reason, "name a folder that you may write to") from None


class GroupMember(NamedTuple):
    """A process that lives."""

    number: int
    """What the system calls it."""
    command: str
    """What it was started with."""


def members(group: int) -> list[GroupMember]:
    """Processes of a group, where the system tells."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its, *_ = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if state not in "ZX" and int(its) == group:
                found.append(GroupMember(int(folder.name), (folder / "cmdline").read_text("utf-8", "replace")))
    return found


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process that are an engine's business too."""
    return {
        name: value for name, value in environment.items() if name not in LAUNCHERS and not name.startswith(FOREIGN)
    }
