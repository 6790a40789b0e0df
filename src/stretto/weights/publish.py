"""The proof that engines sample from the weights that were published: nobody's word is taken for it.

A receipt has the version that an engine samples from and the checksums of its own tensors, read back. Version and
checksums must be the trainer's, or the run stops: a sampler that silently holds the wrong weights costs weeks. Where
engine and trainer share tensors the receipt says "shared" rather than "proved"; what an engine reads of them, in place
or as copies in another order, is then held against the optimizer's masters (`workers.worker`, which makes receipts).
"""

from __future__ import annotations

from collections.abc import Collection

from stretto.errors import WeightsError
from stretto.types import Receipt, Weights


def verify_publish(
    weights: Weights, receipt: Receipt, *, engine: str = "the engine", source: str = "the trainer"
) -> None:
    """Raises unless the receipt shows exactly these weights. Messages call its sender `engine`, and theirs `source`."""
    if receipt.version != weights.version:
        raise refusal(
            weights.version, f"{engine} samples from weights {receipt.version}, {source} published {weights.version}"
        )
    if receipt.shared:
        if weights.where != "shared":
            raise refusal(weights.version, f"{engine} says it shares tensors, but the weights are at {weights.where}")
        return
    verify_equal(
        [name for name, checksum in weights.manifest.items() if receipt.manifest.get(name) != checksum],
        of=len(weights.manifest),
        version=weights.version,
        engine=engine,
        source=source,
    )


def verify_equal(differing: Collection[str], *, of: int, version: int, engine: str, source: str) -> None:
    """Raises if tensors differ, or if there were none to compare."""
    if differing or not of:
        shown = ", ".join(sorted(differing)[:3]) or "there is nothing to compare"
        raise refusal(version, f"{len(differing)} of {of} tensors of {engine} differ from those of {source} ({shown})")


MEMORY = "look at that device's memory, or at engine.kind if the engine is your own"
"""What to do where tensors are not what they should be."""


def refusal(version: int, told: str, look: str = MEMORY) -> WeightsError:
    """That weights are not what they should be, when, and what to do: `look` where."""
    when = f"after step {version}" if version else "before the first step"
    return WeightsError(
        f"publish: {when}, {told}\n"
        f"    fix: stretto resume goes on from the newest checkpoint; if it comes again, {look}, and please report it"
    )
