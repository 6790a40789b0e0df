"""`stretto serve`: a run's newest checkpoint, or the model of a recipe, over HTTP, for programs that evaluate or use
it.

Nothing is trained and nothing recorded. Each request is a conversation of its own. Unlike in a training run, a request
may say at which temperature it is answered, with which seed, and at which length up to the context.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from stretto.engines.base import Completion, Request
from stretto.engines.queue import RoutedClient
from stretto.environments.addresses import Addresses
from stretto.environments.base import Address, Reply, Tool
from stretto.environments.chat import ModelHandle, Sampling
from stretto.environments.render import Renderer
from stretto.environments.trajectory import EnvironmentBudget
from stretto.environments.wire import SamplingWish
from stretto.runtime.answers import VISIT
from stretto.runtime.runtime import Runtime
from stretto.types import Message, Prompt


class OpenModel:
    """The model as anybody asks it who has the key."""

    def __init__(self, parts: Runtime, sampling: Sampling, *, numbers: count[int]) -> None:
        self.parts, self.sampling, self.numbers = parts, sampling, numbers
        self.handles: dict[int, ModelHandle] = {}

    @property
    def renderer(self) -> Renderer:
        """What turns its tokens into text."""
        return self.parts.renderer

    @property
    def context(self) -> int:
        """Longest conversation in tokens."""
        return self.parts.context

    @property
    def named(self) -> bool:
        """True: a program that asks for another model is not answered by this one."""
        return True

    def at(self, wish: SamplingWish) -> OpenModel:
        """The same model, sampled as a request wishes. One that names a seed is answered alike each time."""
        sampling = self.sampling
        if wish.temperature is not None:
            sampling = replace(sampling, temperature=wish.temperature)
        if wish.seed is None:
            return OpenModel(self.parts, sampling, numbers=self.numbers)
        return OpenModel(self.parts, replace(sampling, seed=wish.seed), numbers=count())

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Tool] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """The next assistant message."""
        handle = self._handle(max_new_tokens)
        reply = await handle.chat(messages, max_new_tokens=max_new_tokens, tools=tools, stop=stop)
        self.handles[id(reply)] = handle
        return reply

    async def complete(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """What the model says after tokens."""
        return await self._handle(max_new_tokens).complete(tokens, max_new_tokens=max_new_tokens, stop=stop)

    def sampled(self, reply: Reply) -> tuple[list[int], list[float]]:
        """The tokens before a reply, and the log-probabilities of its own."""
        return self.handles.pop(id(reply)).sampled(reply)

    def _handle(self, longest: int | None) -> ModelHandle:
        sampling = self.sampling if longest is None else replace(self.sampling, max_new_tokens=longest)
        return ModelHandle(
            prompt=Prompt(id="request", messages=()),
            visit=VISIT,
            attempt=next(self.numbers),
            sampling=sampling,
            renderer=self.parts.renderer,
            generate=self._generate,
        )

    async def _generate(self, request: Request) -> Completion:
        """On the cell that has the least to do."""
        lanes = self.parts.worker_group.lanes
        cell = min(lanes, key=lambda name: lanes[name].running)
        with lanes[cell].trajectory(), EnvironmentBudget(1.0, lanes[cell].whereabouts).paused():
            return await RoutedClient(lanes, cell).ask(request)


async def serve(parts: Runtime, *, port: int, key: str | None, ready: Callable[[Address], object]) -> None:
    """Serves until it is cancelled; `ready` is told where. Without a `key` there is a new one."""
    model = OpenModel(parts, parts.sampling(temperature=parts.recipe.engine.temperature), numbers=count())
    addresses = Addresses(vocabulary=parts.addresses.vocabulary, port=port)
    try:
        with addresses.running(model, key=key):
            ready(await addresses.open(model))
            await asyncio.Event().wait()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await addresses.close()
