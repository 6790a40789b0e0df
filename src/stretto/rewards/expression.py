r"""Whether an answer is the same mathematical expression as the reference: 1/2, 0.5 and \frac{1}{2} are equal.

Only to be called in a worker process: parsing and comparing can take for ever, and the limits of the call are what
ends it. The judge is `math_verify`, with its own deadlines off; they would work by signals and give 0 when they pass.
It builds expressions from what its grammars match, as they are written, and evaluates no text as Python. What would
be too large once it is computed is not computed: it is right only if it is written like the reference.
"""

from __future__ import annotations

import logging
from typing import Any

from stretto.rewards.size import TooLargeError
from stretto.rewards.tree import of_sympy

MARKS = ("$", r"\boxed", r"\(", r"\[")
"""What says that a reference is marked as mathematics already."""


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
    from math_verify import verify

    wanted = _parse(reference if any(mark in reference for mark in MARKS) else rf"\boxed{{{reference}}}")
    if not wanted:
        raise ValueError(f"the reference answer {reference[:80]!r} holds no mathematical expression")
    found = _parse(answer)
    costly = any(map(_too_large, found))
    if costly or any(map(_too_large, wanted)):
        same = _written_alike(wanted, found)
        return float(same), costly and not same
    return float(verify(wanted, found, timeout_seconds=None)), False


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
