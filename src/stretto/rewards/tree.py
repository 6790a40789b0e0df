"""Walks an expression and adds up what computing it costs, without computing anything.

`of_text` reads a formula written as Python and refuses whatever is no formula; `of_sympy` reads what math_verify made
of an answer, which it leaves as it was written. The arithmetic of sizes is in `size`. Only to be called in a worker.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from stretto.rewards import size
from stretto.rewards.size import Size, TooLargeError

CONSTANTS = {"pi": math.pi, "E": math.e}
GROWING = frozenset({"exp", "sinh", "cosh"})
"""Functions that grow like e to the x; sinh and cosh are two of these."""
ROUNDING = frozenset({"floor", "ceiling", "Abs", "Mod", "Max", "Min"})
"""Functions of sympy that keep integers what they are or make them."""
DEEPEST = 100
"""Brackets within brackets."""


def of_text(text: str, functions: frozenset[str], *, letters: bool) -> Size:
    """The size of a formula of numbers, single `letters` and calls of `functions`, written as Python.

    ValueError or SyntaxError where it is something else. To Python `^` is no power, but it is what is meant by it.
    """
    if "^" in text:
        of_text(text.replace("^", "**"), functions, letters=letters)
    return _of_python(ast.parse(text.strip(), mode="eval").body, functions, letters, DEEPEST)


def _of_python(node: ast.expr, functions: frozenset[str], letters: bool, depth: int) -> Size:
    if depth == 0:
        raise TooLargeError("too many brackets within brackets")

    def below(child: ast.expr) -> Size:
        return _of_python(child, functions, letters, depth - 1)

    match node:
        case ast.Constant(value=bool() | complex()):
            raise ValueError("no formula")
        case ast.Constant(value=int() | float() as value):
            return size.number(value)
        case ast.Name(id=name) if letters and name in CONSTANTS:
            return size.irrational(CONSTANTS[name])
        case ast.Name(id=name) if letters and len(name) == 1:
            return size.letter(name)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return below(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return size.negated(below(operand))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return size.total([below(left), below(right)])
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return size.total([below(left), size.negated(below(right))])
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return size.product([below(left), below(right)])
        case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right):
            return size.product([below(left), size.power(below(right), size.number(-1), ast.dump(right))])
        case ast.BinOp(left=left, op=ast.Pow() | ast.BitXor(), right=right):
            return size.power(below(left), below(right), ast.dump(node))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in functions:
            sizes = [below(argument) for argument in arguments]
            if name in GROWING and len(sizes) == 1:
                return size.exponential(sizes[0], ast.dump(node))
            return size.applied(sizes, ast.dump(node))
    raise ValueError("no formula")


def of_sympy(expression: Any) -> Size:
    """The size of an expression of sympy when everything in it is computed and multiplied out."""
    try:
        return _Walk().visit(expression, {})
    except RecursionError:
        raise TooLargeError("too many brackets within brackets") from None


class _Walk:
    """Counts what it visits, so that an expression cannot be endless either."""

    def __init__(self) -> None:
        import sympy

        self.left, self.sympy = size.MAX_NODES, sympy

    def visit(self, node: Any, known: Mapping[Any, Size]) -> Size:
        """`known` are the sizes of what sums and products run over."""
        sympy = self.sympy
        self.left -= 1
        if self.left < 0:
            raise TooLargeError(f"more than {size.MAX_NODES} numbers, letters and operations")
        if isinstance(node, sympy.Rational):
            return size.number(int(node.p), int(node.q))
        if isinstance(node, sympy.Float):
            return size.number(float(node))
        if isinstance(node, sympy.Symbol):
            return known.get(node) or size.letter(node.name)
        if isinstance(node, sympy.NumberSymbol):
            return size.irrational(float(node))
        if isinstance(node, sympy.MatrixBase):
            return self._matrix(node, known)
        if isinstance(node, sympy.concrete.expr_with_limits.ExprWithLimits):
            return self._limited(node, known)
        if isinstance(node, sympy.Derivative):
            return self._derivative(node, known)
        return self._combined(node, [self.visit(part, known) for part in getattr(node, "args", ())])

    def _combined(self, node: Any, sizes: list[Size]) -> Size:
        """An operation or function of what has these sizes."""
        sympy = self.sympy
        if not sizes:
            return Size(bits=1.0)
        name = f"{type(node).__name__} {hash(node)}"
        if isinstance(node, sympy.Add | sympy.MatAdd):
            return size.total(sizes)
        if isinstance(node, sympy.Mul | sympy.MatMul):
            return size.product(sizes)
        if isinstance(node, sympy.Pow | sympy.MatPow):
            return size.power(sizes[0], sizes[1], name)
        if isinstance(node, sympy.exp | sympy.sinh | sympy.cosh):
            return size.exponential(sizes[0], name)
        if isinstance(node, sympy.factorial | sympy.gamma):
            return size.factorial(sizes[0], name)
        if isinstance(node, sympy.binomial):
            return size.binomial(sizes[0], sizes[1], name)
        if isinstance(node, sympy.Function | sympy.UnevaluatedExpr):
            kept = type(node).__name__ in ROUNDING or isinstance(node, sympy.UnevaluatedExpr)
            if len(sizes) == 1 and isinstance(node, sympy.UnevaluatedExpr):
                return sizes[0]
            return size.applied(sizes, name, integer=kept and all(each.integer for each in sizes))
        return size.total(sizes)  # sets, pairs, equations: they are compared part by part, or by their difference

    def _matrix(self, node: Any, known: Mapping[Any, Size]) -> Size:
        """As large as the sums that a product with itself would hold."""
        sizes = [self.visit(entry, known) for entry in node.flat()]
        return size.total(sizes)

    def _limited(self, node: Any, known: Mapping[Any, Size]) -> Size:
        """Sums, products and integrals: a sum from 1 to 1000 is its body a thousand times."""
        sympy = self.sympy
        counted = isinstance(node, sympy.Sum | sympy.Product)
        steps, inside = 1.0, dict(known)
        for variable, *bounds in node.limits:
            sizes = [self.visit(bound, known) for bound in bounds]
            finite = len(bounds) == 2 and not any(bound.has(sympy.oo, -sympy.oo) for bound in bounds)
            if counted and finite and all(each.constant for each in sizes):
                steps *= _distance(bounds, sizes)
                inside[variable] = Size(
                    bits=max(each.bits for each in sizes),
                    magnitude=max(each.magnitude for each in sizes),
                    integer=True,
                    negative=any(each.negative for each in sizes),
                )
        body = self.visit(node.function, inside)
        return size.repeated(body, steps, multiplied=isinstance(node, sympy.Product)) if counted else body

    def _derivative(self, node: Any, known: Mapping[Any, Size]) -> Size:
        body = self.visit(node.expr, known)
        for _, order in node.variable_count:
            if self.visit(order, known).absolute > size.MAX_ORDER:
                raise TooLargeError("a derivative of a high order")
        return body


def _distance(bounds: list[Any], sizes: list[Size]) -> float:
    """Steps from the first bound to the last; exact where both are written as integers."""
    if all(bound.is_Integer for bound in bounds):
        return float(max(0, min(int(bounds[1]) - int(bounds[0]) + 1, 2**64)))
    return sum(each.absolute for each in sizes) + 1
