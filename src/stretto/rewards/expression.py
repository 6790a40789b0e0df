r"""Whether an answer is the same mathematical expression as the reference: 1/2, 0.5 and \frac{1}{2} are equal.

Only to be called in a worker process: parsing and comparing can take for ever, and the limits of the call are what
ends it. The judge is `math_verify`, with its own deadlines off; they would work by signals and give 0 when they pass.
It builds expressions from what its grammars match, as they are written, and evaluates no text as Python. What would
be too large once it is computed is not computed: it is right only if it is written like the reference.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from stretto.rewards.size import TooLargeError
from stretto.rewards.tree import of_sympy

MARKS = ("$", r"\boxed", r"\(", r"\[")
"""What says that a reference is marked as mathematics already."""
MONEY = re.compile(r"\\[$]|\\(?:pounds|euro)\b|[\u00a3\u00a5\u20a0-\u20cf]")
"""Signs of currencies, which say nothing of a value. A bare dollar may be a mark of mathematics."""
BRACES = re.compile(r"\\[{}]|(?P<box>\\(?:boxed|fbox|framebox)\s*\{)|[{}]")
"""Braces that open and close a group, those of a box by name, and those that are written as such."""
EMPTY = re.compile(r"\\varnothing(?![A-Za-z])")
DOT = re.compile(r"([0-9])[.,;](?=\s*[}$]|\s*\\[)\]]|\s*\Z)")
"""A number, and the mark that ends a sentence."""
REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,30})[.]([0-9]{0,30})\\(?:overline|bar|dot)\s*(?:\{([0-9]{1,30})\}|([0-9]))"
)
"""A decimal fraction with digits that repeat for ever."""
PERCENT = re.compile(r"\\?%|\bper\s?cent\b|\bpct\b", re.IGNORECASE)
HUNDREDTHS = re.compile(
    r"(?<![0-9.,])([0-9][0-9,]*(?:[.][0-9]+)?)(?:\s|~|\\[,;:!])*(\\(?:text|mbox|mathrm)\s*\{\s*)?"
    r"(?:\\?%|(?:per\s?cent|pct)\b)(?(2)\s*\})",
    re.IGNORECASE,
)
"""A number with a sign of percent."""
DENIAL = re.compile(
    r"\\(?:text\w*|mbox|mathrm|mathbf|mathit|operatorname)\s*\{(?:[^{}]|\{[^{}]*\})*?"
    r"(?:\b(?:not|cannot|no|wrong|incorrect|false|never|unless)\b|n['\u2019]t)",
    re.IGNORECASE,
)
"""Words that take a number back. `math_verify` takes words behind a number for its unit."""

COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
THOUSANDS = re.compile(r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))")
"""A thin space between groups of three digits."""
SIGNS = {0xFF10 + digit: str(digit) for digit in range(10)} | {
    ord("\u00b0"): r"^\circ ",
    ord("\u00bc"): r"\frac{1}{4}",
    ord("\u00bd"): r"\frac{1}{2}",
    ord("\u00be"): r"\frac{3}{4}",
}
"""Characters that LaTeX writes in another way: wide digits, degrees, fractions."""


def prepare() -> None:
    """Loads what the first verdict would have to wait for."""
    _parse(r"\boxed{\frac{1}{2}}")


def judge(answer: str, reference: str) -> float:
    """The verdict alone."""
    return verdict(answer, reference)[0]


def verdict(answer: str, reference: str) -> tuple[float, bool]:
    r"""1 if what \boxed{} holds, or else the last expression of the answer, equals the reference; 0 if there is none.

    The second is true for an answer that is 0 because it would be too large to compute. ValueError if the reference is
    no expression: then nothing can be judged, and that is not the model's fault.
    """
    wanted = _reference(reference)
    if not wanted:
        raise ValueError(f"the reference answer {reference[:80]!r} holds no mathematical expression")
    answer = _plain(answer)
    if not PERCENT.search(reference):
        answer = HUNDREDTHS.sub(lambda match: match[1].replace(",", "") + "/100", answer)
    boxes = _boxes(answer)
    if boxes and DENIAL.search(boxes[-1]) and not DENIAL.search(reference):
        return 0.0, False
    score, costly = _compared(wanted, boxes[-1] if boxes else answer)
    if score < 1.0 and len(set(boxes)) > 1:  # one box for each member of a set
        score, also = _compared(wanted, answer)
        costly = costly or also
    return score, costly and score < 1.0


def _compared(wanted: list[Any], answer: str) -> tuple[float, bool]:
    """Score of what is found in an answer, and `True` for a score of 0 because it would be too large to compute."""
    from math_verify import verify

    found = _parse(answer)
    costly = any(map(_too_large, found))
    if costly or any(map(_too_large, wanted)):
        same = _written_alike(wanted, found)
        return float(same), costly and not same
    return float(verify(wanted, found, timeout_seconds=None)), False


def _reference(text: str) -> list[Any]:
    """The expression of a reference, which need not be marked as mathematics."""
    text = _plain(text)
    found = _parse(text if any(mark in text for mark in MARKS) else rf"\boxed{{{text}}}")
    if not found and text.count("$") % 2 and (amount := text.replace("$", "").strip()):  # a currency, not a mark
        found = _parse(rf"\boxed{{{amount}}}")
    return found


def _plain(text: str) -> str:
    """Write a text as `math_verify` knows it: no currency or color, no full stop behind a number, 1/3 for 0.333..."""
    text = COLOR.sub("", MONEY.sub("", text.translate(SIGNS)))
    text = THOUSANDS.sub("", EMPTY.sub(r"\\emptyset", text))
    return DOT.sub(r"\1", REPEATING.sub(_fraction, text))


def _fraction(match: re.Match[str]) -> str:
    whole, once, again = match[1], match[2], match[3] or match[4]
    top = int(whole + once + again) - int("0" + whole + once)
    return rf"\frac{{{top}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}"


def _boxes(text: str) -> list[str]:
    """Every box that is closed and holds something, in order; of a box inside of another only the outer one."""
    found, opened = list[tuple[int, str]](), list[tuple[int, int] | None]()
    for brace in BRACES.finditer(text):
        if brace["box"]:
            opened.append(brace.span())
        elif brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}" and opened and (box := opened.pop()) is not None:
            begin, inside = box
            while found and found[-1][0] > begin:
                found.pop()
            if content := text[inside : brace.start()].strip():
                found.append((begin, rf"\boxed{{{content}}}"))
    return [box for _, box in found]


def _written_alike(wanted: list[Any], found: list[Any]) -> bool:
    """True if one of the answer's expressions is the reference's as it stands there; nothing is computed."""
    try:
        return any(type(one) is type(other) and one == other for one in wanted for other in found)
    except RecursionError:
        return False


def _too_large(expression: Any) -> bool:
    """True if computing it would cost more than any answer is worth. A text is never computed."""
    if isinstance(expression, str):
        return False
    try:
        of_sympy(expression)
    except TooLargeError:
        return True
    except Exception:  # what has no size that we know is left to the limits of the process
        return False
    return False


def _parse(text: str) -> list[Any]:
    """The expression of a text as math_verify has it; empty where there is none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would warn that its deadlines are off
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found: list[Any] = parse(text, extraction_config=targets, parsing_timeout=None)
    return found
