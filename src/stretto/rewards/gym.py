"""The scorers of reasoning-gym: what an answer is worth, partial credit included. Only to be called in a worker.

Some of these scorers evaluate the answer as Python, directly or through sympy. An answer is a stranger's text, so
these are only asked about answers that can be nothing but a literal or a formula; any other gets 0.
"""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from typing import Any

from stretto.rewards.answer import Pick, extract

LITERAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""The tasks whose scorers evaluate the answer as Python, once, and then compare it."""
SYMBOLIC = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""The tasks whose scorers hand the answer to sympy, which evaluates a string inside of what it evaluated once more."""
EVALUATED = LITERAL | SYMBOLIC
"""All of them; found by reading all scorers of the version that is installed."""
GRIDS = frozenset({"arc_agi", "rearc"})
"""The tasks whose scorers compare with tuples, which JSON has made lists of."""
MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
"""Where reasoning-gym's own prompts ask models to put the answer."""
FORMULA = re.compile(
    r"(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++|(?<![A-Za-z_0-9])[A-Za-z]++(?![A-Za-z_0-9])|[-+*/^(),\s]++)*+"
)
"""Numbers, words, operators and brackets: no dot behind a word, no underscore, no quotes. Nothing is tried twice: an
answer with a few long numbers could be split in billions of ways."""
NAMES = re.compile(r"[\w\s,]*")
"""Words, digits and commas: without brackets, dots or operators nothing can be called."""
WORDS = frozenset(
    {"pi", "exp", "log", "ln", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
)
"""The words of a formula, besides single letters."""
POWER = re.compile(r"\*\*|\^")
EXPONENT = re.compile(
    r"\s*(?:[-+]?\s*([0-9]{1,2})(?![0-9.])|\(\s*[-+]?\s*([0-9]{1,2})\s*(?:/\s*[0-9]{1,2}\s*)?\)|[A-Za-z])\s*+(?!\*\*|\^)"
)
"""A small number, a small fraction in brackets or a letter, and no power of its own behind it."""
LARGEST_POWER = 10_000
"""Most that the exponents of such powers may multiply to: 9^9^9 would take all memory before any deadline."""
LONGEST = 2000
"""Characters of a formula; none of these tasks needs more."""


def judge(
    answer: str,
    task: str,
    config: dict[str, Any],
    entry: dict[str, Any],
    pattern: str | None = None,
    pick: Pick = "last",
) -> float:
    """What the task's scorer gives for what `pattern` extracts, or what stands between <answer> tags, or all of it.

    Where the scorer can judge the task's own answer but not this one, the answer has a wrong format and gets 0.
    """
    marked = MARKED.findall(answer) if pattern is None else [extract(answer, pattern, pick)]
    found = marked[-1] if marked else answer
    if found is None:
        return 0.0
    found = found.strip()
    kind = entry["metadata"].get("source_dataset", task)
    own = found == str(entry["answer"]).strip()
    if kind in EVALUATED and not own and not (literal(found) if kind in LITERAL else formula(found)):
        return 0.0
    if kind in GRIDS:
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    scorer = _scorer(task, json.dumps(config, sort_keys=True))
    try:
        return float(scorer.score_answer(found, entry))
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        if entry["answer"] is None:
            raise
        scorer.score_answer(entry["answer"], entry)
        return 0.0


def literal(text: str) -> bool:
    """True for mere words, and for what is a Python literal and nothing else."""
    if len(text) > LONGEST:
        return False
    if NAMES.fullmatch(text):
        return True
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def formula(text: str) -> bool:
    """True for a formula of numbers, letters and known functions whose powers stay small. No quotes, so no strings."""
    words = re.findall(r"[A-Za-z]+", text)
    if len(text) > LONGEST or not FORMULA.fullmatch(text) or not all(len(w) == 1 or w in WORDS for w in words):
        return False
    size = 1
    for power in POWER.finditer(text):
        exponent = EXPONENT.match(text, power.end())
        if exponent is None:
            return False
        if not text[: power.start()].rstrip()[-1:].isalpha():  # of a number or a bracket: it will be computed
            size *= int(exponent[1] or exponent[2] or 1)
    return size <= LARGEST_POWER


@lru_cache(maxsize=16)
def _scorer(task: str, config: str) -> Any:
    """The task as the recipe set it; its prompts do not matter here."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import create_dataset

    settings = json.loads(config)
    if task == "composite":
        settings["datasets"] = [DatasetSpec(**each) for each in settings["datasets"]]
    return create_dataset(task, **settings, seed=0)


def _tuples(value: Any) -> Any:
    """Lists as tuples, however deep."""
    if isinstance(value, dict):
        return {key: _tuples(below) for key, below in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
