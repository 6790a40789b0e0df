"""Texts that end an answer, found in the tokens as they are sampled; whatever engine samples them.

They are looked for on the host, after each decode step, and only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stretto.engines.base import Request

SPARE = 8
"""Tokens looked at beyond those that a stop text can have: a character may be cut where the look begins."""


class StopTexts:
    """Finds the token with which an answer first holds a stop text, wherever tokens begin and end."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def cut(self, requests: Sequence[Request], sampled: Tensor, counts: Tensor, new: Tensor, said: Tensor) -> list[int]:
        """Rows whose answer a stop text ends now; `said`, how much of `new` belongs to each, is cut there. `sampled`
        has the first `counts` tokens of each from before."""
        if not any(request.stop_texts for request in requests):
            return []
        before = [row[:count] for row, count in zip(sampled.tolist(), counts.tolist(), strict=True)]
        fresh = [row[:count] for row, count in zip(new.tolist(), said.tolist(), strict=True)]
        ends = self.ends(requests, dict(enumerate(before)), fresh)
        for row, count in ends.items():
            said[row] = count
        return list(ends)

    def ends(
        self, requests: Sequence[Request], before: Mapping[int, Sequence[int]], new: Sequence[Sequence[int]]
    ) -> dict[int, int]:
        """Row -> how many of its new tokens belong to its answer, for rows whose answer a stop text ends.

        `before` has what each such row sampled before.
        """
        found: dict[int, int] = {}
        for row, request in enumerate(requests):
            if not request.stop_texts:
                continue
            moved = request.tokens[len(request.tokens) - request.begun :].tolist()
            said = [*moved, *before[row]]
            for count in range(1, len(new[row]) + 1):
                if self._holds([*said, *new[row][:count]], request.stop_texts):
                    found[row] = count
                    break
        return found

    def _holds(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        """Whether the last tokens hold one of the texts; a text has at most as many tokens as bytes."""
        longest = max(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        text = self.tokenizer.decode(list(tokens[-(longest + SPARE) :]), skip_special_tokens=False)
        return any(each in text for each in texts)
