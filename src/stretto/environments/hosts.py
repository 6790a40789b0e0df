"""Environments in processes of their own (`environment.hosts`), as the process that has the model sees them.

Called like any environment: a trajectory goes to the host with the fewest, its calls of the model come back as lines,
and so does its outcome. A host that dies costs the trajectories in it and is started again when it is next needed.
Deadlines are kept by whoever calls; a host that does not even answer when one has passed is blocked, and is killed.
What travels is JSON; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from stretto.environments import FIELD, host_worker
from stretto.environments.base import Model, Reply
from stretto.errors import MODEL_FAILURES, DeadlineError, Problem, RecipeError, RolloutError, StrettoError
from stretto.sandbox.process import Process
from stretto.types import Message, Outcome, Prompt

GRACE = 5.0
"""Seconds that a host has to answer anything when a deadline in it has passed."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """A trajectory under way in a host."""

    model: Model
    """What its calls are passed to."""
    outcome: asyncio.Future[Outcome]
    """What comes of it."""
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The calls that wait for the model."""
    replies: dict[int, Reply] = field(default_factory=dict)
    """What the model said in each call, as the model's side knows it."""


class HostProcess:
    """One process."""

    def __init__(self, kind: str, folders: Sequence[str], turns: int) -> None:
        self.kind, self.turns = kind, turns
        self.process = Process(folders, program=host_worker.__file__, longest=host_worker.LONGEST)
        self.episodes: dict[int, Episode] = {}
        self.numbers = count()
        self.pongs: dict[int, asyncio.Event] = {}
        self.alive = True
        self.blocked = ""
        self.reading: asyncio.Task[None] | None = None
        self.guards: set[asyncio.Task[None]] = set()

    async def start(self, seconds: float) -> None:
        """Waits until it has imported the environment. RecipeError if it cannot."""
        try:
            async with asyncio.timeout(seconds):
                await self.process.connect()
                self.send(environment=self.kind, turns=self.turns)
                first = json.loads(await self.process.lines[0].readline() or b"{}")
        except TimeoutError as error:
            await self.end()
            fix = "import less at the top of its file, or raise deadlines.start"
            late = f"start: the host process of {self.kind} was not ready within {seconds:g} s"
            raise DeadlineError(f"{late}\n    fix: {fix}") from error
        except (EOFError, OSError, ValueError):
            first = {}
        if "imported" in first:
            self.reading = asyncio.ensure_future(self._read())
            return
        await self.end()
        why = f"{self.kind} cannot be imported: its host process {self.process.epitaph()}"
        died = [why, "mend the file; what it wrote to standard error may say more"]
        problems = [Problem(field=FIELD, reason=why, fix=fix) for why, fix in first.get("problems", [died])]
        raise RecipeError(*problems)

    def send(self, **message: Any) -> None:
        """One line; to a process that has died it goes nowhere."""
        if self.alive:
            self.process.lines[1].write(json.dumps(message).encode("ascii") + b"\n")

    async def run(self, prompt: Prompt, model: Model) -> Outcome:
        """One trajectory. RolloutError if it fails, or with the process."""
        number, episode = next(self.numbers), Episode(model=model, outcome=asyncio.get_running_loop().create_future())
        self.episodes[number] = episode
        asked = {"id": prompt.id, "messages": [dict(message) for message in prompt.messages]}
        try:
            self.send(start=number, prompt={**asked, "reference": prompt.reference, "tags": dict(prompt.tags)})
            return await episode.outcome
        finally:
            del self.episodes[number]
            for call in episode.calls.values():
                call.cancel()
            if not episode.outcome.done() or episode.outcome.cancelled():
                self.send(cancel=number)
                guard = asyncio.ensure_future(self._still_answers(number))
                self.guards.add(guard)
                guard.add_done_callback(self.guards.discard)

    async def _still_answers(self, number: int) -> None:
        """Kills the process if what runs in it lets nothing else run."""
        answered = self.pongs[number] = asyncio.Event()
        self.send(ping=number)
        try:
            async with asyncio.timeout(GRACE):
                await answered.wait()
        except TimeoutError:
            self.blocked = f"was killed, because {self.kind} blocked it past its deadline"
            self.process.kill()
        finally:
            del self.pongs[number]

    async def _read(self) -> None:
        """Takes lines until the process ends; then what was under way has failed."""
        try:
            while line := await self.process.lines[0].readline():
                self._take(json.loads(line))
        except OSError:  # reset, as it died with something unread
            pass
        except ValueError as error:
            self.blocked = self.blocked or f"wrote what is no line of its protocol ({error}), and was killed"
        self.alive = False
        self.process.kill()
        await self.process.bury()
        why = f"its host process {self.blocked or self.process.epitaph()}"
        for episode in self.episodes.values():
            if not episode.outcome.done():
                episode.outcome.set_exception(RolloutError(why))

    def _take(self, message: dict[str, Any]) -> None:
        if "pong" in message:
            if answered := self.pongs.get(message["pong"]):
                answered.set()
            return
        number = next(
            (message[key] for key in ("chat", "address", "give_up", "done", "failed") if key in message), None
        )
        episode = self.episodes.get(number) if number is not None else None
        if episode is None or episode.outcome.done():
            return
        match message:
            case {"chat": _, "call": call}:
                episode.calls[call] = asyncio.ensure_future(self._serve(episode, call, self._chat(episode, message)))
            case {"address": _, "call": call}:
                episode.calls[call] = asyncio.ensure_future(self._serve(episode, call, self._address(episode)))
            case {"give_up": _, "call": call} if call in episode.calls:
                episode.calls[call].cancel()
            case {"done": _, "answer": answer, "signals": signals, "turn_rewards": worth}:
                told = None if worth is None else tuple(worth)
                episode.outcome.set_result(Outcome(answer=answer, signals=signals, turn_rewards=told))
            case {"failed": _, "error": error}:
                episode.outcome.set_exception(RolloutError(error))

    async def _serve(self, episode: Episode, call: int, answer: Awaitable[dict[str, Any]]) -> None:
        """One call of the model. What the environment is not to blame for ends its trajectory, as it would here."""
        try:
            self.send(answer=call, **await answer)
        except MODEL_FAILURES as error:
            if not episode.outcome.done():
                episode.outcome.set_exception(error)
        except (StrettoError, ValueError) as error:
            self.send(answer=call, kind=type(error).__name__, error=str(error))
        except Exception as error:
            self.send(answer=call, kind="RolloutError", error=f"{type(error).__name__}: {error}")
        finally:
            episode.calls.pop(call, None)

    async def _chat(self, episode: Episode, asked: dict[str, Any]) -> dict[str, Any]:
        """The model's reply."""
        messages = list[Message](asked["messages"])
        for place, said_in in enumerate(asked["replies"]):
            reply = episode.replies.get(said_in)
            if reply is not None and reply == messages[place]:  # the environment may have changed its copy
                messages[place] = reply
        wishes = {key: asked[key] for key in ("max_new_tokens", "tools", "stop")}
        reply = await episode.model.chat(messages, **wishes)
        episode.replies[asked["call"]] = reply
        calls = [asdict(each) for each in reply.tool_calls]
        told = {"text": reply.text, "tokens": list(reply.tokens), "stop": reply.stop, "turn": reply.turn}
        return {"tool_calls": calls, "words": reply.words, "apart": reply.apart, **told}

    async def _address(self, episode: Episode) -> dict[str, Any]:
        """Where programs reach the model."""
        address = await episode.model.address()
        return {"url": address.url, "key": address.key}

    async def end(self) -> None:
        """Kills it, and waits until it is gone."""
        self.alive = False
        self.process.kill()
        for task in (*self.guards, *([self.reading] if self.reading else [])):
            task.cancel()
        await self.process.bury()


class EnvironmentHosts:
    """Processes that run one environment; an environment itself."""

    def __init__(
        self, kind: str, *, number: int, folders: Sequence[str], start_deadline: float, turns: int = 8
    ) -> None:
        """`turns` is for a class of tools: most replies of the model."""
        self.kind, self.folders, self.start_deadline, self.turns = kind, folders, start_deadline, turns
        self.hosts: list[HostProcess | None] = [None] * number
        self.starting = [asyncio.Lock() for _ in range(number)]

    async def start(self) -> None:
        """All of them; an environment that cannot be imported is a RecipeError."""
        try:
            await asyncio.gather(*(self._host(place) for place in range(len(self.hosts))))
        except BaseException:
            await self.close()
            raise

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """One trajectory, in the process with the fewest."""
        place = min(range(len(self.hosts)), key=self._load)
        host = await self._host(place)
        return await host.run(prompt, model)

    def _load(self, place: int) -> int:
        host = self.hosts[place]
        return len(host.episodes) if host and host.alive else 0

    async def _host(self, place: int) -> HostProcess:
        """The process at a place, started anew if it has died."""
        async with self.starting[place]:
            host = self.hosts[place]
            if host is None or not host.alive:
                host = self.hosts[place] = HostProcess(self.kind, self.folders, self.turns)
                try:
                    await host.start(self.start_deadline)
                except BaseException:  # one that nobody reads would be asked before all others
                    await host.end()
                    raise
            return host

    async def close(self) -> None:
        """Leaves no process behind."""
        await asyncio.gather(*(host.end() for host in self.hosts if host))
