"""A search over a local collection of texts: BM25 over passages, in memory, without an index on disk.

The collection is a folder of .txt and .md files, whose passages are paragraphs, or a JSONL file with a passage per line
(`text`, and `title` if there is one). It is for collections of some ten thousand passages; for larger ones write a tool
of your own that asks a search engine. Robertson and Zaragoza 2009.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Self

from stretto.errors import RecipeError

FIELD = "environment.corpus"
WORD = re.compile(r"\w+")
SATURATION, LENGTH = 1.5, 0.75
"""k1 and b of BM25."""
LONGEST = 2000
"""Characters of a passage; longer paragraphs are cut into several."""
MOST = 200_000
"""Passages."""
QUERY = 64
"""Words of a query that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What is found."""

    title: str
    """Where it is from."""
    text: str
    """What it says."""


class Corpus:
    """Passages, and which words stand where."""

    def __init__(self, passages: list[Passage]) -> None:
        self.passages = passages
        self.postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.lengths: list[int] = []
        for place, passage in enumerate(passages):
            words = Counter(_words(f"{passage.title} {passage.text}"))
            self.lengths.append(words.total())
            for word, often in words.items():
                self.postings[word].append((place, often))
        self.mean = sum(self.lengths) / max(1, len(self.lengths))

    @classmethod
    def read(cls, path: str | None, *, root: Path) -> Self:
        """The collection of a recipe. RecipeError where there is none to be read."""
        if path is None:
            raise RecipeError.of(FIELD, "the tool search needs a collection of texts", "name a folder or a .jsonl file")
        place = root / path
        try:
            passages = list(_folder(place) if place.is_dir() else _lines(place))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError.of(FIELD, f"{place} cannot be read: {error}", "correct the path or the file") from None
        if not passages:
            fix = "use a folder with .txt or .md files, or a .jsonl file with a `text` per line"
            raise RecipeError.of(FIELD, f"{place} holds no texts", fix)
        if len(passages) > MOST:
            reason = f"{place} holds {len(passages):,} passages, more than the {MOST:,} that are kept in memory"
            raise RecipeError.of(FIELD, reason, "use a part, or a tool of your own that asks a search engine")
        return cls(passages)

    def search(self, query: str, most: int) -> list[Passage]:
        """The passages that fit best; of equals, the earlier one."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_words(query)[:QUERY]):
            found = self.postings.get(word, ())
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for place, often in found:
                long = 1 - LENGTH + LENGTH * self.lengths[place] / self.mean
                scores[place] += rarity * often * (SATURATION + 1) / (often + SATURATION * long)
        best = nsmallest(most, scores, key=lambda place: (-scores[place], place))
        return [self.passages[place] for place in best]

    def shown(self, query: str, most: int) -> str:
        """What a search found, as the model reads it."""
        found = self.search(query, most)
        return "\n\n".join(f"[{each.title}] {each.text}" if each.title else each.text for each in found) or "nothing"


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _folder(folder: Path) -> Iterator[Passage]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md") and path.is_file())
    for path in files:
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            text = paragraph.strip()
            for start in range(0, len(text), LONGEST):
                yield Passage(title=str(path.relative_to(folder)), text=text[start : start + LONGEST])


def _lines(path: Path) -> Iterator[Passage]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield Passage(title=str(row.get("title", "")), text=str(row["text"]))
            except (ValueError, AttributeError, KeyError, RecursionError):
                fix = 'write one object per line: {"text": ..., "title": ...}'
                raise RecipeError.of(FIELD, f"{path}:{number} is no object with a `text`", fix) from None
