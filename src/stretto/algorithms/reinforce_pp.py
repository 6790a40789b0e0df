"""REINFORCE++: returns per token, whitened over the whole batch instead of within a group. Hu 2025.

The reward stands at the last token, and a KL "in the reward" is subtracted token by token before the returns are
summed. The mean of the batch shifts every advantage, so no credit is final before the last answer is scored; a
trainer may whiten its gradient instead (`training.whitening`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from stretto.algorithms.base import Algorithm, Streams, keep
from stretto.algorithms.credit import conversation_samples, judged, needed_streams, token_penalties, whitened_samples
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import Kl, PolicyGradient
from stretto.types import Group, Sample


def credit(groups: Sequence[Group], streams: Streams, *, kl: Kl) -> tuple[Sample, ...]:
    """Whitened returns for every trained token of the batch."""
    return whitened_samples(plain_credit(groups, streams, kl=kl))


def plain_credit(groups: Sequence[Group], streams: Streams, *, kl: Kl) -> tuple[Sample, ...]:
    """Returns of every trained token."""
    samples = [
        sample
        for trajectory, reward in judged(groups)
        for sample in conversation_samples(trajectory, reward.value, streams)
    ]
    return tuple(replace(sample, advantage=sample.advantage - to_come(sample, kl)) for sample in samples)


def to_come(sample: Sample, kl: Kl) -> np.ndarray:
    """The KL penalty from each token on to the conversation's end, where the recipe puts it into the reward."""
    return token_penalties(sample, kl)[::-1].cumsum()[::-1]


def build(section: PolicyGradient) -> Algorithm:
    """REINFORCE++ with the recipe's numbers."""
    return Algorithm(
        name="reinforce_pp",
        scope="batch",
        needs=needed_streams(section),
        min_samples=1,
        terms=policy_terms(section, denominator="tokens", scale="token"),
        advantage=partial(credit, kl=section.kl),
        unwhitened=partial(plain_credit, kl=section.kl),
        drop=keep,
    )
