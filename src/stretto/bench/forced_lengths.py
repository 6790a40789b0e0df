"""A worker for benches: the lengths of its answers are told, or the answers themselves, and it shows its gradient.

Everything else is the worker of a training. What is told goes by the key of a request's noise, which names a prompt
and an attempt wherever they are generated, so that all plans have the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.bench.machine import PeakMemory
from stretto.bench.ours import endless
from stretto.engines.base import Completion, Request
from stretto.engines.native.engine import NativeEngine
from stretto.models.load import Policy
from stretto.models.logprob_head import accum_dtype
from stretto.recipe.schema import Recipe
from stretto.training.whitening import WhiteningTrainer
from stretto.workers.api import WorkerApi
from stretto.workers.models import make_trainer
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import WorkerSpec

Said = tuple[NDArray[np.int64], NDArray[np.float64]]
"""An answer: its tokens, and the engine's log-probability of each."""


class ForcedLengthsEngine(NativeEngine):
    """The native engine, in which answers have lengths that were told; what was said before is said again."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(endless(policy))
        self.lengths: dict[int, int] = {}
        self.said: dict[int, Said] = {}
        self.again: dict[int, Request] = {}

    def tell(self, lengths: Mapping[int, int], said: Mapping[int, Said]) -> None:
        """What holds from now on, by the keys of requests."""
        self.lengths, self.said = dict(lengths), dict(said)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues what is to be sampled; no token ends it before its length."""
        self.again |= {request.key: request for request in requests if request.key in self.said}
        sampled = [request for request in requests if request.key not in self.said]
        limits = [self.lengths[request.key] - request.begun for request in sampled]
        super().submit(
            [replace(each, max_new_tokens=limit, stop=frozenset()) for each, limit in zip(sampled, limits, strict=True)]
        )

    def step(self, budget_seconds: float) -> list[Completion]:
        """Says the shortest of what is said again: answers end in the order in which they would."""
        if not self.again:
            return super().step(budget_seconds)
        key = min(self.again, key=lambda key: (len(self.said[key][0]), key))
        return [self._repeated(self.again.pop(key))]

    def abort(self, keys: Sequence[int]) -> list[Completion]:
        """Takes requests out; what is said again has said nothing yet."""
        gone = [self.again.pop(key) for key in keys if key in self.again]
        none = [replace(self._repeated(each), tokens=np.zeros(0, np.int64), logprobs=np.zeros(0)) for each in gone]
        return super().abort(keys) + [replace(each, stop="abort") for each in none]

    def _repeated(self, request: Request) -> Completion:
        tokens, logprobs = self.said[request.key]
        rest = slice(request.begun, None)
        return Completion(
            key=request.key, tokens=tokens[rest], logprobs=logprobs[rest], stop="length", version=self.version
        )


class ForcedLengthsWorker(Worker):
    """The worker with that engine."""

    def __init__(self, assignment: WorkerSpec) -> None:
        self.memory = PeakMemory(assignment.torch_device.type)
        self.shows = False
        self.shown: dict[str, NDArray[np.floating[Any]]] = {}
        super().__init__(assignment, ForcedLengthsEngine)
        for model in self.held_models:
            self._watch(model)

    def tell(self, lengths: Mapping[int, int], said: Mapping[int, Said], shows: bool) -> None:
        """What holds from now on; `shows` keeps the gradients of updates."""
        assert isinstance(self.engine, ForcedLengthsEngine)
        self.engine.tell(lengths, said)
        self.shows = shows

    def follow(self, whitens: bool) -> None:
        """Trains from now on as a plan asks that whitens gradients, or one that whitens credit; the optimizer stays."""
        spec, before = self.assignment, self.trainer
        if isinstance(before, WhiteningTrainer) != whitens:
            before.close()
            how: dict[str, Any] = {"token_budget": spec.token_budget, "whitens": whitens}
            self.trainer = make_trainer(self.policy, spec.algorithm(), spec.recipe, self.optimizer, **how)
            self.trainer.make_room, self.trainer.version = before.make_room, before.version

    def _watch(self, model: str) -> None:
        """Lets a model's optimizer show what it is given."""
        optimizer = self.trained(model).optimizer
        if optimizer is None:
            return
        update = optimizer.step

        def shown(gradients: Mapping[str, Tensor]) -> float:
            if self.shows:
                self.shown[model] = _flat(self.trained(model).trained, gradients)
            return update(gradients)

        optimizer.step = shown  # type: ignore[method-assign]

    def gradient(self, model: str) -> NDArray[np.floating[Any]]:
        """Of a model's last update, one number after the other."""
        return self.shown[model]

    def gained(self) -> int:
        """Bytes that this process has come to need since it had loaded its modules."""
        return self.memory.gained()


class ForcedLengthsApi(WorkerApi, Protocol):
    """What can be asked of it besides."""

    async def tell(self, lengths: Mapping[int, int], said: Mapping[int, Said], shows: bool, /) -> None: ...
    async def about(self, recipe: Recipe, budget: int, /) -> None: ...
    async def follow(self, whitens: bool, /) -> None: ...
    async def gradient(self, model: str, /) -> NDArray[np.floating[Any]]: ...
    async def gained(self) -> int: ...


def told(worker: WorkerApi) -> ForcedLengthsApi:
    """Such a worker, as whoever calls it sees it."""
    return cast(ForcedLengthsApi, worker)


def _flat(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> NDArray[np.floating[Any]]:
    """The gradients of these weights, in their order; 0 of one that has none."""
    found = (gradients.get(name, torch.zeros_like(weight)) for name, weight in weights.items())
    return torch.cat([gradient.to(accum_dtype(gradient.dtype)).flatten() for gradient in found]).cpu().numpy()
