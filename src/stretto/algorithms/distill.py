"""On-policy distillation: the policy answers, and a teacher says of every token how much likelier it is to it.

What is minimized is the reverse KL of the policy from its teacher in every state that the policy came to; the states
themselves are taken as they are. In the policy-gradient form each token's advantage is the teacher's log-probability
less the policy's, of that token alone: its expected gradient is that of the KL (Agarwal et al. 2024; Lu 2025). In the
exact form the KL itself is the loss, over the teacher's `top_k` likeliest tokens and the rest as one: it has no noise
of sampling, and is the KL over the vocabulary where `top_k` covers that. Rewards, centered in the group, may be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from stretto.algorithms.advantages import Floats, group_centred
from stretto.algorithms.base import Algorithm, LoggedTerm, Streams, Term, TokenStreams, keep
from stretto.algorithms.credit import credit_by_group
from stretto.algorithms.losses import policy_terms
from stretto.recipe.schema import Distill
from stretto.types import Group, Sample


def credit(groups: Sequence[Group], streams: Streams, *, section: Distill) -> tuple[Sample, ...]:
    """Samples with the teacher's word on each token, and the rewards' advantage beside it where they count."""
    weight = section.reward_weight
    samples = credit_by_group(
        groups, streams, advantages=lambda rewards: weight * group_centred(rewards), kl=section.kl
    )
    if section.top_k is not None:
        return tuple(replace(sample, candidates=streams["candidates"].get(sample.key)) for sample in samples)
    return tuple(replace(sample, advantage=sample.advantage + taught(sample)) for sample in samples)


def taught(sample: Sample) -> Floats:
    """(N) how much likelier each trained token is to the teacher than it was to the policy that sampled it."""
    assert sample.reference is not None  # a teacher was asked
    found: Floats = sample.reference - sample.conversation.logprobs[sample.conversation.trained]
    return found


def reverse_kl(logprobs: Tensor, rows: TokenStreams) -> Tensor:
    """(N) sum over the teacher's likeliest tokens and the rest of p (log p - log q), p the policy and q the teacher."""
    if rows.chosen is None or rows.teacher is None:
        raise ValueError("a distillation term was built but no candidates were provided")
    return (rows.chosen.exp() * (rows.chosen - rows.teacher)).sum(-1)


def build(section: Distill) -> Algorithm:
    """Distillation with the recipe's numbers."""
    terms = policy_terms(section, denominator="tokens", scale="token")
    if section.top_k is not None:
        watch = {"distill/kl": LoggedTerm(numbers=reverse_kl)}
        exact = Term(name="distill", denominator="tokens", loss=reverse_kl, watch=watch)
        terms = (*(terms if section.reward_weight > 0 else ()), exact)
    return Algorithm(
        name="distill",
        scope="group",
        needs=frozenset({"reference"}),
        min_samples=2 if section.reward_weight > 0 else 1,
        terms=terms,
        advantage=partial(credit, section=section),
        drop=keep,
    )
