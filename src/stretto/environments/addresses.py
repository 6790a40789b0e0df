"""Who asks at which key: the models of running trajectories that programs reach over HTTP.

`endpoint` is the server, started with the first address that somebody wants; most runs want none. What ends a
trajectory from inside a call that came over HTTP (its worker has died, a deadline has passed) ends its environment too,
as if it had asked itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from stretto.engines.base import Completion
from stretto.environments.base import Address, Reply, Tool
from stretto.errors import RolloutError, StrettoError
from stretto.extras import install
from stretto.types import Message

if TYPE_CHECKING:
    from stretto.environments.chat import Sampling
    from stretto.environments.endpoint import Endpoint
    from stretto.environments.render import Renderer
    from stretto.environments.wire import SamplingWish, SentReply


REMEMBERED = 4096
"""Tool calls of one key whose replies are known again; `stretto serve` has one key for as long as it runs."""


class ServedModel(Protocol):
    """What can be asked over HTTP; see `chat.ModelHandle`."""

    @property
    def context(self) -> int:
        """Longest conversation in tokens."""
        ...

    @property
    def renderer(self) -> Renderer:
        """What turns its tokens into text."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Tool] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply: ...

    @property
    def sampling(self) -> Sampling:
        """How it answers who wishes nothing."""
        ...

    @property
    def named(self) -> bool:
        """True if a request must name it rightly, or not at all."""
        ...

    def at(self, wish: SamplingWish) -> ServedModel:
        """The model that answers a request with wishes of its own; itself, where they count for nothing."""
        ...

    def sampled(self, reply: Reply) -> tuple[list[int], list[float]]: ...

    async def complete(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Caller:
    """The programs that ask one model."""

    model: ServedModel
    """What answers."""
    trajectory: asyncio.Task[Any]
    """What waits for the environment."""
    key: str | None = None
    """Their API key, from when the model is given an address; most never are."""
    replies: dict[str, SentReply] = field(default_factory=dict)
    """Id of a tool call -> the reply that it stands in, so that a client that passes it back continues that."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests under way."""
    failure: Exception | None = None
    """What has ended the trajectory."""

    def remember(self, tool_call: str, reply: SentReply) -> None:
        """Keeps the reply of a tool call, and forgets the oldest of more than a conversation has."""
        self.replies[tool_call] = reply
        if len(self.replies) > REMEMBERED:
            del self.replies[next(iter(self.replies))]

    def fail(self, error: Exception) -> None:
        """Ends the trajectory, whatever its environment waits for."""
        if self.failure is None:
            self.failure = error
            self.trajectory.cancel()


def new_key() -> str:
    """An API key that nobody can guess."""
    return f"stretto-{secrets.token_urlsafe(32)}"


class Addresses:
    """The keys that are valid now, and the server that knows them."""

    def __init__(self, *, vocabulary: int, port: int = 0) -> None:
        """Token ids that come over HTTP are below `vocabulary`. Port 0: whichever is free."""
        self.vocabulary, self.port = vocabulary, port
        self.callers: dict[str, Caller] = {}
        self._running: dict[ServedModel, Caller] = {}
        self._server: asyncio.Future[Endpoint] | None = None

    async def open(self, model: ServedModel) -> Address:
        """The model's address; the same one however often it is asked for."""
        server = await self._serving()
        if (caller := self._running.get(model)) is None:
            raise RolloutError("its trajectory has ended, so this model has no address any more")
        key = caller.key = caller.key or new_key()
        self.callers[key] = caller
        return Address(url=server.url, key=key)

    @contextmanager
    def running(self, model: ServedModel, key: str | None = None) -> Iterator[None]:
        """Inside, the model may be given an address, with this key or a new one; what a request of it dies of is
        raised here."""
        task = asyncio.current_task()
        assert task is not None
        caller = self._running[model] = Caller(model=model, trajectory=task, key=key)
        try:
            yield
        finally:
            del self._running[model]
            if caller.key is not None:
                self.callers.pop(caller.key, None)
            for request in caller.requests:
                request.cancel()
            if caller.failure is not None:
                task.uncancel()
                raise caller.failure

    async def _serving(self) -> Endpoint:
        if self._server is None:
            self._server = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._server)

    async def _start(self) -> Endpoint:
        try:
            from stretto.environments.endpoint import Endpoint
        except ImportError as error:
            raise RolloutError(f"an address of the model needs aiohttp: {install('serve')}") from error
        server = Endpoint(self.callers, vocabulary=self.vocabulary)
        try:
            await server.start(self.port)
        except OSError as error:
            reason = f"port {self.port} of 127.0.0.1 cannot be listened on: {error.strerror or error}"
            raise StrettoError(f"{reason}\n    fix: use another port") from error
        return server

    async def close(self) -> None:
        """Ends the server, if there is one."""
        if self._server is not None and not self._server.cancelled() and self._server.exception() is None:
            await self._server.result().close()
