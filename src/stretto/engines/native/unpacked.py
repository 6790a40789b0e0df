"""The engine for models that cannot be given packed rows: batches of contexts of one length, in the model's own cache.

Nothing is padded, because linear attention has no mask that could hide padding. So requests of equal context decode
together (a group always does), others wait for them. Noise is keyed as ever: in float32 a sample does not depend on
what shares its batch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from stretto.engines.base import Completion, Request
from stretto.engines.native.batch import entering
from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.engine import PREFILL_TOKENS, NativeEngine
from stretto.engines.native.truncation import Truncation
from stretto.models.load import Policy
from stretto.models.unpacked import continued
from stretto.types import StopReason


class UnpackedEngine(NativeEngine):
    """Generates with a `Policy` whose layers keep their own attention."""

    packs = False

    def __init__(
        self,
        policy: Policy,
        *,
        memory_share: float | str = "auto",
        slots: int | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        super().__init__(
            policy,
            memory_share=memory_share,
            slots=slots,
            speculate=False,
            steps=Steps(policy),
            truncation=truncation,
        )
        self.past: Any = None

    def sleep(self, keep: bool) -> None:
        """Gives the cache's memory back, unless something is decoded in it; the weights are the trainer's."""
        if not self.active:
            self.past = None

    def _admit(self) -> None:
        """Begins the next batch: of those that wait, as many as have a context as long as the first and find room.

        A context that several have is computed once.
        """
        if self.active or not self.waiting:
            return
        length, chosen, others = len(self.waiting[0].tokens), list[Request](), deque[Request]()
        contexts: dict[bytes, Request] = {}
        longest = 0
        for request in self.waiting:
            context, count = request.tokens.tobytes(), len(chosen) + 1
            size = count * (length + max(longest, request.max_new_tokens))
            new = (len(contexts | {context: request})) * length
            full = size > self.kv_tokens or count > (self.most_slots or count) or new > PREFILL_TOKENS
            if len(request.tokens) != length or (full and count > 1):
                others.append(request)
                continue
            chosen.append(request)
            contexts.setdefault(context, request)
            longest = max(longest, request.max_new_tokens)
        device, places = self.policy.device, {context: place for place, context in enumerate(contexts)}
        tokens = torch.stack([torch.as_tensor(first.tokens, device=device) for first in contexts.values()])
        states, self.past = continued(self.policy.network, tokens)
        rows = torch.tensor([places[request.tokens.tobytes()] for request in chosen], device=device)
        self.past.reorder_cache(rows)
        self.batch = entering(chosen, states[rows], [-1] * len(chosen))
        self.waiting, self.active = others, chosen

    def _decode(self, *, own: int, left: int) -> None:
        """One forward over the newest token of every active sequence."""
        if self.batch is not None:
            states, self.past = continued(self.policy.network, self.batch.newest[:, None], self.past)
            self.batch.hidden = states[:, None]

    def _retire(self, ended: dict[int, StopReason]) -> list[Completion]:
        """Takes ended sequences out of batch and cache."""
        if not ended or self.batch is None:
            return []
        done = self._completions(self.batch, ended)
        left = [row for row in range(len(self.active)) if row not in ended]
        self.active = [self.active[row] for row in left]
        if not left:
            self.batch = self.past = None
            return done
        rows = torch.tensor(left, device=self.policy.device)
        self.batch.take(rows)
        self.past.reorder_cache(rows)
        return done
