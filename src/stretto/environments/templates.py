"""Chat templates of models, applied in a worker process: a chat in, its text out, or why there is none.

A template is a program that came with a model, and may loop or write without end. So no template but that of scratch
models runs in this process. Calls wait for the answer, with a deadline; nothing else of the process goes on meanwhile,
so that what is sampled together does not depend on how long they take. One worker serves the checks and the run.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

from stretto.errors import (
    DeadlineError,
    EngineError,
    RolloutError,
    SandboxDeadlineError,
    SandboxDiedError,
    SandboxError,
)
from stretto.sandbox.pool import Pool
from stretto.types import Message

WORKER = "stretto.environments.template_worker"
SECONDS = 10.0
"""How long a template may take for one chat; sound ones take a thousandth of a second."""
START = 60.0
"""How long a worker may take to load what applies templates."""
LONGEST = 2_000_000
"""Characters of a chat as text. The longest contexts that there are hold about as many."""
TOGETHER = 64
"""Chats that are sent at once where many are asked for."""
PATIENCE = 3
"""Chats one after another that a template may take too long for before the run ends."""


class TemplateOutOfBounds(RolloutError):
    """A chat template took too long or too much memory for a chat, or made too much text of it."""


Rendered = str | RolloutError
"""The text of a chat, or why there is none."""


class Templates:
    """The worker process, and the thread that speaks to it. It starts when it is first needed."""

    def __init__(self, *, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = Pool(workers=1)
        self._begun: Future[Any] | None = None
        self._late = 0

    def begin(self) -> None:
        """Starts the worker, without waiting for it."""
        if self._begun is None:
            self._begun = self._call("begin", deadline=START)

    def texts(self, template: str, variables: Mapping[str, str], chats: Sequence[str]) -> Iterator[Rendered]:
        """What the template makes of each chat, in order; chats are those of `chat_of`.

        Raises a DeadlineError where it takes too long for one chat after another, and an EngineError without a worker.
        """
        done, alone = 0, 1  # the first one alone: a template that never ends is found at once
        while done < len(chats):
            some = chats[done : done + (1 if alone else TOGETHER)]
            try:
                replies = self._ask(template, variables, some)
            except TemplateOutOfBounds as error:
                if len(some) > 1:  # which of them it was is only seen one by one
                    alone = len(some)
                    continue
                replies = [error]
            yield from replies
            done += len(replies)
            alone = max(0, alone - 1)

    def close(self) -> None:
        """Leaves no process behind; the next call starts another."""
        loop, self._loop, self._begun = self._loop, None, None
        if loop is not None:
            with suppress(SandboxError):
                asyncio.run_coroutine_threadsafe(self._pool.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
        self._pool = Pool(workers=1)

    def _ask(self, template: str, variables: Mapping[str, str], chats: Sequence[str]) -> list[Rendered]:
        """What the worker makes of the first of the chats, or of all. A worker that somebody ended is replaced once."""
        try:
            return self._ask_once(template, variables, chats)
        except SandboxDiedError:
            self._begun = None
        try:
            return self._ask_once(template, variables, chats)
        except SandboxDiedError as error:
            self._begun = None
            raise TemplateOutOfBounds(f"the chat template ends its process: {error}") from None

    def _ask_once(self, template: str, variables: Mapping[str, str], chats: Sequence[str]) -> list[Rendered]:
        self.begin()
        assert self._begun is not None
        try:
            self._begun.result()
        except SandboxError as error:
            self._begun = None
            raise EngineError(f"the worker process for chat templates did not start: {error}") from error
        try:
            asked = self._call("render", template, dict(variables), list(chats), LONGEST, deadline=self.seconds)
            replies = [_rendered(reply) for reply in asked.result()]
            self._late = 0
            return replies
        except SandboxDeadlineError:
            self._begun = None
            self._late += len(chats) == 1
            if self._late >= PATIENCE:
                raise DeadlineError(
                    f"the model's chat template took longer than {self.seconds:g} s for {PATIENCE} chats, one after "
                    "another; use another model, or repair its chat_template"
                ) from None
            raise TemplateOutOfBounds(f"the chat template takes longer than {self.seconds:g} s") from None
        except SandboxDiedError:
            raise
        except SandboxError as error:
            raise RolloutError(f"the chat template cannot be applied: {error}") from None

    def _call(self, name: str, *args: Any, deadline: float) -> Future[Any]:
        """A function of the worker's module. The pool lives in the loop of a thread of its own."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="chat templates", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(
            self._pool.call(f"{WORKER}:{name}", *args, deadline=deadline), self._loop
        )


@cache
def shared() -> Templates:
    """The worker of this process; it ends with it."""
    templates = Templates()
    atexit.register(templates.close)
    return templates


def chat_of(messages: Sequence[Message], *, ask: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """A chat as a worker gets it. `ask` says whether the model is to speak next, `tools` what it may call."""
    try:
        chat = [[dict(message) for message in messages], ask, [dict(tool) for tool in tools] or None]
        return json.dumps(chat, default=_placeholder)
    except (TypeError, ValueError, RecursionError) as error:
        raise RolloutError(f"a message cannot be written as JSON: {error}") from None


def _placeholder(value: object) -> str:
    """Stands for what is no JSON, as transformers has it."""
    return f"<{type(value).__name__}>"


def _rendered(reply: Mapping[str, str]) -> Rendered:
    if "text" in reply:
        return reply["text"]
    return (
        TemplateOutOfBounds(f"the chat template {reply['exceeds']}")
        if "exceeds" in reply
        else RolloutError(reply["wrong"])
    )


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
