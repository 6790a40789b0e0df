"""Guesses how answers go on, from answers that were finished before: the drafts of speculative decoding.

A draft is only ever a guess that the engine verifies, so nothing here can change what is sampled; it can only make it
faster. Guesses come from the answers to the same context (siblings of the group, earlier visits of the prompt) and
from the context itself. How many tokens are worth guessing follows from counts, never from time, so that a run which
is repeated guesses alike: what was learned in a step is known only after it (`settle`), and a checkpoint holds that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MOST_TOKENS = 1 << 20
"""Tokens of answers that are remembered; the contexts that were not met for longest go first."""

ANSWERS = 16
"""Answers remembered per context, the newest."""

WIDTHS = (2, 4, 8)
"""New tokens per sequence in one forward, drafts and the one that is sure."""

FIRST_GUESS = 0.5
"""Chance that a draft's next token is right, before any was tried."""

Pair = tuple[int, int]


class Text:
    """One remembered run of tokens, with the places where each pair of tokens last stood."""

    __slots__ = ("after", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.after: dict[Pair, int] = {
            pair: place + 2 for place, pair in enumerate(zip(self.tokens, self.tokens[1:], strict=False))
        }

    def follow(self, said: Sequence[int], count: int) -> list[int]:
        """What came after the last two tokens of `said`, here."""
        place = self.after.get((said[-2], said[-1])) if len(said) > 1 else None
        return [] if place is None else self.tokens[place : place + count]


class Drafts:
    """Everything an engine remembers to guess by."""

    def __init__(self) -> None:
        self.known: OrderedDict[bytes, list[Text]] = OrderedDict()
        self.fresh: dict[bytes, list[Text]] = {}
        self.asked: dict[bytes, Text] = {}
        self.right = FIRST_GUESS

    def learn(self, context: bytes, answer: Sequence[int]) -> None:
        """Remembers an answer."""
        texts = self.fresh.setdefault(context, [])
        texts.append(Text(answer))
        del texts[:-ANSWERS]

    def guess(self, context: np.ndarray, said: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may come next; answers that began like this one go before lookalikes."""
        key = context.tobytes()
        texts = [*reversed(self.fresh.get(key, ())), *reversed(self.known.get(key, ()))]
        for text in texts:
            if len(text.tokens) > len(said) and text.tokens[: len(said)] == list(said):
                return text.tokens[len(said) : len(said) + count]
        before = [*context[-2:].tolist(), *said]
        for text in texts:
            if found := text.follow(before, count):
                return found
        if key not in self.asked:
            self.asked[key] = Text(context.tolist())
        return self.asked[key].follow(before, count)

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
        """A round begins: what the last one taught about guessing is forgotten, so that it does not matter."""
        self.right = FIRST_GUESS
        self.asked.clear()

    def settle(self) -> None:
        """A step is over: what was learned in it is known."""
        for context, texts in self.fresh.items():
            self.known[context] = [*self.known.pop(context, []), *texts][-ANSWERS:]
        self.fresh.clear()
        size = sum(len(text.tokens) for texts in self.known.values() for text in texts)
        while size > MOST_TOKENS:
            _, texts = self.known.popitem(last=False)
            size -= sum(len(text.tokens) for text in texts)

    def state(self) -> Mapping[str, Any]:
        """What is known, oldest contexts first."""
        return {
            "known": [[context.hex(), [text.tokens for text in texts]] for context, texts in self.known.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Knows what `state` knew."""
        self.known = OrderedDict(
            (bytes.fromhex(context), [Text(tokens) for tokens in answers]) for context, answers in state["known"]
        )
        self.fresh.clear()
