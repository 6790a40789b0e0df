"""Computes the contexts of requests that enter, into the cache: each once, whoever shares it.

A context that is a shared prefix is not computed again while anybody continues it: who comes later joins, and draws the
first token from the state that was kept with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.base import Request
from stretto.engines.native.admission import SameContext
from stretto.engines.native.batch import DecodeBatch, entering
from stretto.engines.native.cache import KeyValueCache
from stretto.engines.native.expert_notes import Choices, ExpertNotes
from stretto.models.attention import TreeLayout
from stretto.models.expert_choices import noting
from stretto.models.load import Policy
from stretto.training.packing import Tree, merge

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPrefix:
    """A context that is a shared prefix, for those that come later."""

    slot: int
    """Where."""
    state: Tensor
    """(W) the state of its last token."""
    experts: Choices | None = None
    """The experts that computed it, where they are noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePlaces:
    """Free places of a cache."""

    cache: KeyValueCache
    """The sequences' own, or the prefixes'."""
    first: int
    """The slots from here on are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWrites:
    """Which tokens of a row go into a cache, and where: tables made once, so that a layer is one copy for all slots."""

    cache: KeyValueCache
    """Where to."""
    sources: Tensor
    """(N) where in the row they stand."""
    slots: Tensor
    """(N) the slots they go to."""
    places: Tensor
    """(N) where there."""
    spots: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(K, capacity) -> (N*K) rows of the flattened cache that they take; made once for layers alike."""

    @classmethod
    def of(cls, cache: KeyValueCache, held: Mapping[int, Places], device: torch.device) -> CacheWrites:
        """From what each slot is to hold, as places in the row."""
        lengths = [len(sources) for sources in held.values()]
        tables = (
            np.concatenate(list(held.values())),
            np.repeat(list(held), lengths),
            np.concatenate([np.arange(length) for length in lengths]),
        )
        sources, slots, places = (torch.as_tensor(table, device=device) for table in tables)
        return cls(cache=cache, sources=sources, slots=slots, places=places)

    def take(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Copies what is kept of (1, K, T, D) keys and values."""
        keys, _ = self.cache.at(layer, key, value)
        rows = (each[0].transpose(0, 1).index_select(0, self.sources).flatten(0, 1) for each in (key, value))
        self.cache.put(layer, self._spots(key.shape[1], keys.shape[2]), *rows)

    def _spots(self, heads: int, capacity: int) -> Tensor:
        """Token after token, the places of its heads."""
        if (heads, capacity) not in self.spots:
            rows = self.slots[:, None] * heads + torch.arange(heads, device=self.slots.device)
            self.spots[heads, capacity] = (rows * capacity + self.places[:, None]).view(-1)
        return self.spots[heads, capacity]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLayout:
    """Attention of new contexts over themselves, which also fills their slots."""

    tree: TreeLayout
    """The contexts as a packed tree: what they share is computed once."""
    fills: Sequence[CacheWrites]
    """What is kept of it."""
    decodes: bool = False
    """Its queries look at each other alone."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, T, D) as `TreeLayout.attend`."""
        self.keep(layer, key, value)
        return self.look(layer, query, key, value, scale=scale, window=window)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Fills the slots."""
        for fill in self.fills:
            fill.take(layer, key, value)

    def look(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of these over each other."""
        return self.tree.attend(layer, query, key, value, scale=scale, window=window)


def prefill(
    policy: Policy,
    requests: Sequence[Request],
    groups: Mapping[bytes, SameContext],
    *,
    own: FreePlaces,
    prefixes: FreePlaces,
    known: Mapping[bytes, OpenPrefix],
    notes: ExpertNotes | None = None,
) -> tuple[DecodeBatch, dict[bytes, OpenPrefix]]:
    """Rows for requests, whose contexts are in the cache now, and all prefixes that there are: `known` and new ones.

    `notes` is told which experts computed each context.
    """
    contexts = [request.tokens.tobytes() for request in requests]
    new = [row for row, context in enumerate(contexts) if context not in known]
    slots = {context: prefix.slot for context, prefix in known.items()}
    states: dict[int, Tensor] = {}
    experts: dict[int, Choices | None] = dict.fromkeys(new)
    if new:
        tree = merge([requests[row].tokens for row in new])
        alone: dict[int, Places] = {}
        shared: dict[int, Places] = {}
        for row, places in zip(new, tree.places, strict=True):
            if not groups[contexts[row]].worth_sharing:
                alone[own.first + row] = places
            elif contexts[row] not in slots:
                slots[contexts[row]] = prefixes.first + len(shared)
                shared[slots[contexts[row]]] = places
        kept = ((own.cache, alone), (prefixes.cache, shared))
        fills = [CacheWrites.of(cache, places, policy.device) for cache, places in kept if places]
        with noting(policy.routing) as choices:
            states = dict(zip(new, _last_states(policy, tree, fills), strict=True))
            if choices is not None:
                table = choices.taken()
                experts |= {row: table[places] for row, places in zip(new, tree.places, strict=True)}
    first = [states[row] if row in states else known[context].state for row, context in enumerate(contexts)]
    chosen = [experts[row] if row in states else known[context].experts for row, context in enumerate(contexts)]
    opened = {
        context: OpenPrefix(slot=slots[context], state=state, experts=told)
        for context, state, told in zip(contexts, first, chosen, strict=True)
        if context in slots
    }
    for request, told in zip(requests, chosen, strict=True):
        if notes is not None and told is not None:
            notes.begin(request, told)
    rows = entering(requests, torch.stack(first), [slots.get(context, -1) for context in contexts])
    return rows, {**known, **opened}


def _last_states(policy: Policy, tree: Tree, fills: Sequence[CacheWrites]) -> Tensor:
    """(n, W) the states of each context's last token, of one forward that fills the caches."""
    device = policy.device
    hidden = policy.hidden(
        torch.as_tensor(tree.tokens, device=device),
        torch.as_tensor(tree.positions, device=device),
        PrefillLayout(tree=TreeLayout.of(tree.segments, device), fills=fills),
    )
    return hidden[torch.as_tensor(np.array([places[-1] for places in tree.places]), device=device)]
