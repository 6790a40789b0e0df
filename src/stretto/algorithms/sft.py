"""Supervised fine-tuning: the negative log-likelihood of the answers in the data, a mean over their tokens.

An algorithm whose trajectories come from the data instead of an engine. What is trained of a conversation is what the
assistant says in it, the end of each turn included; the rest is context.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.algorithms.base import Algorithm, Streams, Term, keep
from stretto.algorithms.credit import conversation_samples, judged
from stretto.algorithms.losses import negative_log_likelihood
from stretto.recipe.schema import Imitation
from stretto.types import Group, Sample


def credit(groups: Sequence[Group], streams: Streams) -> tuple[Sample, ...]:
    """Every token of every answer counts the same."""
    return tuple(
        sample for trajectory, _ in judged(groups) for sample in conversation_samples(trajectory, 1.0, streams)
    )


def imitation() -> Algorithm:
    """Imitation with no numbers of its own."""
    return Algorithm(
        name="sft",
        scope="sample",
        needs=frozenset(),
        min_samples=1,
        terms=(Term(name="likelihood", denominator="tokens", loss=negative_log_likelihood, watch={}),),
        advantage=credit,
        drop=keep,
    )


def build(section: Imitation) -> Algorithm:
    """Supervised fine-tuning, which has no numbers."""
    return imitation()
