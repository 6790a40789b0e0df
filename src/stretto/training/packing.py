"""Samples -> micro-batches: rows without padding, in which what conversations share is computed once.

A micro-batch is one row of tokens laid out as a tree of segments: the prompt of a group stands once, and every answer
continues it. Which samples share a row, and in which order, changes neither a loss nor a gradient beyond rounding,
because each token still sees exactly its own conversation. The only size anybody sets is the token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.algorithms.base import TokenStreams
from stretto.models.attention import TreeLayout
from stretto.models.logprob_head import row_padding
from stretto.models.reading import Reads, before_trained
from stretto.models.segments import Segment
from stretto.types import ANY_EXPERT, Sample

Tokens = NDArray[np.int64]

ROW_COST = 128
"""What a row costs beside its tokens, in tokens: adding up the gradients of all weights once more."""

WIDTH = np.dtype(np.int64).itemsize
"""Bytes of a token."""

WORTH_SHARING = 16
"""Fewest tokens that sharing a prefix must save; below, a segment of its own costs more in kernel calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Token sequences merged where they begin alike."""

    tokens: Tokens
    """The row."""
    positions: Tokens
    """Position of each token in its own sequence."""
    segments: tuple[Segment, ...]
    """The segments of the tree, each with the one that it continues."""
    places: tuple[Tokens, ...]
    """Per sequence, in the order given: where each of its tokens stands in the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row and the streams of its trained tokens."""

    samples: tuple[Sample, ...]
    """What was packed."""
    tokens: torch.Tensor
    """(T) token ids."""
    positions: torch.Tensor
    """(T) positions within each conversation."""
    layout: TreeLayout
    """Segments and their parents."""
    sources: torch.Tensor
    """(N) where in the row the hidden state stands at which the model is read for each trained token."""
    targets: torch.Tensor
    """(N) the trained tokens."""
    kept: torch.Tensor | None
    """(N, K) the ids that they were drawn from, filled up with -1; none where that is the whole vocabulary."""
    rows: TokenStreams
    """(N) their streams."""
    experts: torch.Tensor | None
    """(T, routers, K) the experts that are to compute the row, -1 where it may be any; none where all may be."""
    shared: int
    """Tokens that need not be computed again, because several conversations have them in common."""


def shared_prefix(first: Tokens, second: Tokens) -> int:
    """How many leading tokens are equal."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def merge(sequences: Sequence[Tokens]) -> Tree:
    """Merges sequences (none empty) into a tree, depth first, in the order of their first appearance."""
    row: list[Tokens] = []
    positions: list[Tokens] = []
    segments: list[Segment] = []
    encoded = [np.asarray(sequence, dtype=np.int64).tobytes() for sequence in sequences]
    places: list[list[Tokens]] = [[] for _ in sequences]
    end = 0

    def place(members: list[int], depth: int, ancestors: tuple[int, ...]) -> None:
        nonlocal end
        for branch, length in branches(members, depth):
            here = len(segments)
            segments.append(Segment(start=end, length=length - depth, ancestors=ancestors))
            row.append(sequences[branch[0]][depth:length])
            positions.append(np.arange(depth, length))
            for member in branch:
                places[member].append(np.arange(end, end + length - depth))
            end += length - depth
            place([member for member in branch if len(sequences[member]) > length], length, (*ancestors, here))

    def branches(members: list[int], depth: int, reach: int = 1) -> list[tuple[list[int], int]]:
        """Members by how they go on, each with how far: together where that saves enough, else apart where they first
        differ."""
        groups: dict[bytes, list[int]] = {}
        for member in members:
            groups.setdefault(encoded[member][depth * WIDTH : (depth + reach) * WIDTH], []).append(member)
        found: list[tuple[list[int], int]] = []
        for group in groups.values():
            length = common_length([encoded[member] for member in group])
            if len(group) == 1 or (length - depth) * (len(group) - 1) >= WORTH_SHARING:
                found.append((group, length))
            elif length - depth < reach:  # they end here, all alike, and are too short to bother
                found += [([member], len(sequences[member])) for member in group]
            else:
                found += branches(group, depth, length - depth + 1)
        return found

    place(list(range(len(sequences))), 0, ())
    return Tree(
        tokens=np.concatenate(row),
        positions=np.concatenate(positions),
        segments=tuple(segments),
        places=tuple(np.concatenate(parts) for parts in places),
    )


def filled(tree: Tree) -> Tree:
    """The tree with some tokens of no conversation, which see only each other, where a longer row takes less time."""
    end, spare = len(tree.tokens), row_padding(len(tree.tokens))
    if not spare:
        return tree
    return replace(
        tree,
        tokens=np.append(tree.tokens, np.full(spare, tree.tokens[0])),
        positions=np.append(tree.positions, np.arange(spare)),
        segments=(*tree.segments, Segment(start=end, length=spare, ancestors=())),
    )


def common_length(encoded: Sequence[bytes]) -> int:
    """How many leading tokens all sequences share, by their bytes: as many as the first and the last of them in order,
    between which the others stand."""
    first, last = (np.frombuffer(each, dtype=np.int64) for each in (min(encoded), max(encoded)))
    return shared_prefix(first, last)


def divide(
    samples: Sequence[Sample], budget: int, *, share: bool = True, whole: bool = False
) -> list[tuple[Sample, ...]]:
    """Cuts samples, in their order, into rows of at most `budget` tokens; a conversation is never cut.

    With `whole`, the conversations of a trajectory, which stand side by side, stay in one row.

    With `share`, a token that a conversation shares with the one before it in the row is not counted again, which is
    what `merge` saves when the answers of a group stand side by side. A full row is cut where that costs least: inside
    a group its prompt must be computed once more, before it the row stays shorter. Where `merge` saves less than was
    counted on, the row is cut once more.
    """
    rows: list[tuple[Sample, ...]] = []
    row: list[Sample] = []
    shared: list[int] = []  # with the conversation before
    size = 0
    for sample in samples:
        tokens = sample.conversation.tokens
        shared.append(shared_prefix(row[-1].conversation.tokens, tokens) if row and share else 0)
        row.append(sample)
        size += len(tokens) - shared[-1]
        while size > budget and (places := cuts(row, whole=whole)):
            place = _cheapest_cut(row, shared, budget, places)
            rows.append(tuple(row[:place]))
            row, shared = row[place:], [0, *shared[place + 1 :]]
            size = sum(len(each.conversation.tokens) for each in row) - sum(shared)
    return [piece for each in (*rows, tuple(row)) if each for piece in fitting(each, budget, whole=whole)]


def cuts(row: Sequence[Sample], *, whole: bool) -> list[int]:
    """Before which conversations a row may be cut; with `whole`, before the first of a trajectory."""
    return [place for place in range(1, len(row)) if row[place].leads or not whole]


def middle_of(row: Sequence[Sample], *, whole: bool) -> int | None:
    """Before which conversation a row is cut in two, or none where it cannot be."""
    return min(cuts(row, whole=whole), key=lambda place: abs(2 * place - len(row)), default=None)


def _cheapest_cut(row: Sequence[Sample], shared: Sequence[int], budget: int, places: Sequence[int]) -> int:
    """Before which conversation to cut: its shared tokens are computed once more, and what comes after leaves a gap."""
    added = [len(sample.conversation.tokens) - same for sample, same in zip(row, shared, strict=True)]
    gaps = np.cumsum(added[::-1])[::-1]
    return min(places, key=lambda place: shared[place] + gaps[place] * ROW_COST / budget)


def fitting(row: tuple[Sample, ...], budget: int, *, whole: bool = False) -> list[tuple[Sample, ...]]:
    """The row, or its halves where `merge` finds less to share than was counted on."""
    tokens = [sample.conversation.tokens for sample in row]
    middle = middle_of(row, whole=whole)
    if middle is None or sum(map(len, tokens)) <= budget or len(merge(tokens).tokens) <= budget:
        return [row]
    return [*fitting(row[:middle], budget, whole=whole), *fitting(row[middle:], budget, whole=whole)]


def pack(
    samples: Sequence[Sample], *, device: torch.device, dtype: torch.dtype, reads: Reads = before_trained
) -> MicroBatch:
    """Lays samples out as one row; streams get `dtype`. ValueError for a trained token that nothing predicts.

    `reads` says at which tokens the model is read.
    """
    read = [reads(sample.conversation) for sample in samples]
    for sample, at in zip(samples, read, strict=True):
        if at[0] < 0:  # its source would be the last token of whatever stands before it
            raise ValueError(f"sample {sample.key} trains its first token, which no token before it predicts")
    tree = merge([sample.conversation.tokens for sample in samples])
    row = filled(tree)
    trained = [np.flatnonzero(sample.conversation.trained) for sample in samples]
    lengths = np.array([len(places) for places in trained])
    sources = np.concatenate([place[at] for place, at in zip(tree.places, read, strict=True)])
    targets = np.concatenate([s.conversation.tokens[at] for s, at in zip(samples, trained, strict=True)])

    def stream(pieces: Sequence[NDArray[np.float64] | None]) -> torch.Tensor | None:
        present = [piece for piece in pieces if piece is not None]
        if not present:
            return None
        if len(present) < len(pieces):  # which term a sample trains must not depend on who shares its row
            raise ValueError(
                "only some samples have a stream of old, reference, values, returns or candidates; give all or none"
            )
        return torch.as_tensor(np.concatenate(present), dtype=dtype, device=device)

    def required(pieces: Sequence[NDArray[np.float64]]) -> torch.Tensor:
        return torch.as_tensor(np.concatenate(pieces), dtype=dtype, device=device)

    family = [sample.family_tokens or len(sample.advantage) for sample in samples]
    told = stream([sample.candidates for sample in samples])
    rows = TokenStreams(
        advantage=required([sample.advantage for sample in samples]),
        engine=required([s.conversation.logprobs[s.conversation.trained] for s in samples]),
        conversation=torch.as_tensor(np.repeat(np.arange(len(samples)), lengths), device=device),
        lengths=torch.as_tensor(lengths, device=device),
        old=stream([sample.old for sample in samples]),
        reference=stream([sample.reference for sample in samples]),
        values=stream([sample.values for sample in samples]),
        returns=stream([sample.returns for sample in samples]),
        teacher=None if told is None else told[:, : -(told.shape[1] // 2)],
        likeliest=None if told is None else told[:, -(told.shape[1] // 2) :].long(),
        siblings=torch.as_tensor([sample.siblings for sample in samples], device=device),
        family_tokens=torch.as_tensor(family, device=device),
    )
    return MicroBatch(
        samples=tuple(samples),
        tokens=torch.as_tensor(row.tokens, device=device),
        positions=torch.as_tensor(row.positions, device=device),
        layout=TreeLayout.of(row.segments, device),
        sources=torch.as_tensor(sources, device=device),
        targets=torch.as_tensor(targets, device=device),
        kept=_kept(samples, device),
        rows=rows,
        experts=_experts(samples, tree, len(row.tokens), device),
        shared=sum(len(sample.conversation.tokens) for sample in samples) - len(tree.tokens),
    )


def _experts(samples: Sequence[Sample], tree: Tree, length: int, device: torch.device) -> torch.Tensor | None:
    """Which experts computed the tokens of a row, as one table; of what several share, those of the first that says."""
    told = [(sample.conversation.experts, places) for sample, places in zip(samples, tree.places, strict=True)]
    known = [(experts, places) for experts, places in told if experts is not None]
    if not known:
        return None
    table = np.full((length, *known[0][0].shape[1:]), ANY_EXPERT, dtype=np.int64)
    for experts, places in reversed(known):
        said = experts[:, 0, 0] != ANY_EXPERT
        table[places[said]] = experts[said]
    return torch.as_tensor(table, device=device)


def _kept(samples: Sequence[Sample], device: torch.device) -> torch.Tensor | None:
    """What the trained tokens were drawn from, as one table."""
    found = [sample.conversation.kept for sample in samples]
    told = [each for each in found if each is not None]
    if not told:
        return None
    if len(told) < len(found):
        raise ValueError("only some samples say what their tokens were drawn from; give all or none")
    counts = np.concatenate([each.counts for each in told])
    table = np.full((len(counts), int(counts.max(initial=1))), -1, dtype=np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.concatenate([each.ids for each in told])
    return torch.as_tensor(table, device=device)
