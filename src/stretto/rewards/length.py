"""What shortness is worth: length rewards of the literature, as pure functions of token counts and right or wrong.

Each gives what its paper's reward has beyond 1 for a right and 0 for a wrong answer. So a part of weight 1 beside a
part that judges, also of weight 1, is the paper's reward, and a smaller weight is a weaker pull. Lengths are sampled
tokens, never characters. `overlong`, the penalty of DAPO, looks at no verdict and stands with the others in `answer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stretto.types import Prompt


def lcpo_exact(tokens: int, *, target: int, alpha: float) -> float:
    """-alpha for every token above or below the target, right or wrong. Aggarwal & Welleck 2025 (L1), eq. 1."""
    return -alpha * abs(target - tokens)


def lcpo_max(tokens: int, right: bool, *, target: int, alpha: float, delta: float) -> float:
    """A right answer keeps clip(alpha * (target - tokens) + delta, 0, 1) of its reward. L1, eq. 2.

    With `delta` 0.5 it keeps half at the target, and a budget that is passed by a few tokens costs little.
    """
    return min(max(alpha * (target - tokens) + delta, 0.0), 1.0) - 1.0 if right else 0.0


def budget(prompt: Prompt, column: str) -> int | None:
    """The number of tokens that a column of the data has for a prompt, or none."""
    found = prompt.tags.get(column)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e9:
        return None
    return int(found)


def kimi(tokens: Sequence[int], right: Sequence[bool]) -> list[float]:
    """From 0.5 for the shortest answer of the group to -0.5 for the longest; a wrong one gains nothing by being short.

    Kimi k1.5 (2025), section 2.3.3. Shortest and longest are those of all answers, wrong ones too.
    """
    shortest, longest = min(tokens, default=0), max(tokens, default=0)
    if shortest == longest:
        return [0.0] * len(tokens)
    shares = [0.5 - (each - shortest) / (longest - shortest) for each in tokens]
    return [share if good else min(0.0, share) for share, good in zip(shares, right, strict=True)]


def arora_zanette(tokens: Sequence[int], right: Sequence[bool], *, alpha: float) -> list[float]:
    """A right answer loses alpha * sigmoid((tokens - mean) / deviation), where both are those of the right answers.

    Arora & Zanette 2025, eq. 4 and 5. Without a deviation the sigmoid is one half.
    """
    lengths = [each for each, good in zip(tokens, right, strict=True) if good]
    mean = sum(lengths) / max(1, len(lengths))
    deviation = math.sqrt(sum((each - mean) ** 2 for each in lengths) / max(1, len(lengths)))
    return [
        -alpha * _sigmoid((each - mean) / deviation if deviation else 0.0) if good else 0.0
        for each, good in zip(tokens, right, strict=True)
    ]


def cosine(
    tokens: int,
    right: bool,
    *,
    longest: int,
    right_range: tuple[float, float],
    wrong_range: tuple[float, float],
) -> float:
    """A reward that moves along half a cosine from its value at no tokens to that at `longest`. Yeo et al. 2025, eq. 1.

    Ranges are (at no tokens, at `longest`). A right answer is worth less the longer it is; a wrong one may be worth
    more, so that hard questions are given thought.
    """
    short, long = right_range if right else wrong_range
    share = (1.0 + math.cos(math.pi * min(tokens, longest) / longest)) / 2.0
    return long + (short - long) * share - float(right)


def _sigmoid(value: float) -> float:
    """Without overflow, whatever the sign."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
