"""What can be asked of a worker, wherever it runs: one call after the other, each awaited.

`Worker` has methods of the same names and arguments, without `async`; `client` makes the typed end of one from whatever
carries a call to it (`WorkerTransport`): a thread's queue, or Ray. What is passed are records and files' names, never
tensors of a model. A model is named: the "policy", a "reference", a "critic", a "reward" model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from stretto.engines.base import Completion, Request
from stretto.training.trainer import StepReport
from stretto.types import Conversation, Receipt, Sample, TrainedLogprobs
from stretto.workers.process_group import Rendezvous
from stretto.workers.shared_folder import Listing, SavedFiles

POLICY, CRITIC = "policy", "critic"
"""The model that generates and is trained, and the one that foretells what comes of it."""

MODELS = {
    "train": POLICY,
    "reference": "reference",
    "value": CRITIC,
    "fit": CRITIC,
    "reward": "reward",
}
"""Role of a cell -> the model that it asks or trains."""

TRAINS = {POLICY: "train", CRITIC: "fit"}
"""Model -> the role of the cells that train it, which is also the kind of the group in which they add up."""

HOLDS = {POLICY: "hold", CRITIC: "hold-critic"}
"""Model -> the kind of the group of all that hold it."""

LANE = "lane"
"""What the kinds of groups begin with whose processes generate together."""

STATES = {POLICY: ("trainer", "optimizer"), CRITIC: ("critic", "critic_optimizer")}
"""Model -> what its trainer and its optimizer are called in a checkpoint."""


class WorkerTransport(Protocol):
    """Brings calls to one worker."""

    async def call(self, what: str, *arguments: Any) -> Any:
        """Calls a method of the worker; calls are served in order. `WorkerLost` if its process has died."""
        ...

    async def close(self) -> None:
        """Ends it."""
        ...


class WorkerApi(Protocol):
    """One worker; what each method does is said in `Worker`."""

    async def generate(
        self, new: Sequence[Request], unwanted: Sequence[int], seconds: float, /
    ) -> list[Completion]: ...
    async def score(self, model: str, conversations: Sequence[Conversation], /) -> list[NDArray[np.float64]]: ...
    async def begin(self, model: str, /) -> None: ...
    async def accumulate(self, model: str, samples: Sequence[Sample], /) -> TrainedLogprobs: ...
    async def try_row(self, model: str, samples: Sequence[Sample], tokens: int, again: bool, /) -> bool: ...
    async def limit(self, model: str, tokens: int, /) -> None: ...
    async def held(self, model: str, /) -> dict[str, float]: ...
    async def device_gb(self) -> float: ...
    async def try_update(self, model: str, /) -> None: ...
    async def loss_counters(self, model: str, /) -> dict[str, float]: ...
    async def reduce(self, model: str, sums: Mapping[str, float], /) -> None: ...
    async def apply(self, model: str, last: bool, /) -> StepReport: ...
    async def fetch(self, model: str, version: int, /) -> None: ...
    async def engine_weights(self, trainers: Sequence[str], whole: bool, alone: bool, /) -> Receipt: ...
    async def checksums(self, model: str, /) -> dict[str, str]: ...
    async def save(
        self, model: str, folder: Path, there: Listing, part: int, of: int, exports: bool, base: Path | None, /
    ) -> None: ...
    async def saved(self) -> SavedFiles | None: ...
    async def restore(self, folder: Path | None, there: Listing, /) -> bool: ...
    async def read(self, name: str, start: int, /) -> bytes: ...
    async def append(self, name: str, piece: bytes, /) -> None: ...
    async def clear(self) -> None: ...
    async def listen(self, toward: str, /) -> tuple[str, int]: ...
    async def unreachable(self, places: Mapping[str, tuple[str, int]], /) -> dict[str, str]: ...
    async def stop_listening(self) -> None: ...
    async def meet(self, kind: str, where: Rendezvous, /) -> None: ...
    async def model_limits(self) -> tuple[PreTrainedTokenizerBase, int, frozenset[int]]: ...
    async def kv_tokens(self) -> int: ...
    async def peak_memory(self) -> float: ...


class WorkerClient:
    """The caller's end: each method of `WorkerApi` is a call."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._call, method)


def client(call: Callable[..., Awaitable[Any]]) -> WorkerApi:
    """A worker, of whose calls each is made by `call(method, *arguments)`."""
    return cast(WorkerApi, WorkerClient(call))
