"""Runs environments against an engine: launches in, trajectories out, in launch order.

Consumes launches; produces trajectories; waits for the engine and for environments; unblocked by completions.
Thousands of environments may run at once as coroutines. The engine is stepped when every one of them waits for it, so
what decodes together follows from counts, not from time, as long as environments wait for nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.environments.base import Environment
from stretto.errors import DeadlineError, EnvironmentFailure, StrettoError
from stretto.rollout.base import Completion, Engine, Request
from stretto.rollout.model_handle import ModelHandle, Sampling
from stretto.rollout.render import Renderer
from stretto.types import Outcome, Prompt, Trajectory

SLICE = 0.5
"""Seconds of generation between two looks at the environments and the deadline."""

PATIENCE = 0.05
"""Seconds that a step waits for environments that are busy with something else before it goes on without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One attempt to make."""

    prompt: Prompt
    """What to ask."""
    visit: int
    """How often it was drawn before."""
    attempt: int
    """Index in the group."""


class Collector:
    """One round of trajectories."""

    def __init__(
        self,
        engine: Engine,
        *,
        environment: Environment,
        renderer: Renderer,
        sampling: Sampling,
        environment_deadline: float,
        deadline: float,
    ) -> None:
        self.engine, self.environment = engine, environment
        self.renderer, self.sampling = renderer, sampling
        self.environment_deadline, self.deadline = environment_deadline, deadline
        self.futures: dict[int, asyncio.Future[Completion]] = {}
        self.changed = asyncio.Event()

    async def collect(self, launches: Sequence[Launch]) -> list[Trajectory]:
        """Runs all launches to their end."""
        tasks = [asyncio.create_task(self._run(launch)) for launch in launches]
        try:
            await self._drive(tasks)
            return [task.result() for task in tasks]
        finally:
            self.engine.abort(list(self.futures))
            for task in tasks:
                task.cancel()

    async def _drive(self, tasks: Sequence[asyncio.Task[Trajectory]]) -> None:
        """Steps the engine until every trajectory is there."""
        end = time.monotonic() + self.deadline
        while alive := sum(not task.done() for task in tasks):
            if time.monotonic() > end:
                raise DeadlineError(
                    f"generate: {alive} of {len(tasks)} trajectories were not finished within {self.deadline:g} s; "
                    f"{len(self.futures)} of them wait for the engine; raise deadlines.generate or lower the batch"
                )
            if len(self.futures) < alive:
                self.changed.clear()
                try:
                    await asyncio.wait_for(self.changed.wait(), PATIENCE)
                    continue
                except TimeoutError:
                    pass
            for completion in self.engine.step(SLICE):
                self.futures.pop(completion.key).set_result(completion)
            await asyncio.sleep(0)

    async def _generate(self, request: Request) -> Completion:
        """Hands a request to the engine and waits for it."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.futures[request.key] = future
        self.engine.submit([request])
        self.changed.set()
        return await future

    async def _run(self, launch: Launch) -> Trajectory:
        """One trajectory; whatever goes wrong in it is recorded, never raised."""
        outside = _Outside(self.environment_deadline)

        async def generate(request: Request) -> Completion:
            with outside.paused():
                return await self._generate(request)

        handle = ModelHandle(
            prompt=launch.prompt,
            visit=launch.visit,
            attempt=launch.attempt,
            sampling=self.sampling,
            renderer=self.renderer,
            generate=generate,
        )
        outcome: Outcome | None = None
        failure: str | None = None
        try:
            async with outside.limit:
                outcome = await self.environment(launch.prompt, handle)
        except TimeoutError:
            failure = f"environment: not finished within {self.environment_deadline:g} s outside the engine"
        except StrettoError as error:
            failure = f"environment: {error}"
        except (
            Exception
        ) as error:  # the user's environment may raise anything; it costs its own trajectory, not the run
            failure = f"environment: {type(error).__name__}: {error}"
        if outcome is not None and not handle.conversations():
            failure = f"environment: {EnvironmentFailure('it ended without calling the model')}"
        self.changed.set()
        return Trajectory(
            prompt=launch.prompt,
            visit=launch.visit,
            attempt=launch.attempt,
            conversations=handle.conversations(),
            outcome=outcome,
            failure=failure,
        )


class _Outside:
    """Counts the seconds that a trajectory spends outside the engine against its deadline."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.since = time.monotonic()
        self.limit = asyncio.timeout(seconds)

    def paused(self) -> _Outside:
        """As a context: the time inside does not count."""
        return self

    def __enter__(self) -> None:
        self.left -= time.monotonic() - self.since
        self.limit.reschedule(None)

    def __exit__(self, *exception: object) -> None:
        self.since = time.monotonic()
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time() + max(0.0, self.left))
