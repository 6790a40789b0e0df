"""A calculator for what a model wrote: arithmetic by its syntax tree, with bounds; nothing is evaluated as Python.

Whole numbers and fractions are exact; a result that is neither is a decimal number.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from fractions import Fraction
from math import isqrt

LONGEST = 400
"""Characters of an expression."""
DIGITS = 300
"""Digits of a number, in the end and on the way there."""
DEEPEST = 60
"""Levels of nesting."""

Number = Fraction
OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


async def calculator(expression: str) -> str:
    """Calculates an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, parentheses and sqrt(), such as (3+4)*12.
    """
    return shown(evaluated(expression))


def evaluated(expression: str) -> Number:
    """The value. ValueError, in words for the model, for what is no arithmetic or too much of it."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    text = expression.replace("^", "**").replace(",", "").replace("\N{MULTIPLICATION SIGN}", "*").strip()
    try:
        with warnings.catch_warnings():  # "1a" is a syntax that Python wants to warn of
            warnings.simplefilter("ignore")
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def shown(value: Number) -> str:
    """A number as people write it."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{value.numerator / value.denominator:.12g}"


def _value(node: ast.expr, depth: int) -> Number:
    if depth > DEEPEST:
        raise ValueError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("True and False are no numbers")
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, depth + 1), _value(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return _bounded(OPERATIONS[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id="sqrt"), args=[only], keywords=[]):
            return _root(_value(only, depth + 1))
    raise ValueError("only numbers, + - * / // % **, parentheses and sqrt() are calculated")


def _power(base: Number, exponent: Number) -> Number:
    if exponent.denominator != 1:
        return _root(base) if exponent == Fraction(1, 2) else _bounded(_real(float(base) ** float(exponent)))
    digits = max(len(str(base.numerator)), len(str(base.denominator)))
    if abs(exponent) * digits > DIGITS:
        raise ValueError(f"the power has more than {DIGITS} digits")
    return _bounded(base ** int(exponent))


def _root(value: Number) -> Number:
    if value < 0:
        raise ValueError("a negative number has no square root")
    root = Fraction(isqrt(value.numerator), isqrt(value.denominator))
    return root if root * root == value else _real(float(value) ** 0.5)


def _real(value: object) -> Number:
    if not isinstance(value, float):
        raise ValueError("the result is no real number")
    return Fraction(str(value))


def _bounded(value: Number) -> Number:
    if max(abs(value.numerator), value.denominator) >= 10**DIGITS:
        raise ValueError(f"a number has more than {DIGITS} digits")
    return value
