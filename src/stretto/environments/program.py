"""A program as an environment: anything that knows OpenAI's API is trained by where it sends its requests.

The program is started once per trajectory, with the address of its model in OPENAI_BASE_URL and OPENAI_API_KEY, which
the openai client and most agents read by themselves, and the prompt as one JSON object on standard input: `id`,
`messages` and the task's columns. The reference answer is not in it, unless another column holds it too. What it
writes to standard output is the answer that rewards judge. An exit code other than 0 is a failure of the program, not
an answer of the model.

It is the user's own program and runs with the user's rights. It ends with its trajectory, and so does what it started.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stretto.environments.base import Model
from stretto.errors import RolloutError
from stretto.types import Outcome, Prompt

LOOK, DRAIN = 0.2, 1.0
"""Seconds between two looks whether a program has ended, and those that its last words may take after that."""
LONGEST = 1 << 20
"""Bytes of an answer."""
SHOWN = 2000
"""Characters of standard error that a failure quotes."""


def executable(name: str, root: Path) -> str | None:
    """The program of this name: in `root`, beside the Python that runs this, or on PATH; none if there is none."""
    mine = (root / name).absolute()
    if os.path.isfile(mine) and os.access(mine, os.X_OK):
        return str(mine)
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=places) if os.path.dirname(name) == "" else shutil.which(name)


def past_proxies() -> dict[str, str]:
    """Variables with which clients reach this machine without the proxy that they use for others."""
    usual = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = usual if usual == "*" else ",".join(filter(None, [usual, "127.0.0.1", "localhost"]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


class ProgramEnvironment:
    """Runs one command."""

    def __init__(self, command: Sequence[str], *, root: Path) -> None:
        """`command` is started in `root`, without a shell."""
        self.command, self.root = (executable(command[0], root) or command[0], *command[1:]), root

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """Starts it and waits for its end."""
        address = await model.address()
        where = {"OPENAI_BASE_URL": address.base_url, "OPENAI_API_KEY": address.key, **past_proxies()}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command, stdin=pipe, stdout=pipe, stderr=pipe, limit=LONGEST,
                env={**os.environ, **where}, cwd=self.root, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RolloutError(f"{self.command[0]} cannot be started: {error.strerror or error}") from error
        try:
            return await self._outcome(process, prompt)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _outcome(self, process: asyncio.subprocess.Process, prompt: Prompt) -> Outcome:
        assert process.stdin and process.stdout and process.stderr
        told = {**prompt.tags, "id": prompt.id, "messages": [dict(message) for message in prompt.messages]}
        answer, complaint = bytearray(), bytearray()
        talk = asyncio.gather(
            _write(process.stdin, json.dumps(told).encode()),
            _read(process.stdout, answer),
            _read(process.stderr, complaint),
        )
        # A canceled trajectory waits for no pipe. Reading the exception keeps asyncio from logging it as lost.
        talk.add_done_callback(lambda each: each.cancelled() or each.exception())
        try:
            while process.returncode is None and not talk.done():
                await asyncio.wait([talk], timeout=LOOK)
            if process.returncode is not None:  # what it has left behind may hold the pipes open
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(talk, DRAIN)
        finally:
            talk.cancel()
        if code := await process.wait():
            raise RolloutError(
                f"{self.command[0]} ended with exit code {code}: {complaint.decode(errors='replace')[-SHOWN:]}"
            )
        if len(answer) > LONGEST:
            raise RolloutError(f"{self.command[0]} answered with more than {LONGEST:,} bytes")
        return Outcome(answer=answer.decode(errors="replace").strip())


async def _write(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):  # it has not read it, and need not
        pipe.write(data)
        await pipe.drain()
        pipe.close()


async def _read(pipe: asyncio.StreamReader, kept: bytearray) -> None:
    """All of it, of which a little more than what is allowed is kept: a program that cannot write does not end."""
    while piece := await pipe.read(1 << 16):
        kept += piece[: max(0, LONGEST + 1 - len(kept))]
