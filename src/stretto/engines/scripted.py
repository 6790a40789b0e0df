"""An engine that answers from a script: for tests, docs and dry runs, behind the same seam as the real ones.

The script is a function from a request to the tokens of its answer, so a test decides what "the model" says without
patching anything. It completes requests in the order in which they were submitted, one a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np

from stretto.engines.base import Completion, Request
from stretto.types import Receipt, StopReason, Weights

Script = Callable[[Request], Sequence[int]]
"""Request -> the tokens of its answer; cut at the first stop token and at the request's limit."""


class ScriptedEngine:
    """Replays a script."""

    def __init__(self, script: Script, *, logprob: float = -1.0) -> None:
        self.script = script
        self.logprob = logprob
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.kv_tokens = 1 << 30

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests."""
        self.waiting.extend(requests)

    def step(self, budget_seconds: float) -> list[Completion]:
        """Completes the oldest request."""
        if not self.waiting:
            return []
        request = self.waiting.popleft()
        answer = list(self.script(request))[: request.max_new_tokens]
        ends = [place for place, token in enumerate(answer) if token in request.stop]
        stop: StopReason = "stop" if ends else "length"
        return [self._completion(request, answer[: ends[0] + 1] if ends else answer, stop)]

    def abort(self, keys: Sequence[int]) -> list[Completion]:
        """Takes requests out of the queue."""
        gone = [request for request in self.waiting if request.key in set(keys)]
        self.waiting = deque(request for request in self.waiting if request.key not in set(keys))
        return [self._completion(request, [], "abort") for request in gone]

    def receive(self, weights: Weights) -> Receipt:
        """Takes note of the version; it holds no weights."""
        self.version = weights.version
        return self.holds()

    def holds(self) -> Receipt:
        """The version it was told last."""
        return Receipt(version=self.version, manifest={}, shared=True)

    def checksums(self, names: Collection[str]) -> None:
        """None: a script multiplies nothing."""

    def sleep(self, keep: bool) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing to undo."""

    def close(self) -> None:
        """Forgets what waits."""
        self.waiting.clear()

    def _completion(self, request: Request, tokens: Sequence[int], stop: StopReason) -> Completion:
        return Completion(
            key=request.key,
            tokens=np.array(tokens, dtype=np.int64),
            logprobs=np.full(len(tokens), self.logprob),
            stop=stop,
            version=self.version,
        )
