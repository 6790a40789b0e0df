"""The scorers of reasoning-gym: what an answer is worth, partial credit included. Only to be called in a worker.

Some of these scorers evaluate the answer as Python, directly or through sympy. An answer is a stranger's text, so only
literals are evaluated: `eval` is another function in the modules that call it, because there even a mere word would be
a variable of the scorer. What goes to sympy has to be a formula, and small: plain arithmetic where a number is asked.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

from stretto.rewards import tree
from stretto.rewards.answer import Pick, extract
from stretto.rewards.size import TooLargeError

LITERAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""The tasks whose scorers evaluate the answer as Python, once, and then compare it."""
ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""The tasks whose scorers hand the answer to sympy to get a number."""
SYMBOLIC = ARITHMETIC | {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
"""The tasks whose scorers hand the answer to sympy, which evaluates a string inside of what it evaluated once more."""
GRIDS = frozenset({"arc_agi", "rearc"})
"""The tasks whose scorers compare with tuples, which JSON has made lists of."""
NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)
LONG_COUNT = re.compile(r"[0-9]{4}")
REFUSED = {
    "coin_flip": re.compile(r"e[-+]?[0-9_]{4}", re.IGNORECASE),  # is made a fraction with all its digits
    "complex_arithmetic": NO_NUMBER,  # the distance to it is no number, which passes for a small one
    "number_sorting": NO_NUMBER,
    "rubiks_cube": LONG_COUNT,  # a move is repeated so often
    "rush_hour": LONG_COUNT,
}
"""Task -> what no right answer of it holds, and what its scorer would take for one or never be done with."""
MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
"""Where reasoning-gym's own prompts ask models to put the answer."""
FORMULA = re.compile(r"[A-Za-z0-9.+\-*/^(),\s]*+")
"""Characters of a formula: no quotes, so no strings, no underscore, and no comment whose numbers would count."""
SUM = re.compile(r"[0-9+\-*/^()\s]*+")
"""The same of plain arithmetic: the scorers find the integers that it uses, and would not find that of 24e0."""
FUNCTIONS = frozenset({"exp", "log", "ln", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"})
"""What a formula may call."""
LONGEST = 2000
"""Characters of a formula or literal; none of these tasks needs more."""


def prepare(task: str, config: dict[str, Any]) -> None:
    """Loads what the first verdict would have to wait for."""
    _scorer(task, json.dumps(config, sort_keys=True))


def judge(
    answer: str,
    task: str,
    config: dict[str, Any],
    entry: dict[str, Any],
    pattern: str | None = None,
    pick: Pick = "last",
) -> float:
    """The verdict alone."""
    return verdict(answer, task, config, entry, pattern, pick)[0]


def verdict(
    answer: str,
    task: str,
    config: dict[str, Any],
    entry: dict[str, Any],
    pattern: str | None = None,
    pick: Pick = "last",
) -> tuple[float, bool]:
    """What the task's scorer gives for what `pattern` extracts, or what stands between <answer> tags, or all of it.

    The second is true for an answer that is 0 because it would be too large to compute. Where the scorer can judge the
    task's own answer but not this one, the answer has a wrong format and gets 0.
    """
    marked = MARKED.findall(answer) if pattern is None else [extract(answer, pattern, pick)]
    found = marked[-1] if marked else answer
    if found is None:
        return 0.0, False
    found = found.strip()
    kind = entry["metadata"].get("source_dataset", task)
    if found != str(entry["answer"]).strip():
        if kind in REFUSED and REFUSED[kind].search(found):
            return 0.0, True
        try:
            if kind in SYMBOLIC:
                measure(found, SUM if kind in ARITHMETIC else FORMULA, letters=kind not in ARITHMETIC)
        except TooLargeError:
            return 0.0, True
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return 0.0, False
    if kind in GRIDS:
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    scorer = _scorer(task, json.dumps(config, sort_keys=True))
    try:
        score = float(scorer.score_answer(found, entry))
        if score > FOR_FORMAT and kind in STRICTER:
            score = min(score, STRICTER[kind](found, entry))
        return score, False
    except Exception:  # also too deep or too large for Python
        scorer.score_answer(entry["answer"] or "", entry)
        return 0.0, False


def literal(text: str) -> bool:
    """True for what is a Python literal and nothing else; a mere word is none."""
    try:
        read_literal(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def read_literal(text: str) -> Any:
    """What a Python literal says; an exception for anything else. It takes the place of `eval`."""
    if len(text) > LONGEST:
        raise ValueError("too long")
    return ast.literal_eval(text)


def formula(text: str) -> bool:
    """True for a formula of numbers, letters and known functions that stays small when it is computed."""
    try:
        measure(text, FORMULA, letters=True)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TooLargeError):
        return False
    return True


def measure(text: str, allowed: re.Pattern[str], *, letters: bool) -> None:
    """ValueError or the like where a text is no formula, TooLargeError where computing it would cost too much."""
    if len(text) > LONGEST or not allowed.fullmatch(text):
        raise ValueError("no formula")
    tree.of_text(text, FUNCTIONS if letters else frozenset(), letters=letters)


def _halts(answer: str, entry: dict[str, Any]) -> float:
    """The package compares `bool(answer)`, which is true for every word."""
    return float(answer.lower() == str(entry["answer"]).lower())


def _probability(answer: str, entry: dict[str, Any]) -> float:
    """The package gives full marks to a `0` where 0.23 is right, as the texts agree as far as the shorter one goes."""
    given, wanted = Fraction(answer.replace(",", "")), Fraction(entry["answer"].replace(",", ""))
    if abs(given - wanted) <= min(Fraction(1, 10_000), wanted / 100):
        return 1.0
    texts = f"{float(given):.10g}", f"{float(wanted):.10g}"
    same = next((n for n, (mine, its) in enumerate(zip(*texts, strict=False)) if mine != its), min(map(len, texts)))
    return min(0.99, same / max(map(len, texts)))


def _makes_24(answer: str, entry: dict[str, Any]) -> float:
    """The package takes any four numbers, and cuts fractions off the result."""
    tree = ast.parse(answer, mode="eval").body
    used = sorted(each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and type(each.value) is int)
    return float(used == sorted(entry["metadata"]["numbers"]) and _value(tree) == 24)


def _value(node: ast.expr) -> Fraction:
    """The exact value of plain arithmetic. KeyError or ValueError for another operation."""
    operations: dict[type[ast.AST], Callable[..., Fraction]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.USub: operator.neg, ast.UAdd: operator.pos,
    }  # fmt: skip
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=op, operand=operand):
            return operations[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right):
            return operations[type(op)](_value(left), _value(right))
    raise ValueError("no arithmetic")


def _follows(answer: str, entry: dict[str, Any]) -> float:
    """The package takes a premise for a conclusion from the premises. Like a tautology, that is worth 0.25 here: what
    one premise says alone, premises joined by "and", and anything at all where the premises contradict each other."""
    from reasoning_gym.logic.propositional_logic import Expression

    names, premises = entry["metadata"]["variables"], entry["metadata"]["premises"]
    worlds = [dict(zip(names, values, strict=True)) for values in product((False, True), repeat=len(names))]

    def models(text: str) -> frozenset[int]:
        expression = Expression.from_string(text)
        return frozenset(n for n, world in enumerate(worlds) if expression.evaluate(world))

    said, known = models(answer), [models(premise) for premise in premises]
    joined = {frozenset(range(len(worlds)))}
    for each in known:
        joined |= {before & each for before in joined}
    inferred = frozenset.intersection(*known) and said not in joined and not any(each <= said for each in known)
    return 1.0 if inferred else 0.25


STRICTER: dict[str, Callable[[str, dict[str, Any]], float]] = {
    "coin_flip": _probability,
    "game_of_life_halting": _halts,
    "propositional_logic": _follows,
    "puzzle24": _makes_24,
}
"""Task -> most that an answer is worth. The package gives full marks to some that are wrong, or that say nothing."""
FOR_FORMAT = 0.1
"""Scores up to here are for an answer's format alone."""


@lru_cache(maxsize=16)
def _scorer(task: str, config: str) -> Any:
    """The task as the recipe set it; its prompts do not matter here."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    for name in LITERAL:
        vars(sys.modules[DATASETS[name][0].__module__])["eval"] = read_literal
    settings = json.loads(config)
    if task == "composite":
        settings["datasets"] = [DatasetSpec(**each) for each in settings["datasets"]]
    return create_dataset(task, **settings, seed=0)


def _tuples(value: Any) -> Any:
    """Lists as tuples, however deep."""
    if isinstance(value, dict):
        return {key: _tuples(below) for key, below in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
