"""Messages -> tokens, each turn once.

The first call of a conversation renders the whole chat through the tokenizer's template. Every later one renders only
what is new: the template is applied to text, and what it adds after the model's last words is encoded and appended.
What the model said is never decoded and encoded again. Where a template would rewrite earlier turns (some drop a
turn's thinking), `delta` says so, and the caller opens a new conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.errors import EnvironmentFailure
from stretto.types import Message

Tokens = NDArray[np.int64]

MARK = "\ue000stretto\ue001"
"""Stands behind the model's words while a template is applied; private-use characters that no template touches."""


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **keywords: Any) -> Any: ...

    def encode(self, text: str, **keywords: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **keywords: Any) -> Any: ...


class Renderer:
    """Turns chats into token ids for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, stop: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop

    def open(self, messages: Sequence[Message]) -> Tokens:
        """The tokens that start a conversation, up to where the model speaks."""
        if self.tokenizer.chat_template is None:
            text = "\n".join(str(message["content"]) for message in messages)
            return np.array(self.tokenizer.encode(text), dtype=np.int64)
        # A template writes its own opening tokens, so the tokenizer must not add them again.
        return np.array(self.tokenizer.encode(self._text(messages, ask=True), add_special_tokens=False), dtype=np.int64)

    def delta(self, before: Sequence[Message], new: Sequence[Message], *, last: int | None) -> Tokens | None:
        """The tokens that continue a conversation whose last message is the model's.

        `last` is the model's last token: if it ended the turn it already stands in the conversation, otherwise the
        template's own end of turn is part of the delta. None if the template would rewrite what came before.
        """
        if self.tokenizer.chat_template is None:
            raise EnvironmentFailure("this tokenizer has no chat template, so a conversation cannot have a second turn")
        words = str(before[-1]["content"])
        marked = [*before[:-1], {**before[-1], "content": words + MARK}]
        closed, whole = self._text(marked, ask=False), self._text([*marked, *new], ask=True)
        asked = self._text(before[:-1], ask=True)
        end = closed.rfind(MARK)
        # White space that a template trims does not matter; words that it leaves out do.
        kept = closed.startswith(asked) and words.strip() in closed[len(asked) : max(end, 0)]
        if not (kept and end >= len(asked) and whole.startswith(closed)):
            return None
        tail = whole[end + len(MARK) :]
        if last in self.stop:
            ended = str(self.tokenizer.decode([last], skip_special_tokens=False))
            if not tail.startswith(ended):
                return None
            tail = tail[len(ended) :]
        return np.array(self.tokenizer.encode(tail, add_special_tokens=False), dtype=np.int64)

    def answer(self, messages: Sequence[Message], text: str) -> Tokens:
        """The tokens with which the model would have said `text`, the end of its turn included."""
        asked = self._text(messages, ask=True)
        whole = self._text([*messages, {"role": "assistant", "content": text}], ask=False)
        tokens = self.tokenizer.encode(whole[len(asked) :], add_special_tokens=False)
        ends = [place for place, token in enumerate(tokens) if token in self.stop]
        return np.array(tokens[: ends[0] + 1] if ends else tokens, dtype=np.int64)

    def text(self, tokens: Sequence[int]) -> str:
        """What the model said, without the token that ended its turn."""
        words = tokens[:-1] if len(tokens) and tokens[-1] in self.stop else tokens
        return str(self.tokenizer.decode(list(words), skip_special_tokens=True))

    def all_text(self, tokens: Sequence[int]) -> str:
        """A whole conversation for people to read, special tokens included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _text(self, messages: Sequence[Message], *, ask: bool) -> str:
        chat: list[Mapping[str, Any]] = [dict(message) for message in messages]
        return str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask))
