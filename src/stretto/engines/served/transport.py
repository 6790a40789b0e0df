"""A server that somebody else has started, asked over HTTP: answers, adapters, log-probabilities.

It stands where a process of this project's own stands (`vllm.process`), and takes the same questions; how they are put
to a kind of server says its `ServerApi`. Requests and answers are token ids; each has a connection of its own, which is
closed to call it off. The server is never stopped, and keeps no adapter that it was sent.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from queue import SimpleQueue
from typing import Any, NoReturn

from stretto.engines.served.http_calls import LOOK, HttpReply, read_reply, reason_of
from stretto.engines.served.server_api import MODELS, ServerApi
from stretto.errors import DeadlineError, EngineDiedError, EngineError

PAUSE = 0.5
"""Seconds between two looks whether a server is there again."""

MOST = 512
"""Requests that a server has at once from here; others wait."""


@dataclass(kw_only=True)
class ServedAnswer:
    """An answer as far as it is."""

    key: int
    """What the asker calls it."""
    version: str
    """The adapter that it is sampled with."""
    body: dict[str, Any]
    """What the server is asked."""
    watched: bool
    """Whether its tokens are told as they come, because a text may end it."""
    tokens: list[int] = field(default_factory=list)
    """Sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each."""
    told: int = 0
    """How many of them were told."""
    stop: str = ""
    """Why it ended."""
    gone: bool = False
    """Nobody waits for it any more."""
    line: socket.socket | None = None
    """Its connection."""

    def row(self, stop: str) -> dict[str, Any]:
        """All of it."""
        known = {"key": self.key, "version": self.version}
        return {**known, "tokens": list(self.tokens), "logprobs": list(self.logprobs), "stop": stop}

    def news(self) -> dict[str, Any]:
        """What was not told yet."""
        new, self.told = slice(self.told, None), len(self.tokens)
        return {"key": self.key, "version": self.version, "tokens": self.tokens[new], "logprobs": self.logprobs[new]}


class ServerTransport:
    """A server that answers an engine's questions."""

    def __init__(self, api: ServerApi) -> None:
        self.api, self.http = api, api.http
        self.model = ""
        # The adapter that requests are for, where the server has read it, and the one that it was told to load last.
        self.name, self.folder, self.sent = "", "", ""
        self.answers: dict[int, ServedAnswer] = {}
        self.failed: EngineError | None = None
        self.news = threading.Condition()
        self.waiting: SimpleQueue[ServedAnswer | None] = SimpleQueue()
        self.readers = 0
        self.questions: dict[str, Callable[..., dict[str, Any]]] = {
            "start": self.start, "submit": self.submit, "step": self.step, "abort": self.abort,
            "version": self.version, "adapter": self.adapter, "score": self.score,
        }  # fmt: skip

    def call(self, what: str, seconds: float, /, **arguments: Any) -> dict[str, Any]:
        """The answer to a question, which must come in time."""
        try:
            told: dict[str, Any] = self.questions[what](seconds, **arguments)
        except TimeoutError:
            why = f"{self.http.url}: {what} has not answered for {seconds:.0f} s"
            raise DeadlineError(f"{why}\n    fix: see the server's log, or raise deadlines.publish") from None
        except (OSError, HTTPException) as error:
            raise EngineDiedError(f"{self.http.url} does not answer: {reason_of(error)}") from error
        except (LookupError, TypeError, ValueError) as error:  # such as a gateway's, which leaves fields out
            why = f"{self.http.url} does not answer {what} as {self.api.kind} does ({reason_of(error)})"
            fix = "name the server itself in engine.url, not what stands before it"
            raise EngineError(f"{why}\n    fix: {fix}") from error
        return told

    def start(self, patience: float, /) -> dict[str, Any]:
        """Waits for a server that is started again, and asks what it serves."""
        end = time.monotonic() + patience
        while True:
            with suppress(OSError, HTTPException):
                if self.http.ask("/health", seconds=min(LOOK, patience)).status == 200:
                    break
            if time.monotonic() + PAUSE > end:
                why = f"start: {self.http.url} is not there any more, and did not come back for {patience:.0f} s"
                fix = "start it again, and stretto resume goes on from the newest checkpoint; or raise deadlines.start"
                raise DeadlineError(f"{why}\n    fix: {fix}")
            time.sleep(PAUSE)
        self.model = self.api.facts().name
        return {}

    # Answers ----------------------------------------------------------------------------------------------------------

    def submit(self, patience: float, /, *, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Takes requests in."""
        for asked in requests:
            body = self.api.question(asked, adapter=self.name)
            answer = ServedAnswer(key=asked["key"], version=self.name, body=body, watched=asked["watched"])
            self.answers[answer.key] = answer
            self.waiting.put(answer)
            if self.readers < min(MOST, len(self.answers)):
                self.readers += 1
                threading.Thread(target=self._serve, name="served-answers", daemon=True).start()
        return {}

    def step(self, patience: float, /, *, seconds: float) -> dict[str, Any]:
        """Waits until something ends, an answer that is watched grows, or the time is over."""
        with self.news:
            self.news.wait_for(self._has_news, seconds)
            self._refuse_failed()
            done = [answer for answer in self.answers.values() if answer.stop]
            grown = [answer for answer in self.answers.values() if _new(answer) and not answer.stop]
            for answer in done:
                del self.answers[answer.key]
            return {"done": [answer.row(answer.stop) for answer in done], "grown": [each.news() for each in grown]}

    def abort(self, patience: float, /, *, keys: Sequence[int]) -> dict[str, Any]:
        """Takes requests out, with what they have so far."""
        with self.news:
            self._refuse_failed()
            left = [self.answers.pop(key) for key in keys if key in self.answers]
            for answer in left:
                _hang_up(answer)
            return {"done": [answer.row(answer.stop or "abort") for answer in left]}

    def _serve(self) -> None:
        """One answer after the other; in a thread of its own."""
        while (answer := self.waiting.get()) is not None:
            self._read(answer)

    def _read(self, answer: ServedAnswer) -> None:
        """An answer, from its first token to its last."""
        if answer.gone:
            return
        try:
            with closing(self.http.opened(None)) as connection:
                if self._is_wanted(answer, connection.sock):
                    with self.http.sent(connection, self.api.generate, answer.body) as response:
                        self._take(answer, response)
        except EngineError as error:
            self._fail(answer, error)
        except Exception as error:  # whatever it is, somebody waits for the answer
            self._fail(answer, EngineDiedError(f"{self.http.url} has ended an answer early: {reason_of(error)}"))

    def _is_wanted(self, answer: ServedAnswer, line: socket.socket) -> bool:
        """Whether somebody waits for an answer that now has a connection."""
        with self.news:
            answer.line = line
            return not answer.gone

    def _take(self, answer: ServedAnswer, response: HTTPResponse) -> None:
        """Its tokens, as they come."""
        if response.status != 200:
            self._refused(answer, read_reply(response.status, response.read().decode(errors="replace")))
        for line in response:
            said = line.removeprefix(b"data:").strip()
            if not said or said == b"[DONE]":
                continue
            told = json.loads(said)
            if "error" in told:
                self._refused(answer, HttpReply(response.status, told))
            for piece in self.api.pieces(told, answer.body, len(answer.tokens)):
                if piece.ended not in (None, "stop", "length"):
                    why = f"{self.http.url} has ended an answer ({piece.ended})"
                    raise EngineError(f"{why}\n    fix: see the server's log")
                if len(piece.tokens) != len(piece.logprobs):
                    raise EngineError(f"{self.http.url} has said a token without its log-probability")
                with self.news:
                    answer.tokens += piece.tokens
                    answer.logprobs += piece.logprobs
                    answer.stop = piece.ended or ""
                    self.news.notify_all()
        if not answer.stop:
            raise ConnectionError("it says no reason")

    def _refused(self, answer: ServedAnswer, reply: HttpReply) -> NoReturn:
        """Raises what a server that does not answer means."""
        if self.api.lacks_adapter(reply):  # such as one that was restarted
            raise EngineDiedError(f"{self.http.url} has no {answer.version} any more: {reply.words}")
        raise EngineError(f"{self.http.url} refuses a request: {reply.words}\n    fix: see the server's log")

    def _has_news(self) -> bool:
        return self.failed is not None or not self.answers or any(map(_new, self.answers.values()))

    def _fail(self, answer: ServedAnswer, error: EngineError) -> None:
        with self.news:
            if not answer.gone:
                self.failed = self.failed or error
                self.news.notify_all()

    def _refuse_failed(self) -> None:
        if self.failed is not None:
            raise self.failed

    # Adapters ---------------------------------------------------------------------------------------------------------

    def adapter(self, patience: float, /, *, name: str, folder: str) -> dict[str, Any]:
        """Loads an adapter under a name that the server never had; the one before is forgotten."""
        self.sent = name
        told = self.http.ask(self.api.load, {"lora_name": name, "lora_path": folder}, seconds=patience)
        if told.status != 200:
            raise self.api.not_loaded(told, folder)
        before, self.name, self.folder = self.name, name, folder
        self._unload(before)
        return {}

    def version(self, patience: float, /) -> dict[str, Any]:
        """Under which name the server has the adapter that was sent last, by its own word."""
        cards = self.http.ask(MODELS, seconds=patience).cards
        found = next((card for card in cards if card["id"] == self.name), None)
        if found is None:  # such as one that was restarted
            raise EngineDiedError(f"{self.http.url} has no {self.name} any more")
        root = found.get("root")
        return {"version": self.name if root == self.folder else f"{self.name} of {root}"}

    def score(
        self, patience: float, /, *, tokens: Sequence[int], adapted: bool, more: int, temperature: float
    ) -> dict[str, Any]:
        """Log-probabilities of tokens from the second on, and so many more tokens with theirs at a temperature."""
        adapter = self.name if adapted else ""
        body = self.api.probe(tokens, model=self.model, adapter=adapter, more=more, temperature=temperature)
        told = self.http.ask(self.api.generate, body, seconds=patience)
        if told.status != 200:
            raise EngineError(f"{self.http.url} scores nothing: {told.words}\n    fix: see the server's log")
        return self.api.scored(told.told, tokens)._asdict()

    def close(self) -> None:
        """Calls off what is under way, and leaves the server without an adapter of ours, even if it was too late to
        say that it has one."""
        with self.news:
            for answer in self.answers.values():
                _hang_up(answer)
            self.answers.clear()
        for _ in range(self.readers):
            self.waiting.put(None)
        for name in {self.name, self.sent}:
            self._unload(name)

    def _unload(self, name: str) -> None:
        """Lets the server forget an adapter; where that fails, nobody asks for it any more all the same."""
        if name:
            with suppress(OSError, HTTPException):
                self.http.ask(self.api.unload, {"lora_name": name}, seconds=LOOK)


def _new(answer: ServedAnswer) -> bool:
    """Whether there is something to tell."""
    return bool(answer.stop) or (answer.watched and len(answer.tokens) > answer.told)


def _hang_up(answer: ServedAnswer) -> None:
    """Ends an answer's connection, by which the server ends the answer; whoever reads from it wakes up."""
    answer.gone = True
    if answer.line is not None:
        with suppress(OSError):
            answer.line.shutdown(socket.SHUT_RDWR)
