"""Runs an environment against whatever answers it: a launch in, a trajectory out.

Waits for the model and for what the environment waits for; the seconds of the second kind are limited. Thousands of
trajectories may run at once as coroutines of one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.engines.base import Completion, Request
from stretto.environments.addresses import Addresses
from stretto.environments.base import Environment, Model, is_number
from stretto.environments.chat import ModelHandle, Sampling
from stretto.environments.failures import note_lost_failure, raised
from stretto.environments.render import Renderer
from stretto.errors import MODEL_FAILURES, RolloutError
from stretto.types import Conversation, Outcome, Prompt, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """One attempt to make."""

    prompt: Prompt
    """What to ask."""
    visit: int
    """How often it was drawn before."""
    attempt: int
    """Index in the group."""


class RequestClient(Protocol):
    """What answers the requests of a trajectory."""

    async def ask(self, request: Request) -> Completion:
        """Waits for the answer."""
        ...

    def give_up(self, keys: Iterable[int]) -> None:
        """Nobody waits for these answers any more."""
        ...


async def run_trajectory(
    launch: RolloutStart,
    *,
    model: RequestClient,
    environment: Environment,
    renderer: Renderer,
    sampling: Sampling,
    outside: EnvironmentBudget,
    addresses: Addresses | None = None,
) -> Trajectory:
    """One trajectory, whose model programs may reach at `addresses`. What goes wrong is recorded, never raised."""
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
        reach=addresses.open if addresses else None,
    )
    outcome: Outcome | None = None
    failure: str | None = None

    async def play() -> Outcome:
        try:
            return await played(environment, launch.prompt, handle)
        finally:
            model.give_up(calls)

    playing = asyncio.ensure_future(play())  # a task of its own, because an environment may cancel the one it runs in
    asyncio.get_running_loop().set_exception_handler(note_lost_failure)
    try:
        async with outside:
            with addresses.running(handle) if addresses else nullcontext():
                outcome = await playing
    except TimeoutError:
        failure = f"environment: not finished within {outside.seconds:g} s outside the engine"
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        failure = f"environment: CancelledError: {str(error) or 'it canceled the task that it runs in'}"
    except RolloutError as error:  # whatever the user's environment raises costs its own trajectory alone
        failure = f"environment: {error}"
    conversations = handle.conversations()
    if outcome is not None and (wrong := _contradiction(outcome, conversations, calls=handle.calls)):
        failure = f"environment: {wrong}"
    return Trajectory(
        prompt=launch.prompt,
        visit=launch.visit,
        attempt=launch.attempt,
        conversations=conversations,
        outcome=outcome,
        failure=failure,
        rewritten=handle.rewritten,
        full=handle.full,
    )


async def played(environment: Environment, prompt: Prompt, model: Model) -> Outcome:
    """Return the outcome of one attempt. RolloutError with the user's frames, whatever the environment raises."""
    try:
        return observed(await environment(prompt, model))
    except (asyncio.CancelledError, KeyboardInterrupt, *MODEL_FAILURES):
        raise
    except BaseException as error:
        raise RolloutError(raised(error)) from error


def _contradiction(outcome: Outcome, conversations: Sequence[Conversation], *, calls: int) -> str | None:
    """What an outcome says that cannot have been, or none."""
    if not conversations:
        return "it ended without calling the model"
    if outcome.turn_rewards is not None and len(outcome.turn_rewards) != calls:
        told = f"its outcome has {len(outcome.turn_rewards)} turn_rewards for {calls} calls of the model"
        return f"{told}; give one for each, in the order of the calls"
    return None


def observed(outcome: object) -> Outcome:
    """What an environment returned. RolloutError if that is no outcome that can be judged."""
    if not isinstance(outcome, Outcome):
        raise RolloutError(f"it returned {type(outcome).__name__}, which is no stretto.Outcome")
    if not isinstance(outcome.answer, str):
        raise RolloutError(f"its outcome's answer is {type(outcome.answer).__name__}, not text")
    if wrong := [name for name, value in dict(outcome.signals).items() if not is_number(value)]:
        raise RolloutError(f"its outcome's signal {wrong[0]!r} is no number")
    if not all(map(is_number, outcome.turn_rewards or ())):
        raise RolloutError("its outcome's turn_rewards are not all numbers")
    return outcome


class Whereabouts:
    """Which trajectories wait for an engine, and by when each of the others must ask it again or end.

    All of them have one timer together, because most have ended long before it is due.
    """

    def __init__(self) -> None:
        self.waiting: set[EnvironmentBudget] = set()
        self.due: dict[EnvironmentBudget, float] = {}
        self.timer: asyncio.TimerHandle | None = None

    def leaves(self, budget: EnvironmentBudget, when: float) -> None:
        """It waits for something else, until `when` (the loop's time) at most."""
        self.waiting.discard(budget)
        self.due[budget] = when
        if self.timer is None or when < self.timer.when():
            self._look_at(when)

    def asks(self, budget: EnvironmentBudget) -> None:
        """It waits for the engine."""
        self.due.pop(budget, None)
        self.waiting.add(budget)

    def ends(self, budget: EnvironmentBudget) -> None:
        """It is over."""
        self.due.pop(budget, None)
        self.waiting.discard(budget)

    def _look_at(self, when: float) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        self.timer, now = None, asyncio.get_running_loop().time()
        for budget in [budget for budget, when in self.due.items() if when <= now]:
            del self.due[budget]
            budget.limit.reschedule(now)
        if self.due:
            self._look_at(min(self.due.values()))


class EnvironmentBudget:
    """Counts the seconds that a trajectory spends outside the engine against its deadline. Inside it, as a context
    manager, what takes longer is ended with a TimeoutError."""

    def __init__(self, seconds: float, where: Whereabouts) -> None:
        self.seconds = self.left = seconds
        self.where = where
        self.calls = 0
        self.counts = False

    async def __aenter__(self) -> None:
        self.limit = asyncio.timeout(None)
        await self.limit.__aenter__()
        self.counts = True
        self._begin()

    async def __aexit__(self, *error: Any) -> None:
        self.counts = False
        self.where.ends(self)
        await self.limit.__aexit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count, however many calls of the trajectory overlap."""
        if self.calls == 0:
            self.left -= asyncio.get_running_loop().time() - self.since if self.counts else 0.0
            self.where.asks(self)
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self.calls == 0 and self.counts:
                self._begin()
            elif self.calls == 0:  # what a trajectory left behind is not limited any more
                self.where.ends(self)

    def _begin(self) -> None:
        """The time counts from now on."""
        self.since = asyncio.get_running_loop().time()
        self.where.leaves(self, self.since + max(0.0, self.left))
