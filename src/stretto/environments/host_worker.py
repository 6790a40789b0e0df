"""The main program of an environment's host process: runs trajectories, and asks its parent for the model.

It is started as a file, with a descriptor for its lines; each is one JSON value. From the parent: which environment to
import, `start` and `cancel` of a trajectory, the answers to its calls, and `ping`, which shows that nothing blocks. To
the parent: `chat`, `address`, `done`, `failed` and `pong`. It ends with the descriptor, and the kernel ends it with its
parent. `stretto.environments.hosts` is the other side.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from stretto import environments
from stretto.environments.base import (
    Address,
    Environment,
    Reply,
    Tool,
    ToolCall,
    messages_of,
    most_tokens,
    stop_texts,
    tools_of,
)
from stretto.environments.failures import note_lost_failure, raised
from stretto.environments.toolset import ABANDONED
from stretto.environments.trajectory import played
from stretto.errors import MODEL_FAILURES, RecipeError, RolloutError
from stretto.sandbox.worker import die_with, plain
from stretto.types import Message, Prompt

LONGEST = 2**26
"""Bytes of a line."""


class EpisodeRunner:
    """The trajectories of this process."""

    def __init__(self, environment: Environment, writer: asyncio.StreamWriter) -> None:
        self.environment, self.writer = environment, writer
        self.calls = count()
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        self.pings: set[asyncio.Task[None]] = set()

    def send(self, **message: Any) -> None:
        """One line to the parent."""
        self.writer.write(json.dumps(message, default=plain).encode("ascii") + b"\n")

    def take(self, message: dict[str, Any]) -> None:
        """One line from the parent."""
        match message:
            case {"start": number, "prompt": prompt}:
                self.running[number] = asyncio.ensure_future(self.run(number, prompt))
            case {"cancel": number} if number in self.running:
                self.running[number].cancel()
            case {"answer": call} if call in self.waiting and not self.waiting[call].done():
                self.waiting[call].set_result(message)
            case {"ping": number}:
                asking = asyncio.ensure_future(self.answer(number))
                self.pings.add(asking)
                asking.add_done_callback(self.pings.discard)

    async def answer(self, number: int) -> None:
        """Shows that nothing blocks, also no thread that goes on after its trajectory."""
        if ABANDONED:
            await asyncio.wait(ABANDONED)
        self.send(pong=number)

    async def run(self, number: int, prompt: dict[str, Any]) -> None:
        """One trajectory; whatever goes wrong in it is told."""
        asked = Prompt(**{**prompt, "messages": tuple(prompt["messages"])})
        try:
            outcome = await played(self.environment, asked, RemoteModel(self, number))
            signals = {name: float(value) for name, value in outcome.signals.items()}
            self.send(done=number, answer=outcome.answer, signals=signals, turn_rewards=outcome.turn_rewards)
        except asyncio.CancelledError:
            self.send(failed=number, error="CancelledError: it was canceled")
        except RolloutError as error:
            self.send(failed=number, error=str(error))
        except MODEL_FAILURES as error:  # one that the environment itself raised
            self.send(failed=number, error=raised(error))
        finally:
            del self.running[number]


class RemoteModel:
    """The model as an environment in this process sees it."""

    def __init__(self, host: EpisodeRunner, number: int) -> None:
        self.host, self.number = host, number

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Tool] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """The next assistant message; a reply that is passed back is named by its call, so that it is known again."""
        messages = messages_of(messages)
        call, answer = await self._ask(
            chat=self.number,
            messages=[dict(message) for message in messages],
            replies=[getattr(message, "call", None) for message in messages],
            max_new_tokens=most_tokens(max_new_tokens),
            tools=[dict(tool) for tool in tools_of(tools)],
            stop=stop_texts(stop),
        )
        reply = Reply(
            text=answer["text"],
            tokens=tuple(answer["tokens"]),
            stop=answer["stop"],
            tool_calls=tuple(ToolCall(**call) for call in answer["tool_calls"]),
            turn=answer["turn"],
            words=answer["words"],
            apart=answer["apart"],
        )
        vars(reply)["call"] = call
        return reply

    async def address(self) -> Address:
        """Where programs reach the model: the server is the parent's."""
        _, answer = await self._ask(address=self.number)
        return Address(url=answer["url"], key=answer["key"])

    async def _ask(self, **message: Any) -> tuple[int, dict[str, Any]]:
        """The parent's answer to a call, and the number of the call."""
        call = next(self.host.calls)
        answered = self.host.waiting[call] = asyncio.get_running_loop().create_future()
        try:
            self.host.send(call=call, **message)
            answer = await answered
        except asyncio.CancelledError:
            self.host.send(give_up=self.number, call=call)
            raise
        finally:
            del self.host.waiting[call]
        if "error" in answer:
            raise (ValueError if answer["kind"] == "ValueError" else RolloutError)(answer["error"])
        return call, answer


async def serve(connection: socket.socket, folders: Sequence[str]) -> None:
    """Imports the environment, and runs it until the parent ends the line."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST)
    writer.write(b"{}\n")
    asked = json.loads(await reader.readline())
    try:
        environment = environments.own(asked["environment"], folders, turns=asked["turns"])
    except RecipeError as error:
        problems = [[problem.reason, problem.fix] for problem in error.problems]
        writer.write(json.dumps({"problems": problems}).encode("ascii") + b"\n")
        await writer.drain()
        return
    asyncio.get_running_loop().set_exception_handler(note_lost_failure)
    host = EpisodeRunner(environment, writer)
    host.send(imported=asked["environment"])
    while line := await reader.readline():
        host.take(json.loads(line))
        await writer.drain()


def main(fd: int, parent: int, folders: Sequence[str]) -> None:
    """Serves until the line ends."""
    die_with(parent)
    os.set_inheritable(fd, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(serve(socket.socket(fileno=fd), folders))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])
