"""An engine behind a door: trajectories ask it one by one, it decodes for all of them together.

Each round takes what has come in since the last, hands it to the worker with what nobody waits for any more, and gives
back what has ended. Nothing runs while nobody waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from stretto.engines.base import Completion, Request, earlier_first, joined_kept
from stretto.environments.trajectory import Whereabouts
from stretto.errors import WorkerLost

SLICE = 0.25
"""Seconds of decoding before requests that came in meanwhile are let in."""

TURNS = 100
"""Turns of the event loop in which a trajectory that waits for nothing has asked again, however many coroutines its
environment goes through."""


class AnswerDeadline(Protocol):
    """How long an answer may take."""

    seconds: float
    """From when it is asked for."""

    async def missed(self) -> Exception:
        """What to say when it has passed."""
        ...


class PendingRequest(NamedTuple):
    """A request, and who waits for its answer."""

    request: Request
    """What is asked."""
    future: asyncio.Future[Completion]
    """Gets the answer."""
    since: float
    """When (`time.monotonic`) it was first asked for."""


class EngineQueue:
    """One generate cell's."""

    def __init__(
        self,
        generate: Callable[..., Awaitable[list[Completion]]],
        *,
        deadline: AnswerDeadline | None = None,
        together: bool = False,
    ) -> None:
        """An answer must come within `deadline`, which is looked at between two rounds; whoever makes `generate` ends a
        round that does not end.

        With `together`, what decodes together follows from counts and never from time: each round begins when every
        trajectory waits for it. One device is repeatable to the bit by that.
        """
        self.generate, self.deadline, self.together = generate, deadline, together
        # How many trajectories run here, and who of them waits for an answer.
        self.running = 0
        self.whereabouts = Whereabouts()
        self.asked: dict[int, PendingRequest] = {}
        self.new: dict[int, Request] = {}
        self.unwanted: list[int] = []
        # How many answers are still to come that nobody waits for any more; the same may have been asked again.
        self.late: Counter[int] = Counter()
        # Key -> where it goes, until the worker has given it up; and where it comes from, until it is here.
        self.leaving: dict[int, EngineQueue] = {}
        self.coming: dict[int, EngineQueue] = {}
        self.serving: asyncio.Task[None] | None = None
        self.handing: set[asyncio.Task[None]] = set()

    async def ask(self, request: Request) -> Completion:
        """The answer to a request, from this cell or from one that it was moved to."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._take(PendingRequest(request, future, time.monotonic()))
        return await future

    @contextmanager
    def trajectory(self) -> Iterator[None]:
        """One runs here inside."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def give_up(self, keys: Iterable[int]) -> None:
        """Nobody waits for these any more. What has not come yet is where it comes from."""
        for key in keys:
            self.coming.get(key, self)._forget(key)

    def _forget(self, key: int) -> None:
        if self.asked.pop(key, None) is None or self.new.pop(key, None) is not None:
            return  # the worker has not heard of it
        self.late[key] += 1
        if self._arrives(key) is None:  # else the worker was told when it was moved
            self.unwanted.append(key)

    def move(self, keys: Iterable[int], target: EngineQueue) -> None:
        """Lets requests go on elsewhere; what they have so far goes with them as tokens.

        The worker is told at once and not in the next round: that would stand behind the work that it gets instead.
        """
        keys = list(keys)
        for key in [key for key in keys if key in self.coming]:  # it goes straight on
            self.coming.pop(key)._leads(key, target)
        moved = [key for key in keys if key in self.asked]
        known = [key for key in moved if key not in self.new]  # to the worker
        for key in moved:
            if self.new.pop(key, None) is not None:
                target._take(self.asked.pop(key))
        if known:
            for key in known:
                self._leads(key, target)
            task = asyncio.create_task(self._round([], known, 0.0))
            self.handing.add(task)
            task.add_done_callback(self.handing.discard)

    def _leads(self, key: int, target: EngineQueue) -> None:
        self.leaving[key] = target
        target.coming[key] = self

    def _arrives(self, key: int) -> EngineQueue | None:
        """Where a request goes on that was to leave; it leaves now."""
        target = self.leaving.pop(key, None)
        if target is not None:
            del target.coming[key]
        return target

    def _take(self, asked: PendingRequest) -> None:
        self.asked[asked.request.key] = asked
        self.new[asked.request.key] = asked.request
        if self.serving is None:
            self.serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        """Rounds, until nobody waits who is not leaving."""
        try:
            while self.asked.keys() - self.leaving.keys() or self.unwanted:
                if self.together:
                    await self._everybody()
                new, self.new = list(self.new.values()), {}
                unwanted, self.unwanted = self.unwanted, []
                await self._round(new, unwanted, SLICE)
                if (deadline := self.deadline) and self.asked:
                    oldest = min(each.since for each in self.asked.values())
                    if time.monotonic() - oldest > deadline.seconds:
                        self._fail(await deadline.missed())
                await asyncio.sleep(0)  # who got an answer may ask again before the next round
        finally:
            self.serving = None

    async def _everybody(self) -> None:
        """Lets every trajectory ask that need not wait for anything else first: a tool, or a game in a process of its
        own, does not keep the engine from decoding for the others."""
        for _ in range(TURNS):
            if len(self.whereabouts.waiting) >= self.running:
                return
            await asyncio.sleep(0)

    async def _round(self, new: list[Request], unwanted: list[int], seconds: float) -> None:
        """One call of the worker; if it fails, that is everybody's answer."""
        try:
            for completion in await self.generate(new, unwanted, seconds):
                self._answer(completion)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: BaseException) -> None:
        """Gives everybody this answer. If the worker has died, what was to leave begins again where it was to go: it
        counts as being there already."""
        asked, self.asked = self.asked, {}
        self.new.clear()
        self.late.clear()
        for key, each in asked.items():
            target = self._arrives(key)
            if target is not None and isinstance(error, WorkerLost) and not each.future.done():
                target._take(each)
            elif not each.future.done():
                each.future.set_exception(error)
        for key in list(self.leaving):  # given up meanwhile
            self._arrives(key)

    def _answer(self, completion: Completion) -> None:
        """Hands a completion to who waits for it, or to the lane that goes on with it."""
        if self.late[completion.key]:
            self.late[completion.key] -= 1
            return
        asked = self.asked.pop(completion.key, None)
        target = self._arrives(completion.key)
        if asked is None or asked.future.done():
            return
        request, future = asked.request, asked.future
        if target is None or completion.stop != "abort":
            future.set_result(completion)
            return
        rest = replace(
            request,
            tokens=np.concatenate([request.tokens, completion.tokens]),
            max_new_tokens=request.max_new_tokens - len(completion.tokens),
            begun=request.begun + len(completion.tokens),
        )
        before: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        before.add_done_callback(lambda done: _joined(completion, done, future))
        target._take(PendingRequest(rest, before, asked.since))


def _joined(first: Completion, then: asyncio.Future[Completion], future: asyncio.Future[Completion]) -> None:
    """Answers with both parts of a completion."""
    if future.done() or then.cancelled():
        return
    if error := then.exception():
        future.set_exception(error)
        return
    rest = then.result()
    future.set_result(
        replace(
            rest,
            tokens=np.concatenate([first.tokens, rest.tokens]),
            logprobs=np.concatenate([first.logprobs, rest.logprobs]),
            kept=joined_kept([first.kept, rest.kept]),
            experts=earlier_first(first.experts, rest.experts) if len(first.tokens) else rest.experts,
        )
    )


class RoutedClient:
    """The model as one trajectory asks it, on whatever cell that is."""

    def __init__(self, lanes: Mapping[str, EngineQueue], cell: str) -> None:
        self.lanes, self.cell = lanes, cell
        self.waits: set[int] = set()
        self.over = asyncio.Event()

    async def ask(self, request: Request) -> Completion:
        """Waits for the answer."""
        self.waits.add(request.key)
        try:
            return await self.lanes[self.cell].ask(request)
        finally:
            self.give_up([request.key])

    def give_up(self, keys: Iterable[int]) -> None:
        """Nobody waits for these answers any more."""
        for key in keys:
            if key in self.waits:
                self.waits.discard(key)
                self.lanes[self.cell].give_up([key])
