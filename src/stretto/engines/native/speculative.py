"""Guesses how answers go on, from answers that were finished before: the drafts of speculative decoding.

A draft is only ever a guess that the engine verifies, so nothing here can change what is sampled; it can only make it
faster. Guesses come from the answers to the same context (siblings of the group) and from the context itself. How many
tokens are worth guessing follows from counts, never from time, and every round begins anew (`restart`), so that a run
which is repeated or resumed guesses alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ANSWERS = 16
"""Answers remembered per context, the newest."""

WIDTHS = (2, 4, 8)
"""New tokens per sequence in one forward, drafts and the one that is sure."""

FIRST_GUESS = 0.5
"""Chance that a draft's next token is right, before any was tried."""

DIFFERENT = -1
"""In place of a number of tokens, of texts that are not alike."""

Pair = tuple[int, int]


class RememberedTokens:
    """One remembered run of tokens, with the places where each pair of tokens last stood."""

    __slots__ = ("after", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.after: dict[Pair, int] = {
            pair: place + 2 for place, pair in enumerate(zip(self.tokens, self.tokens[1:], strict=False))
        }

    def follow(self, pair: Pair, count: int) -> list[int]:
        """What came after two tokens, here."""
        place = self.after.get(pair)
        return [] if place is None else self.tokens[place : place + count]


class GrowingAnswer:
    """An answer that is being sampled. It only grows, so what was compared with it once is not compared again."""

    __slots__ = ("alike", "context", "key", "said", "same", "texts")

    def __init__(self, context: np.ndarray) -> None:
        self.context, self.key = context, context.tobytes()
        self.said: list[int] = []
        self.texts: Sequence[RememberedTokens] = ()
        self.alike: list[RememberedTokens] = []  # those of `texts` that are not known to be others
        self.same: dict[RememberedTokens, int] = {}
        # Tokens in which they are known to be alike; DIFFERENT when they are not.

    @property
    def newest(self) -> Pair | None:
        """Its last two tokens, or the context's while it has none; none if there are no two."""
        last = [*self.context[-2:].tolist(), *self.said[-2:]][-2:]
        return (last[0], last[1]) if len(last) == 2 else None

    def begun_alike(self, texts: Sequence[RememberedTokens]) -> RememberedTokens | None:
        """The last of these that begins with this answer and goes on."""
        if texts is not self.texts:
            self.texts, self.alike = texts, [text for text in texts if self.same.get(text) != DIFFERENT]
        length = len(self.said)
        while self.alike:
            text = self.alike[-1]
            before = self.same.get(text, 0)
            if len(text.tokens) > length and text.tokens[before:length] == self.said[before:]:
                self.same[text] = length
                return text
            self.same[self.alike.pop()] = DIFFERENT
        return None


class NgramDrafts:
    """What an engine remembers of a round to guess by."""

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[RememberedTokens, ...]] = {}
        self.asked: dict[bytes, RememberedTokens] = {}
        self.right = FIRST_GUESS

    def learn(self, context: bytes, answer: Sequence[int]) -> None:
        """Remembers an answer, the newest last."""
        self.known[context] = (*self.known.get(context, ()), RememberedTokens(answer))[-ANSWERS:]

    def guess(self, answer: GrowingAnswer, count: int) -> list[int]:
        """Up to `count` tokens that may come next; answers that began like this one go before lookalikes."""
        texts = self.known.get(answer.key, ())
        if (text := answer.begun_alike(texts)) is not None:
            return text.tokens[len(answer.said) : len(answer.said) + count]
        if (pair := answer.newest) is None:
            return []
        for text in reversed(texts):
            if found := text.follow(pair, count):
                return found
        if answer.key not in self.asked:
            self.asked[answer.key] = RememberedTokens(answer.context.tolist())
        return self.asked[answer.key].follow(pair, count)

    def width(self, sequences: int, fixed: float) -> int:
        """How many tokens per sequence are worth one forward, whose own cost is that of `fixed` tokens."""

        def pace(width: int) -> float:
            sure = sum(self.right**place for place in range(width))
            return sure / (fixed + sequences * width)

        return max((1, *WIDTHS), key=pace)

    def judge(self, tried: int, right: int) -> None:
        """Notes how many of the tokens that could be verified were right; one wrong token hides those after it."""
        if tried:
            self.right += min(0.5, tried / 64) * (right / tried - self.right)

    def restart(self) -> None:
        """A round begins: what the last one taught is forgotten. It would be of little use (of the prompts of a step,
        few were asked before), and a checkpoint would have to hold it."""
        self.known.clear()
        self.asked.clear()
        self.right = FIRST_GUESS
