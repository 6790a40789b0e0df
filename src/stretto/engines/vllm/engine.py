"""vLLM behind the seam of an engine, from the side of whoever holds the policy. It imports no vLLM: `host` does.

A version is a name that one process never sees twice (`policy-v17`): the adapter is called so, every request is salted
with it, so that no prefix of older weights is found, and every answer says it. What vLLM multiplies with is read back
and compared with the policy: what was published after each publish, everything after a start or a sleep, and nothing is
generated before that. A process that dies is started again, gets the weights and the requests that were under way; a
third death in a row ends the run with its last lines.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from safetensors import SafetensorError

from stretto.engines.apart import ApartEngine, EngineDeadlines, EngineTransport
from stretto.engines.vllm.memory_folder import new_folder, no_room, remove_folder
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
from stretto.engines.vllm.tensor_file import read_ranks, write_bucket
from stretto.errors import EngineError, RecipeError
from stretto.models.load import Policy
from stretto.models.memory import give_back_gpu
from stretto.weights.carrier import buckets
from stretto.weights.publish import refusal

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


class VllmEngine(ApartEngine):
    """Generates with a policy, in a process of vLLM."""

    def __init__(
        self,
        policy: Policy,
        start: Callable[[], EngineTransport],
        *,
        name: str,
        settings: VllmSettings,
        deadlines: EngineDeadlines,
        share: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`start` starts a process, `share` says what part of its GPU's memory a process may ask for when it is
        started; files pass by way of a folder in memory."""
        super().__init__(policy, start, name=name, context=settings.context, deadlines=deadlines)
        self.settings, self.share, self.slept = settings, share, False
        self.size = file_bytes(policy, BUCKET)
        self.room = new_folder(self.size)
        try:
            self._begin(deadlines.first)
        except BaseException:
            self.close()
            raise

    # Weights ----------------------------------------------------------------------------------------------------------

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
            give_back_gpu()
            self._surviving(lambda: self._call("wake", self.patience.publish))
            self.slept, self.unproved = False, True

    def close(self) -> None:
        """Leaves no process and no file behind."""
        if self.process is not None:
            self.process.close()
        remove_folder(self.room)

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
            told = self._call("start", seconds, model=str(model), folder=str(self.room), **chosen)
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
