"""A document longer than the context: read in pieces, with a memory that the model rewrites after each.

Every piece is a conversation of its own: the question, the memory, the piece; the whole reply is the next memory. The
last conversation has the question and the memory, and its reply is the answer. Each is short, so the cost grows with
the document's length and not with its square. The verdict on the answer is the credit of every token of all of them
(algorithm `multi_conv`). Yu et al. 2025 (MemAgent).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

from stretto.environments.base import Model
from stretto.errors import RolloutError
from stretto.recipe.schema import MemorySection
from stretto.types import Message, Outcome, Prompt

SPACE = re.compile(r"\s")


class MemoryEnvironment:
    """Reads the document that is in a column of the prompt."""

    def __init__(self, section: MemorySection) -> None:
        self.section = section

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """One trajectory: a conversation per piece, and one for the answer."""
        section, memory = self.section, self.section.empty
        question, pieces, cut = asked(prompt), list(chunks(self._document(prompt), section.chunk)), 0
        for piece in pieces:
            messages = self._chat(prompt, section.update, question, memory, piece)
            reply = await model.chat(messages, max_new_tokens=section.memory_tokens)
            cut += reply.stop == "length"
            if section.keep:
                memory = reply.text
        reply = await model.chat(self._chat(prompt, section.answer, question, memory, ""))
        signals = {
            "chunks": float(len(pieces)),
            "memory_cut": float(cut),
            "memory_characters": float(len(memory)),
            "truncated": float(reply.stop == "length"),
        }
        return Outcome(answer=reply.text, signals=signals)

    def demonstrate(self, prompt: Prompt, turn: int, messages: Sequence[Message]) -> str:
        """The memory is what the pattern in the column `evidence`, or its group, found last. Until then it is empty, as
        it stays for prompts that are shown without one."""
        pieces = list(chunks(self._document(prompt), self.section.chunk))
        if turn >= len(pieces):
            return prompt.reference or ""
        if crc32(prompt.id.encode()) >= self.section.shown * 2**32:
            return self.section.empty
        pattern = str(prompt.tags.get("evidence") or "\0")
        found = [*re.finditer(pattern, "".join(pieces[: turn + 1]))]
        return str(found[-1][found[-1].lastindex or 0]) if found else self.section.empty

    def openings(self, prompt: Prompt) -> Iterator[list[Message]]:
        """What the model is shown of the first piece, and so of each, without a memory."""
        first = next(chunks(self._document(prompt), self.section.chunk))
        yield self._chat(prompt, self.section.update, asked(prompt), self.section.empty, first)

    def conversations(self, prompt: Prompt) -> int:
        """Return the number of conversations of a trajectory, as if every chunk had the max length."""
        return -(-len(self._document(prompt)) // self.section.chunk) + 1

    def _document(self, prompt: Prompt) -> str:
        text = prompt.tags.get(self.section.document)
        if not isinstance(text, str) or not text:
            raise RolloutError(f"prompt {prompt.id} has no text in its column {self.section.document!r}")
        return text

    def _chat(self, prompt: Prompt, template: str, question: str, memory: str, piece: str) -> list[Message]:
        """The chat of the task with its last message replaced."""
        texts = {"question": question, "memory": memory, "chunk": piece}
        return [*prompt.messages[:-1], {"role": "user", "content": filled(template, texts)}]


def asked(prompt: Prompt) -> str:
    """The question: the last message of the task."""
    return str(prompt.messages[-1]["content"])


def filled(template: str, texts: dict[str, Any]) -> str:
    """A template with texts in it, which are never looked at again."""
    return re.sub(r"\{(question|memory|chunk)\}", lambda match: str(texts[match[1]]), template)


def chunks(document: str, size: int) -> Iterator[str]:
    """The document in order, nothing lost: pieces of at most `size` characters, ended behind a space if one is near."""
    start = 0
    while start < len(document):
        end = start + size
        if end < len(document):
            spaces = [match.end() for match in SPACE.finditer(document, start + size // 2, end)]
            end = spaces[-1] if spaces else end
        yield document[start:end]
        start = end
