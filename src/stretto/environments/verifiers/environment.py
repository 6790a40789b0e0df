"""An episode of a taskset: verifiers plays and judges, and our model answers at the trajectory's address.

Ids, masks and log-probabilities are recorded where they are sampled, by the model's handle, so nothing of verifiers'
own record is trained. Its rewards and metrics become signals: each reward by its name and unweighted, and their
weighted sum as `reward`. An error that verifiers records, or a timeout of its own, is a failed trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from verifiers.v1.agent import Agents
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.agent import AgentConfig, resolve_agent
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.trace import Trace, TraceTask

from stretto.environments.base import Model
from stretto.environments.verifiers.player import FileBox, PlayingAgent, TalkingHarness
from stretto.environments.verifiers.tasksets import LoadedTaskset, load
from stretto.errors import RolloutError
from stretto.recipe.schema import VerifiersSection
from stretto.types import Outcome, Prompt

TOTAL = "reward"
"""The signal that is the weighted sum of a task's rewards."""
NO_KEY = "STRETTO_NO_KEY"
"""An environment variable that nobody sets: the key comes with each request."""


class VerifiersEnvironment:
    """Plays the tasks of tasksets; which one, a prompt's tags say."""

    def __init__(self, section: VerifiersSection, folders: Sequence[str]) -> None:
        self.turns, self.folders = section.turns, tuple(folders)
        self.opening = asyncio.Lock()
        self.open: Playground | None = None

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """Plays one task, and waits for its verdict."""
        tags = prompt.tags
        taskset = load(tags["taskset"], tags["config"], tags["count"], self.folders)
        task, env = taskset.tasks[tags["index"]], taskset.env
        address = await model.address()
        async with self._playground(taskset) as place:
            box = FileBox()
            await box.start()
            try:

                def make(name: str, spec: AgentConfig) -> PlayingAgent:
                    harness = TalkingHarness(place.http, address.key)
                    config = self._resolved(spec, address.base_url)
                    return PlayingAgent(name, config, harness=harness, box=box, server=place.server)

                agents: Agents[PlayingAgent] = Agents(env.config, make)
                trace = await _played(taskset, task, agents)
            finally:
                await box.stop()
        return outcome_of(trace)

    def _resolved(self, spec: AgentConfig, url: str) -> AgentConfig:
        """The agent with our model; what is sampled how, the run says."""
        client = EvalClientConfig(base_url=url, api_key_var=NO_KEY)
        resolved = resolve_agent(spec, model="policy", client=client, harness=HarnessConfig())
        return resolved if self.turns is None else resolved.model_copy(update={"max_turns": self.turns})

    @asynccontextmanager
    async def _playground(self, taskset: LoadedTaskset) -> AsyncIterator[Playground]:
        """What episodes that run at the same time share; the last one closes it."""
        async with self.opening:
            if self.open is None:
                opened = Playground(taskset)
                await opened.start()
                self.open = opened
            place = self.open
            place.episodes += 1
        try:
            yield place
        finally:
            place.episodes -= 1
            if place.episodes == 0:
                self.open = None
                await asyncio.shield(place.close())


class Playground:
    """verifiers' server that catches calls of the model, and the connections to it."""

    def __init__(self, taskset: LoadedTaskset) -> None:
        self.env, self.episodes = taskset.env, 0
        self.server = InterceptionServer()
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def start(self) -> None:
        """The server, and what the environment brings up for itself."""
        try:
            await self.server.start()
            await self.env.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leaves nothing open."""
        try:
            await self.env.stop()
        finally:
            await self.http.close()
            await self.server.stop()


async def _played(taskset: LoadedTaskset, task: Any, agents: Agents[PlayingAgent]) -> Trace:
    """The one rollout of an episode, finished and judged."""
    env = taskset.env
    agent: PlayingAgent = getattr(agents, taskset.role)
    await env.setup(agents)
    if not agent.trainable:
        raise RolloutError(f"the taskset's environment says that its agent {agent.name} is not to be trained")
    asked = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    try:
        async with asyncio.timeout(env.config.timeout.episode):
            await env.run(task, agents)
        if len(agent.traces) != 1:
            raise RolloutError(f"the taskset plays {len(agent.traces)} rollouts per episode; only 1 is available yet")
        episode = Episode(env=EnvInfo(id=env.config.env_id), task=asked, traces=agent.traces)
        async with asyncio.timeout(env.config.timeout.finalize):
            await env.finalize(task, episode)
    except Exception as error:
        for trace in agent.traces:
            _refuse_failure(trace)  # says more than what became of it
        if isinstance(error, TimeoutError):
            raise RolloutError("not finished within the timeout of the taskset's environment") from error
        raise
    return agent.traces[0]


def _refuse_failure(trace: Trace) -> None:
    """RolloutError for what verifiers recorded as its own."""
    if trace.errors:
        error = trace.errors[-1]
        raise RolloutError(f"{error.type}: {error.message}"[:2000])
    if trace.is_timeout:
        raise RolloutError(f"not finished within verifiers' own limit ({trace.stop_condition})")


def outcome_of(trace: Trace) -> Outcome:
    """What verifiers observed. RolloutError where that is an error or a timeout."""
    _refuse_failure(trace)
    measured = {name: value for name, value in trace.metrics.items() if value is not None}
    judged = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    own = {"turns": float(trace.num_turns), "truncated": float(trace.is_truncated)}
    return Outcome(answer=trace.last_reply, signals={**own, **measured, **judged, TOTAL: float(trace.reward)})
