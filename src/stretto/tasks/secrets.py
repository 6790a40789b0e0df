"""Prompts with something that their messages do not say: the secrets of games, and logs that are too long to be said.

Each is drawn by its number, so that more of them (`count`) extend the set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from stretto.errors import Problem
from stretto.recipe.schema import CodeSource, LatestSource, LookupSource, NumberSource

Drawn = tuple[str, dict[str, int | str], str]
"""(id, columns, answer) of a prompt."""
SecretSource = NumberSource | CodeSource | LookupSource | LatestSource
SECRET = (NumberSource, CodeSource, LookupSource, LatestSource)
MAX_PROMPTS = 100_000
"""Prompts are held in memory."""
KEYS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The letters of logs."""
TEMPLATES = {
    "number": "I am thinking of a whole number from {low} to {high}. Guess it.",
    "code": "I have written down {length} characters, each one of {alphabet}. Guess them.",
    "lookup": "Which digit was {key} given last? Answer with just the digit.",
    "latest": "Which of the letters {letters} came last? Answer with just the letter.",
}
"""The default message of each task."""
COLUMNS = {
    "number": ("game", "low", "high"),
    "code": ("game", "length", "alphabet"),
    "lookup": ("key", "document", "evidence"),
    "latest": ("kind", "letters", "document", "evidence"),
}
"""What a template can name."""


def problems(source: SecretSource) -> Iterator[Problem]:
    """Settings that cannot be."""
    if source.count > MAX_PROMPTS:
        fix = f"use at most {MAX_PROMPTS}"
        yield Problem(field="task.source.count", reason=f"{source.count} prompts are too many to hold", fix=fix)
    if isinstance(source, NumberSource) and source.range[0] >= source.range[1]:
        reason = f"{source.range[1]} is not above {source.range[0]}, so there is nothing to guess"
        yield Problem(field="task.source.range", reason=reason, fix="write [smallest, largest]")
    if isinstance(source, CodeSource) and len(set(source.alphabet)) < len(source.alphabet):
        yield Problem(field="task.source.alphabet", reason="names a character twice", fix="name each once")
    if isinstance(source, LatestSource) and source.kinds * source.each > len(KEYS):
        reason = f"{source.each} for each of {source.kinds} kinds are more letters than there are, {len(KEYS)}"
        yield Problem(field="task.source.letters", reason=reason, fix=f"use at most {len(KEYS) // source.kinds}")


def rows(source: SecretSource) -> Iterator[Drawn]:
    """Every prompt, in order."""
    for index in range(source.count):
        match source:
            case NumberSource():
                yield _number(source, index)
            case CodeSource():
                yield _code(source, index)
            case LookupSource():
                yield _lookup(source, index)
            case LatestSource():
                yield _latest(source, index)


def numbers(key: str, count: int) -> list[int]:
    """So many numbers that follow from the key, the same everywhere."""
    draws = hashlib.shake_128(key.encode()).digest(4 * count)
    return [int.from_bytes(draws[at : at + 4], "little") for at in range(0, len(draws), 4)]


def _number(source: NumberSource, index: int) -> Drawn:
    """A secret number; nothing else tells one game from another, so its number is a column."""
    low, high = source.range
    (drawn,) = numbers(f"number|{index}", 1)
    return str(index), {"game": index, "low": low, "high": high}, str(low + drawn % (high - low + 1))


def _code(source: CodeSource, index: int) -> Drawn:
    """A secret string."""
    letters = [source.alphabet[drawn % len(source.alphabet)] for drawn in numbers(f"code|{index}", source.length)]
    return str(index), {"game": index, "length": source.length, "alphabet": source.alphabet}, "".join(letters)


def _lookup(source: LookupSource, index: int) -> Drawn:
    """A log in which letters are given digits, over and over, and one of the letters."""
    drawn = numbers(f"lookup|{index}", 2 * source.pairs + 1)
    letters = [KEYS[number % source.keys] for number in drawn[: source.pairs]]
    pairs = [f"{letter}{number % 10}" for letter, number in zip(letters, drawn[source.pairs : -1], strict=True)]
    asked = letters[drawn[-1] % source.pairs]
    answer = {pair[0]: pair[1] for pair in pairs}[asked]  # of a letter that was given several digits the last
    document = "".join(f"{pair}, " for pair in pairs)
    return str(index), {"key": asked, "document": document, "evidence": f"{asked}(.)"}, answer


def _latest(source: LatestSource, index: int) -> Drawn:
    """A log of letters, and one of their kinds, the last of which may stand at any place with the same chance."""
    drawn = numbers(f"latest|{index}", source.length + 2)
    kind, place = drawn[-2] % source.kinds, drawn[-1] % source.length
    letters = KEYS[: source.kinds * source.each]
    asked = letters[kind * source.each : (kind + 1) * source.each]
    others = "".join(letter for letter in letters if letter not in asked)
    document = "".join(
        choice[number % len(choice)]
        for choice, number in zip([letters] * place + [asked] + [others] * source.length, drawn[:-2], strict=False)
    )
    columns: dict[str, int | str] = {"kind": kind + 1, "letters": asked, "document": document, "evidence": f"[{asked}]"}
    return str(index), columns, document[place]
