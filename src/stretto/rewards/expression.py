r"""Whether an answer is the same mathematical expression as the reference: 1/2, 0.5 and \frac{1}{2} are equal.

Only to be called in a worker process: parsing and comparing can take for ever, and the deadline of the call is what
ends it. The judge is `math_verify`, with its own deadlines off; they would work by signals and give 0 when they pass.
It builds expressions from what its grammars match and evaluates no text as Python.
"""

from __future__ import annotations

import logging
from typing import Any

MARKS = ("$", r"\boxed", r"\(", r"\[")
"""What says that a reference is marked as mathematics already."""


def judge(answer: str, reference: str) -> float:
    r"""1 if what \boxed{} holds, or else the last expression of the answer, equals the reference; 0 if there is none.

    ValueError if the reference is no expression: then nothing can be judged, and that is not the model's fault.
    """
    from math_verify import verify

    wanted = _parse(reference if any(mark in reference for mark in MARKS) else rf"\boxed{{{reference}}}")
    if not wanted:
        raise ValueError(f"the reference answer {reference[:80]!r} holds no mathematical expression")
    return float(verify(wanted, _parse(answer), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    """The expression of a text as math_verify has it; empty where there is none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would warn that its deadlines are off
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found: list[Any] = parse(text, extraction_config=targets, parsing_timeout=None)
    return found
