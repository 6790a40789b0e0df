"""An engine whose weights are not the policy's own tensors, as every one is that runs in another process.

What it is asked for, what a publish cuts off, and what follows when whoever answers dies: the next one gets the
weights and the requests that were under way; a third death in a row ends the run with its last words. How it begins,
how weights get there, and how they are compared with the policy, is each kind's own business.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from stretto.engines.base import Completion, Request
from stretto.engines.request_rows import Row, WatchedAnswers, row_of
from stretto.errors import EngineDiedError, EngineError
from stretto.models.load import Policy
from stretto.types import Receipt, Weights
from stretto.weights.publish import refusal
from stretto.weights.tensors import checksums

MOST_DEATHS = 3
"""Deaths in a row, without an answer between them, that end a run."""

T = TypeVar("T")


class EngineTransport(Protocol):
    """Whom an engine of another process is asked through."""

    def call(self, what: str, seconds: float, /, **arguments: Any) -> dict[str, Any]:
        """The answer. EngineDiedError if the process has died, DeadlineError if it does not answer in time."""
        ...

    def close(self) -> None:
        """Ends the process and whatever it has started."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeadlines:
    """Seconds that whoever answers may take."""

    start: float
    """For loading."""
    generate: float
    """For a round of decoding."""
    publish: float
    """For taking in weights, or telling them."""
    first: float
    """For loading the first time, when what comes before it has taken of the start already."""


class ApartEngine(ABC):
    """Generates with a policy, elsewhere."""

    def __init__(
        self,
        policy: Policy,
        start: Callable[[], EngineTransport],
        *,
        name: str,
        context: int,
        deadlines: EngineDeadlines,
        watched: WatchedAnswers | None = None,
    ) -> None:
        """`start` gives whom it is asked through, `name` is what messages call it, `context` the longest sequence."""
        self.policy, self.start, self.name, self.patience = policy, start, name, deadlines
        self.context = context
        self.version = self.kv_tokens = 0
        # What it is told the weights are called, all that it was ever told, and how often.
        self.called, self.names, self.publishes = "", set[str](), 0
        # Requests without an answer, those of them that it knows, and what a publish has cut off.
        self.asked: dict[int, Request] = {}
        self.known: set[int] = set()
        self.watched = watched or WatchedAnswers(policy.tokenizer, context)
        self.cut: dict[int, Completion] = {}
        self.deaths, self.lost = 0, 0.0
        # Whether what is not published is still to be compared.
        self.unproved = True
        self.process: EngineTransport | None = None

    @abstractmethod
    def _begin(self, seconds: float) -> None:
        """Starts it, or waits for it, with the policy as it is, which may take so long."""

    @abstractmethod
    def _publish(self) -> None:
        """Sends the weights under a name of their own."""

    @abstractmethod
    def _compare(self, *, whole: bool) -> None:
        """Raises unless it computes with what it was sent; `whole` for what never changes, too."""

    # Answers ----------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests."""
        for request in requests:
            if len(request.tokens) >= self.context:
                raise self.watched.no_room(request, self.context)
        self.asked |= {request.key: request for request in requests}
        if requests:
            self._surviving(self._submit)

    def step(self, budget_seconds: float) -> list[Completion]:
        """Decodes until something completes or the budget is used. What a publish has cut off comes first."""
        if self.cut:
            cut, self.cut = self.cut, {}
            return list(cut.values())
        if not self.asked:
            return []
        if self.unproved:
            self._surviving(lambda: self._compare(whole=True))
        end = time.monotonic() + budget_seconds
        while True:
            left = max(0.0, end - time.monotonic())
            told = self._surviving(partial(self._call, "step", self.patience.generate, seconds=left))
            done = [self._completion(row) for row in told["done"]] + self._ended_by_texts(told["grown"])
            if done or not told["grown"] or time.monotonic() >= end:
                return done

    def abort(self, keys: Sequence[int]) -> list[Completion]:
        """Takes requests out and returns what they have so far."""
        cut = [self.cut.pop(key) for key in keys if key in self.cut]
        there = [key for key in dict.fromkeys(keys) if key in self.asked]
        if not there:
            return cut
        told = self._surviving(lambda: self._call("abort", self.patience.generate, keys=there))
        return cut + [self._completion(row) for row in told["done"]]

    def _ended_by_texts(self, grown: Sequence[Row]) -> list[Completion]:
        """Those of the answers that have grown which a text ends now; the process is told to leave them."""
        rows = [self.watched.grown(self.asked[told["key"]], told) for told in grown]
        ended = [self._completion(row) for row in rows if row is not None]
        if ended:
            left = [each.key for each in ended]
            self._surviving(lambda: self._call("abort", self.patience.generate, keys=left))
        return ended

    def _submit(self) -> None:
        """Tells the process what it does not know yet."""
        new = [request for key, request in self.asked.items() if key not in self.known]
        if new:
            self._call("submit", self.patience.generate, requests=[row_of(request) for request in new])
            self.known |= {request.key for request in new}

    def _completion(self, row: Row) -> Completion:
        """An answer, of which the process says with which weights it was sampled."""
        if row["version"] != self.called:
            told = f"{self.name} answered with weights {row['version']}, and {self.called} are what was published"
            raise refusal(self.version, told)
        row = self.watched.ended(self.asked.pop(row["key"]), row)
        self.known.discard(row["key"])
        if row["stop"] != "abort":
            self.deaths = 0
        return Completion(
            key=row["key"],
            tokens=np.array(row["tokens"], dtype=np.int64),
            logprobs=np.array(row["logprobs"], dtype=np.float64),
            stop=row["stop"],
            version=self.version,
        )

    # Weights ----------------------------------------------------------------------------------------------------------

    def receive(self, weights: Weights) -> Receipt:
        """Takes over the policy as it is now. What is under way ends before, as no answer is of two versions."""
        self.cut |= {completion.key: completion for completion in self.abort(list(self.asked))}
        self.version = weights.version
        try:
            self._publish()
        except EngineDiedError as died:  # the next process begins with these weights
            self._come_back(died)
        return self._receipt()

    def holds(self) -> Receipt:
        """The version by the name that the process itself knows, and what its deaths have cost since this was asked."""
        receipt = self._receipt()
        self.lost = 0.0
        return receipt

    def _receipt(self) -> Receipt:
        told = self._surviving(lambda: self._call("version", self.patience.publish))["version"]
        if told != self.called:
            raise refusal(self.version, f"{self.name} samples from weights {told}, {self.called} were published")
        return Receipt(version=self.version, manifest={}, shared=False, lost=self.lost)

    def checksums(self, names: Collection[str]) -> dict[str, str]:
        """Of parameters that were compared with what it multiplies with, which is read back for this.

        A WeightsError where they differ, whether anybody has asked for them or not.
        """
        held = {**dict(self.policy.network.named_parameters()), **dict(self.policy.network.named_buffers())}
        frozen = not set(names) <= self.policy.trained().keys()
        self._surviving(lambda: self._compare(whole=self.unproved or frozen))
        return checksums((name, held[name]) for name in names)

    # Whoever answers --------------------------------------------------------------------------------------------------

    def _call(self, what: str, seconds: float, /, **arguments: Any) -> dict[str, Any]:
        assert self.process is not None
        return self.process.call(what, seconds, **arguments)

    def _surviving(self, do: Callable[[], T]) -> T:
        """What comes of asking the process; if it dies at it, the next one is asked again."""
        while True:
            try:
                return do()
            except EngineDiedError as died:
                self._come_back(died)

    def _come_back(self, died: EngineDiedError) -> None:
        """Another process in place of one that died, as far as that one was."""
        since = time.monotonic()
        while True:
            self.deaths += 1
            if self.deaths >= MOST_DEATHS:
                why = f"{died}\n    it died {self.deaths} times in a row"
                raise EngineError(f"{why}\n    fix: see its log, for example for too little memory") from died
            try:
                self._begin(self.patience.start)
                self._compare(whole=True)
                self._submit()
                break
            except EngineDiedError as again:
                died = again
        self.lost += time.monotonic() - since
