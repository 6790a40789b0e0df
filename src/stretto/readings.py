"""How what a model says is read: the numbers in it, as people write them, and its blocks of code.

What it says is hostile text of any length, so all of this takes time linear in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

NUMBER = re.compile(
    r"""
    (?: (?<![\w)\]}%]) [-+\N{MINUS SIGN}] )?+      # a sign, unless it stands between operands: 5-3 holds 5 and 3
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
"""A number in running text. Without nested repetition, so that it reads any text in linear time."""
MAX_CHARACTERS = 1000
"""Longer numbers have no value: exact arithmetic on them would be a way to stall us."""


def numbers(text: str) -> Iterator[str]:
    """Every number in a text, as it is written there."""
    return (match.group() for match in NUMBER.finditer(text))


def value(number: str) -> Fraction | None:
    """The exact value of a number as `numbers` finds it, or none where it is too long to be meant."""
    if len(number) > MAX_CHARACTERS:
        return None
    numerator, _, denominator = number.replace(",", "").replace("\N{MINUS SIGN}", "-").partition("/")
    return Fraction(Decimal(numerator)) / int(denominator or 1)


def dedented(code: str, indentation: str) -> str:
    """A block of code without the indentation of its fence, as in an item of a list; the first line says whether the
    code has it too."""
    lines = code.split("\n")
    if not next((line for line in lines if line.strip()), "").startswith(indentation):
        return code
    return "\n".join(
        line.removeprefix(indentation) if line.startswith(indentation) else line.lstrip(" \t") for line in lines
    )
