"""How much there is to compute: tokens, and the token pairs that causal attention looks at.

A token costs products in proportion to the model and attention in proportion to what it sees. Where the samples of a
prompt share its computation, the prompt counts once per group, in generation (prefix cache) and in training (one tree).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.planner.cost.lengths import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoad:
    """A set of sequences, as a forward sees it. Loads add."""

    tokens: float
    """Tokens computed."""
    pairs: float
    """Sum over these tokens of how many tokens they see: half the square of an unshared sequence."""
    sequences: float
    """Sequences, which cannot be cut in two."""
    longest: float = 0.0
    """Tokens of the longest one."""

    def __add__(self, other: TokenLoad) -> TokenLoad:
        return TokenLoad(
            tokens=self.tokens + other.tokens,
            pairs=self.pairs + other.pairs,
            sequences=self.sequences + other.sequences,
            longest=max(self.longest, other.longest),
        )

    def part(self, share: float) -> TokenLoad:
        """This share of it; the longest sequence stays as long as it is."""
        return TokenLoad(
            tokens=self.tokens * share,
            pairs=self.pairs * share,
            sequences=self.sequences * share,
            longest=self.longest,
        )

    @classmethod
    def sequence(cls, tokens: float, *, count: float = 1.0) -> TokenLoad:
        """Sequences of one length that share nothing."""
        return cls(tokens=tokens * count, pairs=tokens * tokens / 2 * count, sequences=count, longest=tokens)

    @classmethod
    def groups(cls, prompt: float, lengths: Counts, *, shared: bool) -> TokenLoad:
        """Answers of these lengths (prompts, samples) behind prompts of one length, computed once per group or each."""
        answers = [length for group in lengths for length in group]
        prompts = len(lengths) if shared else len(answers)
        return cls(
            tokens=float(prompts * prompt + sum(answers)),
            pairs=prompts * prompt * prompt / 2 + sum(length * prompt + length * length / 2 for length in answers),
            sequences=float(len(answers)),
            longest=float(prompt + max(answers, default=0)),
        )

    @classmethod
    def total(cls, loads: Iterable[TokenLoad]) -> TokenLoad:
        """The sum of some loads, empty if there are none."""
        return sum(loads, cls(tokens=0.0, pairs=0.0, sequences=0.0))
