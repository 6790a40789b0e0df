"""vLLM behind the seam of an engine, from the side of whoever holds the policy. It imports no vLLM: `host` does.

A version is a name that one process never sees twice (`policy-v17`): the adapter is called so, every request is salted
with it, so that no prefix of older weights is found, and every answer says it. What vLLM multiplies with is read back
and compared with the policy: what was published after each publish, everything after a start or a sleep, and nothing is
generated before that. A process that dies is started again, gets the weights and the requests that were under way; a
third death in a row ends the run with its last lines.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError

from stretto.engines.base import Completion, Request
from stretto.engines.vllm.memory_folder import new_folder, no_room, remove_folder
from stretto.engines.vllm.process import EngineTransport
from stretto.engines.vllm.published import (
    adapted_names,
    adapter_tensors,
    base_tensors,
    differing,
    file_bytes,
    head_tensor,
    write_adapter,
    write_base,
)
from stretto.engines.vllm.request_rows import Row, WatchedAnswers, row_of
from stretto.engines.vllm.tensor_file import read_ranks, write_bucket
from stretto.errors import EngineDiedError, EngineError, RecipeError
from stretto.models.load import Policy
from stretto.types import Receipt, Weights
from stretto.weights.carrier import buckets
from stretto.weights.publish import refusal
from stretto.weights.tensors import checksums

MOST_DEATHS = 3
"""Deaths in a row, without an answer between them, that end a run."""

BUCKET = 512 * 2**20
"""Bytes that travel at once: the memory that a publish takes besides."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What vLLM is started with."""

    versions: tuple[str, ...]
    """Versions of it that are supported."""
    dtype: str
    """What it computes in."""
    context: int
    """Longest sequence."""
    cache_bytes: int
    """Memory for keys and values."""
    rank: int | None
    """Highest rank of an adapter; none for full fine-tuning."""
    device: str
    """cpu or cuda."""
    devices: int = 1
    """Devices that the model is cut over."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What else the recipe says to it (engine.arguments)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDeadlines:
    """Seconds that its process may take."""

    start: float
    """For loading."""
    generate: float
    """For a round of decoding."""
    publish: float
    """For taking in weights, or telling them."""
    first: float
    """For loading the first time, when what comes before it has taken of the start already."""


class VllmEngine:
    """Generates with a policy, in another process."""

    def __init__(
        self,
        policy: Policy,
        start: Callable[[], EngineTransport],
        *,
        name: str,
        settings: VllmSettings,
        deadlines: VllmDeadlines,
        share: Callable[[], float | None] = lambda: None,
        room: Path | None = None,
    ) -> None:
        """`start` starts a process, `name` is what messages call it, `share` says what part of its GPU's memory a
        process may ask for when it is started; files pass by way of `room`, by default a folder in memory."""
        self.policy, self.start, self.name, self.settings, self.patience = policy, start, name, settings, deadlines
        self.version = self.kv_tokens = 0
        # What the process is told the weights are called, all that it was ever told, and how often.
        self.called, self.names, self.publishes = "", set[str](), 0
        # Requests without an answer, those of them that the process knows, and what a publish has cut off.
        self.asked: dict[int, Request] = {}
        self.known: set[int] = set()
        self.watched = WatchedAnswers(policy.tokenizer, settings.context)
        self.cut: dict[int, Completion] = {}
        self.share, self.slept, self.deaths, self.lost = share, False, 0, 0.0
        # Whether what is not published is still to be compared.
        self.unproved = True
        self.size = file_bytes(policy, BUCKET)
        self.room = room or new_folder(self.size)
        self.process: EngineTransport | None = None
        try:
            self._begin(deadlines.first)
        except BaseException:
            self.close()
            raise

    # Answers ----------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests."""
        for request in requests:
            if len(request.tokens) >= self.settings.context:
                raise self.watched.no_room(request, self.settings.context)
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
        """Of parameters that were compared with what vLLM multiplies with, which is read back for this.

        A WeightsError where they differ, whether anybody has asked for them or not.
        """
        held = {**dict(self.policy.network.named_parameters()), **dict(self.policy.network.named_buffers())}
        frozen = not set(names) <= self.policy.trained().keys()
        self._surviving(lambda: self._compare(whole=self.unproved or frozen))
        return checksums((name, held[name]) for name in names)

    def _publish(self) -> None:
        """Sends the adapter, or all weights in flat buckets, under a name of their own."""
        self.publishes += 1
        name = f"policy-v{self.version}"
        self.called = f"{name}.{self.publishes}" if name in self.names else name
        self.names.add(self.called)
        if self.policy.adapted is not None:
            folder = self.room / "adapter"
            shutil.rmtree(folder, ignore_errors=True)
            self._written(lambda: write_adapter(self.policy, folder))
            told = {"name": self.called, "number": self.publishes, "folder": str(folder)}
            self._call("adapter", self.patience.publish, **told)
            return
        self._call("begin", self.patience.publish, name=self.called)
        path = self.room / "weights"
        for bucket in buckets(base_tensors(self.policy), BUCKET):
            table = self._written(partial(write_bucket, path, bucket))
            self._call("load", self.patience.publish, path=str(path), table=table)
        self._call("finish", self.patience.publish)
        path.unlink()

    def _compare(self, *, whole: bool) -> None:
        """Raises unless what the process multiplies with is what it was sent; `whole` for what never changes, too."""
        full = self.policy.adapted is None
        base = chain(base_tensors(self.policy), head_tensor(self.policy)) if full or whole else ()
        expected = chain(adapter_tensors(self.policy).items(), base)
        wrong, missing, compared = dict[str, str](), list[str](), 0
        path = self.room / "held"
        for bucket in buckets(expected, BUCKET):
            told = self._call("read", self.patience.publish, path=str(path), names=list(bucket))
            ranks = read_ranks(path, told["tables"])
            wrong |= differing(bucket, ranks)
            compared += len(bucket)
            missing += [name for name in bucket if any(name not in held for held in ranks)]
        if missing and not self.version:
            reason = f"vLLM stores this model's family under other names, and has no {', '.join(missing[:3])}"
            raise RecipeError.of("engine.kind", reason, "use engine.kind: native")
        if wrong:
            shown = "; ".join(f"{name} is {values}" for name, values in sorted(wrong.items())[:3])
            why = f"{len(wrong)} of {compared} tensors of {self.name} are not those of {self.called}: {shown}"
            raise refusal(self.version, why)
        self.unproved = self.unproved and not whole

    # Its process ------------------------------------------------------------------------------------------------------

    def sleep(self, keep: bool) -> None:
        """Gives the device's memory to others where nothing is under way; on a CPU vLLM keeps it."""
        if not self.asked and not self.slept:
            self._surviving(lambda: self._call("sleep", self.patience.publish))
            self.slept = True

    def wake(self) -> None:
        """Takes it again; weights that did not come back are seen before anything is generated."""
        if self.slept:
            self._surviving(lambda: self._call("wake", self.patience.publish))
            self.slept, self.unproved = False, True

    def close(self) -> None:
        """Leaves no process and no file behind."""
        if self.process is not None:
            self.process.close()
        remove_folder(self.room)

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

    def _begin(self, seconds: float) -> None:
        """Starts a process with the policy as it is, which may take so long to load."""
        if self.process is not None:
            self.process.close()
        self.known.clear()
        self.watched.forget()
        self.slept, self.unproved, self.publishes = False, True, 0
        self.names.clear()
        model = self.room / "model"
        shutil.rmtree(model, ignore_errors=True)
        self._written(lambda: write_base(self.policy, model, BUCKET))
        try:
            self.process = self.start()
            chosen = {"share": self.share(), "targets": adapted_names(self.policy), **asdict(self.settings)}
            told = self._call("start", seconds, model=str(model), **chosen)
        finally:
            shutil.rmtree(model, ignore_errors=True)
        self.kv_tokens = told["cache_tokens"]
        self._publish()

    def _written(self, write: Callable[[], T]) -> T:
        """What comes of writing files, for which there may be no room left."""
        try:
            return write()
        except (OSError, SafetensorError) as error:
            why = f"{self.name}: its weights cannot be written to {self.room}: {error}"
            raise EngineError(f"{why}\n    fix: {no_room(self.size)}") from error
