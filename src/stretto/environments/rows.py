"""How long rows are that are learned from without sampling: a question with its answer, or with each of two answers.

Only rows that may be too long are given to the tokenizer: no token is less than a byte of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.environments.render import Renderer
from stretto.errors import RolloutError
from stretto.types import Message


def row_tokens(
    renderer: Renderer, rows: Sequence[Sequence[Sequence[Message]]], *, most: int
) -> Iterator[int | RolloutError]:
    """Tokens of the longest chat of each row, or why the chat template cannot render one.

    Of a row that is sure to have no more than `most`, how many it has at most.
    """
    texts = renderer.openings([chat for row in rows for chat in row])
    for row in rows:
        found: int | RolloutError = 0
        for _ in row:
            text = next(texts)
            if isinstance(text, RolloutError):
                found = text
            elif not isinstance(found, RolloutError):
                size = len(text.encode()) + 1
                found = max(found, size if size <= most else len(renderer.encode_opening(text)))
        yield found
