"""How new weights get to what an engine samples from: over the group of those that hold the policy, under a number.

Every publish of a run passes through the `Carrier` of a worker. A test that puts another one there can skip a publish
or spoil it on purpose, and see that the proof, which is elsewhere (`publish.py`), takes nobody's word for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from stretto.types import Receipt, Weights

BUCKET = 32 * 2**20
"""Bytes that are handed round at once: enough that a link is busy, little beside the weights."""


class Receiver(Protocol):
    """The part of an engine that weights are published to."""

    def receive(self, weights: Weights) -> Receipt:
        """Takes over published weights and says what it holds."""
        ...


class Carrier:
    """Brings weights where they are read."""

    def __init__(self, bucket: int = BUCKET) -> None:
        """`bucket` is how many bytes travel at once; the same for all members of a group."""
        self.bucket = bucket

    def bring(self, tensors: Mapping[str, Tensor], hand_round: Callable[[Tensor], None]) -> None:
        """Makes tensors those of the group's source; every member calls this together, with tensors of equal shapes.

        `hand_round` makes one flat tensor the source's. Many small tensors travel as one.
        """
        for bucket in buckets(tensors.items(), self.bucket):
            flat = torch.cat([tensor.detach().flatten() for tensor in bucket.values()])
            hand_round(flat)
            self.unpack(bucket, flat)

    def unpack(self, bucket: Mapping[str, Tensor], flat: Tensor) -> None:
        """Copies what came into its places, and so that whoever keeps copies of a tensor sees that it has changed."""
        parts = flat.split([tensor.numel() for tensor in bucket.values()])
        with torch.no_grad():
            for tensor, part in zip(bucket.values(), parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def tell(self, weights: Weights, engine: Receiver) -> None:
        """Tells an engine that its tensors are those of a new version."""
        engine.receive(weights)


def buckets(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Tensors of one kind in a row, as many as `most` bytes hold; the same for everybody who has equal ones."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        last = next(reversed(bucket.values())) if bucket else tensor
        if bucket and (size + tensor.nbytes > most or tensor.dtype != last.dtype):
            yield bucket
            bucket, size = {}, 0
        bucket[name], size = tensor, size + tensor.nbytes
    if bucket:
        yield bucket
