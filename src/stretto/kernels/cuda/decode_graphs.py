"""Decode steps on a GPU, recorded once per size as CUDA graphs and then replayed.

A decode step of a small model is some thousand kernels of microseconds each, and starting them one by one takes longer
than they do. A graph starts them all at once, but it is a recording: of sizes, of addresses, of no decisions. So

- sizes are rounded up: sequences, tokens of cache, members of prefixes. The layout is the one of `layout.py`, which
  masks by lengths anyway; the sequences that fill up live in slots of the cache that nobody uses;
- the caches keep their memory from round to round. Where one must grow, or memory was given back, all recordings are
  forgotten, as they are when weights moved to other addresses (updates are made in place, so they stay where they are);
- a size is recorded when it is first met, compared with what is computed, and replayed from then on.

Not recorded: prefills, whose sizes hardly ever repeat, and models with experts, which may ask the host whom to call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.nn.functional import pad

from stretto.engines.native.admission import GRAIN, rounded
from stretto.engines.native.batch import DecodeBatch
from stretto.engines.native.cache import KeyValueCache, SharedPrefixes
from stretto.engines.native.decode_backend import Steps, newest, places
from stretto.engines.native.layout import DecodeLayout
from stretto.engines.native.sampling import draw_from
from stretto.kernels.cpu.packed_linear import PackedSteps, packs
from stretto.kernels.cuda.graph_cache import Graph, Outputs, Recordings, Tape
from stretto.models.load import Policy
from stretto.models.plausible import EXPERT_KEYS


def steps_for(policy: Policy, most: int, *, graphs: bool = False) -> Steps:
    """How to compute decode steps where the policy lives, with `graphs` recorded if that is a GPU; caches of more than
    `most` tokens are not kept larger than needed."""
    config = policy.network.config.get_text_config()
    if packs(policy):
        return PackedSteps(policy)
    if not graphs or policy.device.type != "cuda" or any(getattr(config, name, None) for name in EXPERT_KEYS):
        return Steps(policy)
    return RecordedSteps(policy, most=most, tape=Graph)


class LastingCache(KeyValueCache):
    """A cache whose memory stays where it is from round to round; `generation` counts when it did not."""

    beside: LastingCache | None = None
    """The other cache under the same bound; what it holds and does not use is given back before both exceed it."""

    def __init__(self, most: int, latent: int = 0) -> None:
        super().__init__(latent)
        self.most = most
        self.held = (0, 0)
        self.generation = 0

    @property
    def taken(self) -> tuple[int, int]:
        """What is held."""
        return self.held

    def shape_with(self, *, slots: int, tokens: int) -> tuple[int, int]:
        """As of any cache, with slots for the sequences that fill a recorded step up."""
        return super().shape_with(slots=rounded(slots), tokens=tokens)

    def reserve(self, *, slots: int, tokens: int) -> None:
        """Makes room within what is held, or holds more."""
        live, shape = (self.slots, self.capacity), self.shape_with(slots=slots, tokens=tokens)
        self.slots, self.capacity = shape
        if shape[0] <= self.held[0] and shape[1] <= self.held[1]:
            return
        both = max(shape[0], self.held[0]), max(shape[1], self.held[1])
        self.held = both if math.prod(both) <= self.most else shape
        if self.beside is not None and not self._fits():
            self.beside.shrink()
        if not self._fits():
            self.held = shape
        self._moved(live)

    def shrink(self) -> None:
        """Gives back what is held beyond what is in use."""
        live = (self.slots, self.capacity)
        if self.held != live:
            self.held = live
            self._moved(live)

    def _fits(self) -> bool:
        """True if both caches together keep to their bound."""
        beside = 0 if self.beside is None else math.prod(self.beside.held)
        return math.prod(self.held) + beside <= self.most

    def _moved(self, live: tuple[int, int]) -> None:
        """Takes memory of the size that is held now, with what stands in the old."""
        self.generation += 1
        for states in (self.keys, self.values):
            if 0 in live:  # before what takes its place is there
                states.clear()
            for layer, old in states.items():
                states[layer] = self._room(old.shape[1], old.shape[3], old)
                states[layer][: live[0], :, : live[1]] = old[: live[0], :, : live[1]]

    def clear(self) -> None:
        """Forgets what is in it. Zeros, because what a mask hides is still multiplied by 0, and must be finite."""
        self.slots = self.capacity = 0
        for states in (self.keys, self.values):
            for layer in states.values():
                layer.zero_()

    def release(self) -> None:
        """Gives the memory back."""
        super().clear()
        self.held = (0, 0)
        self.generation += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """What a recorded forward is made for."""

    rows: int
    """Sequences."""
    width: int
    """New tokens of each."""
    longest: int
    """Tokens of a slot that are looked at."""
    prefix: int
    """Tokens of a shared prefix that are looked at; 0 without prefixes."""
    prefixes: int
    """How many there are."""
    members: int
    """Sequences of each."""


class RecordedSteps(Steps):
    """Computes steps of rounded sizes, from recordings where it has them; without a tape, all as they come."""

    def __init__(self, policy: Policy, *, most: int, tape: type[Tape] | None) -> None:
        super().__init__(policy)
        latent = self.cache.latent
        self.own, self.common = LastingCache(most, latent), LastingCache(most, latent)
        self.own.beside, self.common.beside = self.common, self.own
        self.cache, self.prefixes = self.own, self.common
        self.recordings = Recordings(tape)
        self.members = 0
        self.given: SharedPrefixes | None = None
        self.filled: SharedPrefixes | None = None
        self.addresses = self._addresses()
        self.adapters = [module for module in policy.network.modules() if isinstance(module, BaseTunerLayer)]

    def draw(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """As `Steps`; rows that fill up draw from zeros, and what they draw is dropped."""
        (n, width), head = batch.hidden.shape[:2], self.policy.head()
        rows = rounded(n)

        def compute(hidden: Tensor, keys: Tensor, first: Tensor, temperatures: Tensor, *bias: Tensor) -> Outputs:
            return draw_from(
                hidden.flatten(0, 1),
                replace(head, bias=bias[0] if bias else None),
                keys=keys.repeat_interleave(width),
                positions=places(first, width),
                temperatures=temperatures.repeat_interleave(width),
            )

        columns = (filled(column, rows) for column in (batch.hidden, batch.keys, batch.positions, batch.temperatures))
        # The bias goes in with them: not every policy has it at the same address each time.
        inputs = [*columns, *([] if head.bias is None else [head.bias])]
        self._check()
        tokens, logprobs = self.recordings.run(("draw", rows, width), compute, inputs)
        return tokens.view(rows, width)[:n], logprobs.view(rows, width)[:n]

    def forward(self, batch: DecodeBatch, shared: SharedPrefixes | None, own: int) -> Tensor:
        """As `Steps`; rows that fill up write the first place of a slot that nobody uses."""
        n, width = len(batch.newest), batch.drafts.shape[1] + 1
        prefixes = self._filled(shared, rounded(n))
        sizes = GraphSizes(
            rows=rounded(n),
            width=width,
            longest=min(rounded(own + width, GRAIN), self.own.capacity),
            prefix=prefixes.longest if prefixes else 0,
            prefixes=len(prefixes.members) if prefixes else 0,
            members=prefixes.members.shape[1] if prefixes else 0,
        )

        def compute(tokens: Tensor, lengths: Tensor, bases: Tensor, *tables: Tensor) -> Outputs:
            layout = DecodeLayout(
                lengths=lengths,
                bases=bases,
                width=width,
                longest=sizes.longest,
                cache=self.cache,
                prefixes=replace_tables(prefixes, tables) if prefixes else None,
            )
            return (self.policy.hidden(tokens.flatten(), places(lengths, width), layout),)

        columns = [filled(column, sizes.rows) for column in (newest(batch), batch.lengths, batch.bases)]
        self._check()
        (hidden,) = self.recordings.run(sizes, compute, [*columns, *(tables_of(prefixes) if prefixes else ())])
        return hidden.view(sizes.rows, width, -1)[:n]

    def weights_changed(self) -> None:
        """Updates leave weights where they are; whoever moves them makes every recording worthless."""
        self.addresses = self._addresses()

    def rest(self) -> None:
        """The next batch's sizes follow from that batch alone, or a resumed run would round otherwise."""
        self.members = 0
        self.recordings.rest()

    def release(self) -> None:
        """Gives all memory back, that of the recordings too."""
        self.own.release()
        self.common.release()
        self.recordings.forget()
        self.given = self.filled = None

    def _check(self) -> None:
        """Recordings hold addresses, of both caches and of all weights, and what adapters did."""
        switched = tuple(adapter.disable_adapters for adapter in self.adapters)
        self.recordings.valid_for((self.own.generation, self.common.generation, self.addresses, switched))

    def _addresses(self) -> int:
        return hash(tuple(weight.data_ptr() for weight in self.policy.network.parameters()))

    def _filled(self, shared: SharedPrefixes | None, rows: int) -> SharedPrefixes | None:
        """The prefixes with their tables filled up, made anew when the batch changed.

        Places for members do not become fewer within a batch: groups end one member at a time, and each number would
        be a size.
        """
        if shared is None:
            return None
        if shared is not self.given or self.filled is None:
            count, most = shared.members.shape
            self.members = max(self.members, rounded(most))
            self.filled = SharedPrefixes(
                cache=shared.cache,
                longest=min(rounded(shared.longest, GRAIN), self.common.capacity),
                members=pad(shared.members, (0, self.members - most, 0, rounded(count) - count)),
                index=filled(shared.index // most * self.members + shared.index % most, rows),
                shares=filled(shared.shares, rows),
            )
            self.given = shared
        return self.filled


def filled(column: Tensor, rows: int) -> Tensor:
    """A column with zeros up to so many rows."""
    return pad(column, (0, 0) * (column.dim() - 1) + (0, rows - len(column)))


def tables_of(prefixes: SharedPrefixes) -> tuple[Tensor, ...]:
    """What of prefixes differs between batches of equal sizes."""
    return prefixes.members, prefixes.index, prefixes.shares


def replace_tables(prefixes: SharedPrefixes, tables: Sequence[Tensor]) -> SharedPrefixes:
    """Trunks of the same sizes with other tables."""
    members, index, shares = tables
    return replace(prefixes, members=members, index=index, shares=shares)
