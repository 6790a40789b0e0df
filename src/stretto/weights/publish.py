"""Hands new weights to an engine, and does not take its word for it.

An engine answers with the version it samples from and the checksums of its own tensors, read back. Version and
checksums must be the trainer's, or the run stops: a sampler that silently holds the wrong weights costs weeks. Where
engine and trainer share tensors there is nothing to compare, and the receipt says "shared" rather than "proved".
"""

from __future__ import annotations

from typing import Protocol

from stretto.errors import WeightsError
from stretto.types import Receipt, Weights


class Receiver(Protocol):
    """The part of an engine that weights are published to."""

    def receive(self, weights: Weights) -> Receipt:
        """Takes over published weights and says what it holds."""
        ...


def publish(weights: Weights, engine: Receiver) -> Receipt:
    """Sends weights and proves that they arrived."""
    receipt = engine.receive(weights)
    prove(weights, receipt)
    return receipt


def prove(weights: Weights, receipt: Receipt, *, engine: str = "the engine") -> None:
    """Raises unless the receipt shows exactly these weights. `engine` is what messages call its sender."""
    if receipt.version != weights.version:
        raise WeightsError(
            f"publish: {engine} samples from weights {receipt.version}, the trainer published {weights.version}"
        )
    if receipt.shared:
        if weights.where != "shared":
            raise WeightsError(f"publish: {engine} says it shares tensors, but the weights are at {weights.where}")
        return
    differing = sorted(name for name, checksum in weights.manifest.items() if receipt.manifest.get(name) != checksum)
    if differing or not weights.manifest:
        shown = ", ".join(differing[:3]) or "there is nothing to compare"
        raise WeightsError(
            f"publish: after weights {weights.version} were sent, {len(differing)} of {len(weights.manifest)} "
            f"tensors of {engine} differ from the trainer's ({shown})"
        )
