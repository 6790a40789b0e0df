"""The loss of a critic, minimized, as a function of (its values now, rows): the counterpart of `losses` for values.

A critic is trained like a policy, by sums over trained tokens that may be added in any order; what goes in is its
value of each token instead of a log-probability. `rows.values` is what it said when the answers were sampled,
`rows.returns` what it should have said.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from stretto.algorithms.base import LoggedTerm, Term, TokenStreams
from stretto.recipe.schema import Gae


def squared_errors(values: Tensor, rows: TokenStreams, *, clip: float) -> tuple[Tensor, Tensor]:
    """(N), (N): of the values, and of the values moved no further than `clip` from those at sampling."""
    if rows.values is None or rows.returns is None:
        raise ValueError("a critic's loss was built but no values and returns were provided")
    held = torch.clamp(values, rows.values - clip, rows.values + clip)
    return (values - rows.returns).square(), (held - rows.returns).square()


def clipped_value_loss(values: Tensor, rows: TokenStreams, *, clip: float) -> Tensor:
    """(N) half the larger of two squared errors: of the value, and of the value held near the one at sampling.

    The larger one counts, so a value that moved too far in the right direction gets no further push, and one that
    moved away is always pulled back. Schulman's implementation of PPO (baselines, ppo2).
    """
    free, held = squared_errors(values, rows, clip=clip)
    return torch.maximum(free, held) / 2


def clipped_value_share(values: Tensor, rows: TokenStreams, *, clip: float) -> Tensor:
    """(N) 1 where clipping holds the critic back."""
    free, held = squared_errors(values, rows, clip=clip)
    return (held > free).to(values.dtype)


def value_terms(gae: Gae) -> tuple[Term, ...]:
    """The critic's objective: a mean over tokens."""
    clip = gae.value_clip
    return (
        Term(
            name="value",
            denominator="tokens",
            loss=partial(clipped_value_loss, clip=clip),
            watch={"clip_share": LoggedTerm(numbers=partial(clipped_value_share, clip=clip))},
        ),
    )
