"""Runs environments against an engine: launches in, trajectories out, in launch order.

Consumes launches; produces trajectories; waits for the engine and for environments; unblocked by completions.
Thousands of environments may run at once as coroutines. The engine is stepped when every one of them waits for it, so
what decodes together follows from counts, not from time, as long as environments wait for nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from stretto.environments.base import Environment
from stretto.errors import CellLost, DeadlineError, EngineError, EnvironmentFailure, StrettoError
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


class Model(Protocol):
    """What answers the requests of a trajectory."""

    async def ask(self, request: Request) -> Completion:
        """Waits for the answer."""
        ...

    def give_up(self, keys: Iterable[int]) -> None:
        """Nobody waits for these answers any more."""
        ...


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
        self.waiting: set[Outside] = set()
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
                    f"{len(self.waiting)} of them wait for the engine; raise deadlines.generate or lower the batch"
                )
            if len(self.waiting) < alive:
                self.changed.clear()
                # Not `wait_for`: it swallows a cancellation that comes together with what it waits for (Python 3.11).
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE):
                        await self.changed.wait()
                    continue
            for completion in self.engine.step(SLICE):
                future = self.futures.pop(completion.key)
                if not future.done():  # given up a moment ago
                    future.set_result(completion)
            await asyncio.sleep(0)

    async def ask(self, request: Request) -> Completion:
        """Hands a request to the engine and waits for it."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.futures[request.key] = future
        self.engine.submit([request])
        self.changed.set()
        try:
            return await future
        finally:
            self.give_up([request.key])

    def give_up(self, keys: Iterable[int]) -> None:
        """Takes requests that nobody waits for any more out of the engine, if they still are there."""
        for key in keys:
            if (future := self.futures.pop(key, None)) is not None:
                self.engine.abort([key])
                future.cancel()

    async def _run(self, launch: Launch) -> Trajectory:
        """One trajectory."""
        trajectory = await run_trajectory(
            launch,
            model=self,
            environment=self.environment,
            renderer=self.renderer,
            sampling=self.sampling,
            outside=Outside(self.environment_deadline, waiting=self.waiting),
        )
        self.changed.set()
        return trajectory


async def run_trajectory(
    launch: Launch,
    *,
    model: Model,
    environment: Environment,
    renderer: Renderer,
    sampling: Sampling,
    outside: Outside,
) -> Trajectory:
    """One trajectory; whatever goes wrong in it is recorded, never raised."""
    calls: list[int] = []

    async def generate(request: Request) -> Completion:
        calls.append(request.key)
        with outside.paused():
            return await model.ask(request)

    handle = ModelHandle(
        prompt=launch.prompt,
        visit=launch.visit,
        attempt=launch.attempt,
        sampling=sampling,
        renderer=renderer,
        generate=generate,
    )
    outcome: Outcome | None = None
    failure: str | None = None
    try:
        async with outside.limit:
            outcome = await environment(launch.prompt, handle)
    except TimeoutError as error:
        mine = f"not finished within {outside.seconds:g} s outside the engine"
        failure = f"environment: {mine if outside.limit.expired() else f'TimeoutError: {error}'}"
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        failure = f"environment: CancelledError: {error}"
    except (CellLost, DeadlineError, EngineError):
        raise
    except StrettoError as error:
        failure = f"environment: {error}"
    except Exception as error:
        # The user's environment may raise anything; it costs its own trajectory, not the run.
        failure = f"environment: {type(error).__name__}: {error}"
    if outcome is not None and not handle.conversations():
        failure = f"environment: {EnvironmentFailure('it ended without calling the model')}"
    model.give_up(calls)
    return Trajectory(
        prompt=launch.prompt,
        visit=launch.visit,
        attempt=launch.attempt,
        conversations=handle.conversations(),
        outcome=outcome,
        failure=failure,
        rewritten=handle.rewritten,
        full=handle.full,
    )


class Outside:
    """Counts the seconds that a trajectory spends outside the engine against its deadline."""

    def __init__(self, seconds: float, *, waiting: set[Outside]) -> None:
        self.seconds = self.left = seconds
        self.since = time.monotonic()
        self.calls = 0
        self.limit = asyncio.timeout(seconds)
        self.waiting = waiting

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count, however many calls of the trajectory overlap."""
        if self.calls == 0:
            self.left -= time.monotonic() - self.since
            self.waiting.add(self)
            self._limit_to(None)
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self.calls == 0:
                self.since = time.monotonic()
                self.waiting.discard(self)
                self._limit_to(asyncio.get_running_loop().time() + max(0.0, self.left))

    def _limit_to(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the trajectory has ended, and what it left behind is not limited any more
            self.limit.reschedule(when)
