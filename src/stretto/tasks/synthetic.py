"""Tasks that need no data: addition, reversing, sorting or copying strings, the secrets of games, and lookup in a list.

The prompts follow from the recipe alone: the same on every machine, in every process, whatever PYTHONHASHSEED is. More
strings (`count`) extend the set rather than redraw it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from itertools import count as counting
from itertools import product

from stretto.errors import Problem
from stretto.recipe.schema import Source, TaskSection
from stretto.tasks.template import LONGEST, chat, fill
from stretto.tasks.template import problems as template_problems
from stretto.types import Prompt

Drawn = tuple[str, dict[str, int | str], str]
"""(id, columns, answer) of a prompt."""
MAX_PROMPTS = 100_000
"""Prompts are held in memory; nobody trains on more of these."""
MAX_LENGTH = 1000
"""Longest string."""
ANSWERS: dict[str, Callable[[str], str]] = {
    "reverse": lambda text: text[::-1],
    "sort": lambda text: "".join(sorted(text)),
    "copy": lambda text: text,
}
"""The answer of each task on strings."""
KEYS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""What the pairs of lookup are called."""
TEMPLATES = {
    "addition": "What is {a}+{b}? Answer with just the number.",
    "reverse": "Write {text} backwards. Answer with just the result.",
    "sort": "Sort the characters of {text}. Answer with just the result.",
    "copy": "Repeat {text}. Answer with just the result.",
    "number": "I am thinking of a whole number from {low} to {high}. Guess it.",
    "code": "I have written down {length} characters, each one of {alphabet}. Guess them.",
    "lookup": "Which digit belongs to {key}? Answer with just the digit.",
}
"""The default message of each task."""
COLUMNS = {
    "addition": ("a", "b"),
    **dict.fromkeys(ANSWERS, ("text",)),
    "number": ("game", "low", "high"),
    "code": ("game", "length", "alphabet"),
    "lookup": ("key", "document", "evidence"),
}
"""What a template can name."""
SETTINGS = {
    "addition": {"max"},
    **{name: {"length", "alphabet", "count"} for name in ANSWERS},
    "number": {"range", "count"},
    "code": {"length", "alphabet", "count"},
    "lookup": {"pairs", "count"},
}
"""The keys of the source that mean something to each task."""


def prompts(task: TaskSection) -> Iterator[Prompt]:
    """The prompts of a task without problems, in a fixed order."""
    name = str(task.source.name)
    template = TEMPLATES[name] if task.prompt is None else task.prompt
    for id, columns, answer in _rows(task.source):
        messages = chat(fill(template, columns), task.system)
        yield Prompt(id=f"{name}/{id}", messages=messages, reference=answer, tags=columns)


def problems(task: TaskSection) -> Iterator[Problem]:
    """What is wrong with the task's settings."""
    source = task.source
    if source.name not in TEMPLATES:
        near = get_close_matches(source.name or "", TEMPLATES, n=1)
        fix = f"{f'did you mean {near[0]}? ' if near else ''}there are {', '.join(TEMPLATES)}"
        yield Problem(field="task.source.name", reason=f"there is no synthetic task {source.name!r}", fix=fix)
        return
    for key in ("max", "length", "alphabet", "count", "range", "pairs"):
        if key not in SETTINGS[source.name] and getattr(source, key) is not None:
            yield Problem(field=f"task.source.{key}", reason=f"has no effect on {source.name}", fix="remove it")
    yield from _size_problems(source)
    if task.prompt is not None:
        yield from template_problems(task.prompt, COLUMNS[source.name])
        if (length := task.prompt.count("{") * MAX_LENGTH) > LONGEST:
            reason = f"names columns so often that a message may have {length:,} characters"
            yield Problem(field="task.prompt", reason=reason, fix="name each once")


def _size_problems(source: Source) -> Iterator[Problem]:
    """Sets of prompts that are too large to hold or cannot exist."""
    if source.name == "addition":
        largest = int(MAX_PROMPTS**0.5) - 1
        if _largest(source) > largest:
            reason = f"has more than {MAX_PROMPTS} pairs of numbers"
            yield Problem(field="task.source.max", reason=reason, fix=f"use at most {largest}")
        return
    if source.name not in ANSWERS:
        yield from _secret_problems(source)
        return
    alphabet, (shortest, longest), wanted = _strings(source)
    if len(set(alphabet)) < len(alphabet):
        yield Problem(field="task.source.alphabet", reason="names a character twice", fix="name each once")
    elif shortest > longest:
        reason = f"the shortest length, {shortest}, is above the longest, {longest}"
        yield Problem(field="task.source.length", reason=reason, fix=f"write [{longest}, {shortest}]")
    elif longest > MAX_LENGTH:
        reason = f"strings of {longest} characters are too long"
        yield Problem(field="task.source.length", reason=reason, fix=f"use at most {MAX_LENGTH}")
    elif wanted > min(MAX_PROMPTS, possible := _possible(alphabet, shortest, longest)):
        most = min(MAX_PROMPTS, possible)
        reason = f"{wanted} strings are wanted, but there can be only {most} different ones"
        yield Problem(field="task.source.count", reason=reason, fix=f"use at most {most}, or longer strings")


def _secret_problems(source: Source) -> Iterator[Problem]:
    """The same of games and of lookup."""
    low, high = source.range or (0, 99)
    if low >= high:
        yield Problem(
            field="task.source.range", reason=f"there is nothing between {low} and {high}", fix="raise the end"
        )
    if (source.pairs or 1) > len(KEYS):
        fix = f"use at most {len(KEYS)}"
        yield Problem(field="task.source.pairs", reason=f"there are only {len(KEYS)} letters to name them", fix=fix)
    if (source.count or 1) > MAX_PROMPTS:
        yield Problem(field="task.source.count", reason="that is too many to hold", fix=f"use at most {MAX_PROMPTS}")


def _possible(alphabet: str, shortest: int, longest: int) -> int:
    """How many different strings there are."""
    return sum(len(alphabet) ** length for length in range(shortest, longest + 1))


def _largest(source: Source) -> int:
    return 20 if source.max is None else source.max


def _strings(source: Source) -> tuple[str, tuple[int, int], int]:
    """Alphabet, shortest and longest, how many: with the defaults."""
    alphabet = "0123456789" if source.alphabet is None else source.alphabet
    return alphabet, source.length or (3, 5), 2000 if source.count is None else source.count


def _rows(source: Source) -> Iterator[tuple[str, dict[str, int | str], str]]:
    """(id, columns, answer) of every prompt."""
    if source.name == "addition":
        for a, b in product(range(_largest(source) + 1), repeat=2):
            yield f"{a}+{b}", {"a": a, "b": b}, str(a + b)
    elif source.name in GAMES:
        yield from map(partial(GAMES[source.name], source), range(source.count or 2000))
    else:
        answer = ANSWERS[str(source.name)]
        for text in _draw(*_strings(source)):
            yield text, {"text": text}, answer(text)


def _number(source: Source, index: int) -> Drawn:
    """A secret number; nothing else tells one game from another, so its number is a column."""
    low, high = source.range or (0, 99)
    (drawn,) = _numbers(f"number|{index}", 1)
    return str(index), {"game": index, "low": low, "high": high}, str(low + drawn % (high - low + 1))


def _code(source: Source, index: int) -> Drawn:
    """A secret string."""
    alphabet, (length, _), _ = _strings(source)
    drawn = _numbers(f"code|{index}", length)
    columns: dict[str, int | str] = {"game": index, "length": length, "alphabet": alphabet}
    return str(index), columns, "".join(alphabet[number % len(alphabet)] for number in drawn)


def _lookup(source: Source, index: int) -> Drawn:
    """A list of letters with a digit each, in random order, and one of the letters."""
    drawn = _numbers(f"lookup|{index}", 2 * len(KEYS) + 1)
    keys = sorted(KEYS, key=lambda key: drawn[KEYS.index(key)])[: source.pairs or len(KEYS)]
    pairs = [f"{key}={drawn[len(KEYS) + place] % 10}" for place, key in enumerate(keys)]
    evidence = pairs[drawn[-1] % len(pairs)]
    document = "".join(f"{pair} " for pair in pairs)
    return str(index), {"key": evidence[0], "document": document, "evidence": evidence}, evidence[-1]


GAMES: dict[str, Callable[[Source, int], Drawn]] = {"number": _number, "code": _code, "lookup": _lookup}
"""Tasks whose rows are drawn one by one, by name."""


def _numbers(key: str, count: int) -> list[int]:
    """So many numbers that follow from the key."""
    draws = hashlib.shake_128(key.encode()).digest(4 * count)
    return [int.from_bytes(draws[at : at + 4], "little") for at in range(0, len(draws), 4)]


def _draw(alphabet: str, lengths: tuple[int, int], wanted: int) -> Iterator[str]:
    """Different strings, each length as often as the others until a length has no more."""
    left = {length: len(alphabet) ** length for length in range(lengths[0], lengths[1] + 1)}
    seen: set[str] = set()
    for index in counting():
        if len(seen) == wanted:
            return
        numbers = _numbers(f"strings|{index}", lengths[1] + 1)
        length = list(left)[numbers[0] % len(left)]
        text = "".join(alphabet[number % len(alphabet)] for number in numbers[1 : length + 1])
        if text not in seen:
            seen.add(text)
            yield text
            left[length] -= 1
            if left[length] == 0:
                del left[length]
