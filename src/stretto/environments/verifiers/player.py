"""The agent that plays in this process: verifiers' own rollout, with a conversation in the place of a program.

verifiers starts a program (a harness) per rollout, in a box, and catches what the program asks a model. Its own ones
want uv, packages and a folder in the user's home. Here the harness is a coroutine that asks once per segment, through
the same server, and the box is a temporary folder in which nothing can be run.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from verifiers.v1.agent import Agent, Interaction
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import SandboxError
from verifiers.v1.harness import Harness
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig, SubprocessRuntime
from verifiers.v1.task import Task, TaskData
from verifiers.v1.trace import Trace

NAME = "stretto"
"""What traces call the harness."""


class TalkingHarness(Harness[HarnessConfig]):
    """A conversation without tools: what was said goes to the model, and the reply ends the segment."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, session: aiohttp.ClientSession, key: str) -> None:
        """`key` says to our endpoint which trajectory asks; verifiers passes headers on that it does not know."""
        super().__init__(HarnessConfig(id=NAME))
        self.http, self.key = session, key

    async def launch(
        self,
        ctx: Any,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """One segment: the model's next message."""
        system, prompt = self.resolve_prompt(data)
        said = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            said.append({"role": "user", "content": prompt})
        else:
            said += [message_to_wire(message) for message in prompt or ()]
        asked = {"model": ctx.model, "messages": said}
        headers = {"Authorization": f"Bearer {secret}", "X-API-Key": self.key}
        async with self.http.post(f"{endpoint}/chat/completions", json=asked, headers=headers) as answer:
            text = await answer.text()
        return ProgramResult(exit_code=0 if answer.status == 200 else 1, stdout="", stderr=text)


class FileBox(SubprocessRuntime):
    """A temporary folder. verifiers' own would be in the user's home, and would run what a task asks for as the user;
    that may be what a model wrote."""

    def __init__(self) -> None:
        super().__init__(SubprocessConfig())

    async def start(self) -> None:
        """Makes the folder."""
        self.workdir = Path(tempfile.mkdtemp(prefix="stretto-"))
        self.info.id = str(self.workdir)

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Refused."""
        raise SandboxError(f"the task runs programs ({argv[0]}), which is not available yet")

    async def open_process(self, argv: list[str], env: dict[str, str]) -> Any:
        """Refused."""
        await self.run(argv, env)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Refused."""
        await self.run(argv, env)


class PlayingAgent(Agent):
    """An agent of one episode; it keeps the traces of what it played."""

    def __init__(
        self,
        name: str,
        config: AgentConfig,
        *,
        harness: Harness[HarnessConfig],
        box: Runtime,
        server: InterceptionServer,
    ) -> None:
        super().__init__(config, interception=server)
        self.name, self.harness, self.box = name, harness, box
        self.traces: list[Trace] = []

    async def run(
        self, task: Task[Any, Any, Any], *, runtime: Runtime | None = None, tools: Mapping[str, Any] | None = None,
        on_trace: Any = None, collect_artifacts: bool = False,
    ) -> Trace:  # fmt: skip
        """A rollout of one segment."""
        box = runtime or self.box
        return await super().run(task, runtime=box, tools=tools, on_trace=self._keeper(on_trace))

    @asynccontextmanager
    async def interaction(
        self, task: Task[Any, Any, Any], *, runtime: Runtime | None = None, tools: Mapping[str, Any] | None = None,
        on_trace: Any = None,
    ) -> AsyncIterator[Interaction]:  # fmt: skip
        """A rollout that the environment leads turn by turn."""
        opened = super().interaction(task, runtime=runtime or self.box, tools=tools, on_trace=self._keeper(on_trace))
        async with opened as interaction:
            yield interaction

    def _keeper(self, also: Any) -> Any:
        def keep(trace: Trace) -> None:
            trace.agent.name, trace.agent.trainable = self.name, self.trainable
            self.traces.append(trace)
            if also is not None:
                also(trace)

        return keep
