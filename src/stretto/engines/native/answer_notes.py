"""What is noted of each answer while it is sampled, where the recipe asks for more than tokens: kept sets, stop texts.

Both are looked at on the host, after each decode step, and only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.base import Request
from stretto.engines.native.truncation import NOBODY
from stretto.types import KeptTokens

SPARE = 8
"""Tokens looked at beyond those that a stop text can have: a character may be cut where the look begins."""


class KeptSets:
    """The ids that each token of the answers in progress was drawn from."""

    def __init__(self) -> None:
        self.rows: dict[int, list[NDArray[np.int32]]] = {}

    def note(self, requests: Sequence[Request], ids: Tensor, said: Sequence[int]) -> None:
        """Notes (n, w, K) ids of the first `said` tokens of each row."""
        table = ids.cpu().numpy()
        for row, (request, count) in enumerate(zip(requests, said, strict=True)):
            new = [each[each != NOBODY].astype(np.int32) for each in table[row, :count]]
            self.rows.setdefault(request.key, []).extend(new)

    def take(self, key: int) -> KeptTokens:
        """Those of an answer that has ended."""
        rows = self.rows.pop(key, [])
        counts = np.array([len(row) for row in rows], dtype=np.int32)
        return KeptTokens(counts=counts, ids=np.concatenate([np.zeros(0, np.int32), *rows]))


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
