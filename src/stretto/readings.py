"""How what a model says is read: the numbers in it, as people write them, and its blocks of code.

What it says is hostile text of any length, so all of this takes time linear in it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

NUMBER = re.compile(
    r"""
    (?P<other> (?<![\w.]) [-+]?
        (?: 0[xX][0-9a-fA-F] | 0[bB][01] | 0[oO][0-7] | [0-9]++_[0-9] )
        \w*+ (?: \.\w++ )*+ )                       # 0x7f, 1_000
    | (?: (?<![\w)\]}%]) [-+\N{MINUS SIGN}] )?+      # a sign, unless it stands between operands: 5-3 holds 5 and 3
    (?: [0-9]{1,3}+ (?: ,[0-9]{3} )+ (?![0-9])     # 1,234,567
      | [0-9]++                                    # 1234
      | (?<![\w.]) (?= \.[0-9] )                   # .5
    )
    (?: \.[0-9]++ )?+                              # so the full stop of "7." is not part of it
    (?: [eE] [-+]? [0-9]{1,3}+ (?![0-9]) )?
    (?: (?<=[0-9]) / (?=0*[1-9]) [0-9]++ (?![.,]?[0-9]) )?   # 3/4, but nothing divided by zero
    """,
    re.VERBOSE,
)
"""A number in running text, or a literal of a program, which is none (`other`). Without nested repetition, so that it
reads any text in linear time."""
MAX_CHARACTERS = 1000
"""Longer numbers have no value: exact arithmetic on them would be a way to stall us."""
FENCE = re.compile(
    r"""
    ^ (?P<before> (?: (?!```|~~~) [^\n] )*+ )
    (?P<run> `{3,}+ | ~{3,}+ )
    [ \t]* \{?\.? (?P<language> [\w+#-]*+ )
    (?P<rest> [^\n`]* ) $
    """,
    re.MULTILINE | re.VERBOSE,
)
"""A line that may open or close a block of code."""
ONE_LINE = re.compile(r"```[ \t]*(?:python|py|python3)[ \t]+([^\n`]+)```[ \t]*$", re.MULTILINE | re.IGNORECASE)
"""A block of code that is opened and closed in one line."""
MARGIN = re.compile(r"(?:>?[ \t])*+")
"""What stands before a line in an item of a list, or in a quotation."""
PYTHON = frozenset({"python", "py", "python3", "py3", "ipython", "ipython3", "cpython"})
"""Languages of a block of Python."""
QUOTED = re.compile(
    r"""
    \#[^\n]*+
    | (?P<long> \"{3} (?: \\. | (?!\"{3}) . )*+ | '{3} (?: \\. | (?!'{3}) . )*+ ) (?: \"{3} | '{3} )?
    | " (?: \\. | [^"\\\n] )*+ "? | ' (?: \\. | [^'\\\n] )*+ '?
    """,
    re.VERBOSE | re.DOTALL,
)
"""A comment or a string of Python."""
MOST_FENCES = 200
"""Number of fences that are read, from the end of a text."""
MOST_SEARCHES = 16
"""Number of blocks that are searched for fences inside of strings."""
LONGEST_PARSED = 30_000
"""Max number of characters of a program that is parsed. A longer one counts as a program."""


def numbers(text: str) -> Iterator[str]:
    """Every number in a text, as it is written there."""
    return (match.group() for match in NUMBER.finditer(text) if match["other"] is None)


def value(number: str) -> Fraction | None:
    """The exact value of a number as `numbers` finds it, or none where it is too long to be meant."""
    if len(number) > MAX_CHARACTERS:
        return None
    numerator, _, denominator = number.replace(",", "").replace("\N{MINUS SIGN}", "-").partition("/")
    return Fraction(Decimal(numerator)) / int(denominator or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code in a text."""

    code: str
    """Its lines, without the margin of the first one."""
    behind: str
    """The text behind the fence that closes it."""
    closed: bool
    """False if it goes to the end of the text, or to the next block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fence:
    begin: int
    """Place where a block ends that this fence closes."""
    mark: tuple[int, int]
    """Place of its backticks or tildes."""
    end: int
    """Place where its line ends."""
    run: str
    """Its backticks or tildes."""
    language: str
    alone: bool
    """True if no words stand before it in its line."""


def program_block(text: str) -> Block | None:
    """Find the block of Python that is the program of a text. `None` without such a block.

    A fence with a language opens a block wherever it stands; a fence inside of a string of a program belongs to the
    program. The last block that names Python and can be parsed comes first, then the last one without a language that
    can, then the last one that names Python, then the last one without a language.
    """
    text = text.replace("\r\n", "\n")
    fences = _fences(text)
    tagged, plain = list[tuple[bool, Block]](), list[tuple[bool, Block]]()
    place, searches, spent = 0, 0, set[int]()
    while place < len(fences):
        opener = fences[place]
        end = next((n for n in range(place + 1, len(fences)) if _closes(fences[n], opener)), len(fences))
        if opener.language and opener.language not in PYTHON:
            inner = next((n for n in range(place + 1, end) if fences[n].language in PYTHON), end)
            place = inner if inner == len(fences) or fences[inner].language else inner + 1
            continue
        block = _block(text, fences, place, end)
        parsed = _is_program(block.code)
        if not parsed and searches < MOST_SEARCHES:
            searches += 1
            for other in _other_ends(text, fences, place, end):
                longer = _block(text, fences, place, other)
                if _is_program(longer.code):
                    block, end, parsed = longer, other, True
                    break
        if opener.language:
            tagged.append((parsed, block))
        elif block.code.strip() and (place not in spent or (parsed and block.closed)):
            plain.append((parsed, block))
        if parsed:
            place = end if end == len(fences) or fences[end].language else end + 1
        else:  # the fence that closes a block may have been meant to open one
            spent.add(end)
            place += 1
    order = [*(b for parsed, b in plain if not parsed), *(b for parsed, b in tagged if not parsed)]
    order += [*(b for parsed, b in plain if parsed), *(b for parsed, b in tagged if parsed)]
    if not order and (spread := ONE_LINE.sub(r"```python\n\1\n```", text)) != text:
        return program_block(spread)
    return order[-1] if order else None


def _fences(text: str) -> list[_Fence]:
    """The last fences of a text. Behind words stand only a fence and, at most, its language."""
    found = deque[_Fence](maxlen=MOST_FENCES)
    for match in FENCE.finditer(text):
        alone = MARGIN.fullmatch(match["before"]) is not None
        language = match["language"].lower()
        words = match["rest"].strip() or (match["run"][0] == "~" and language not in PYTHON)
        if alone or not words:
            begin = match.start() if alone else match.start("run")
            found.append(
                _Fence(
                    begin=begin,
                    mark=match.span("run"),
                    end=match.end(),
                    run=match["run"],
                    language=language,
                    alone=alone,
                )
            )
    return list(found)


def _closes(fence: _Fence, opener: _Fence) -> bool:
    """True if the block of `opener` ends at `fence` by the rules of Markdown, or because another block opens."""
    return fence.alone and fence.run.startswith(opener.run)


def _other_ends(text: str, fences: Sequence[_Fence], place: int, end: int) -> Iterator[int]:
    """Fences at which a block may end that is no program up to `end`: outside of its strings, or behind words."""
    opener = fences[place]
    strings = [match.span("long") for match in QUOTED.finditer(text, opener.end) if match["long"]]
    inside = [any(begin < fence.begin < stop for begin, stop in strings) for fence in fences]
    closing = (n for n in range(place + 1, len(fences)) if _closes(fences[n], opener) and not inside[n])
    if (outside := next(closing, len(fences))) != end:
        yield outside
    nearest = next((n for n in range(place + 1, len(fences)) if fences[n].run[0] == opener.run[0]), end)
    if nearest not in (end, outside):
        yield nearest


def _block(text: str, fences: Sequence[_Fence], place: int, end: int) -> Block:
    begin = fences[place].end + 1
    if end == len(fences):
        return Block(code=dedented(text[begin:]), behind="", closed=False)
    fence = fences[end]
    code, behind = text[begin : max(begin, fence.begin)], text[fence.mark[1] :]
    return Block(code=dedented(code), behind=behind, closed=fence.language not in PYTHON)


def _is_program(code: str) -> bool:
    """True if a text can be parsed as Python and is more than the names and values that a program prints."""
    if len(code) > LONGEST_PARSED:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    acting = (ast.Call, ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)
    return any(
        not isinstance(line, ast.Expr) or any(isinstance(node, acting) for node in ast.walk(line)) for line in body
    )


def dedented(code: str) -> str:
    """A block of code without the margin of its first line, as in an item of a list."""
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    match = MARGIN.match(first)
    margin = match[0] if match else ""
    if not margin:
        return code
    blank = margin.strip()
    return "\n".join(
        line.removeprefix(margin) if line.startswith(margin) else ("" if line.strip() == blank else line.lstrip(" \t"))
        for line in lines
    )
