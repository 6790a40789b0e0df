"""How something of a user's file may be called, read from its syntax tree without running a line of it.

Exact for a function or class that is written down at the top of its module without decorators; of anything else
(an object that is made there, a name that is imported) nothing is said here, and importing it has to tell.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence

from stretto.sandbox.target import find_module, tree_of

NOT_CALLABLE = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.JoinedStr)
"""What an assigned value may be written as that nobody can call."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def definition(target: str, paths: Sequence[str]) -> ast.stmt | None:
    """The one statement at the top of a Python file that binds the name of `module:name`, or none."""
    module, _, name = target.partition(":")
    spec, _ = find_module(module, [os.path.abspath(path) for path in paths])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        body = tree_of(spec.origin).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    binding = [node for node in body if name in _bound(node)]
    return binding[-1] if len(binding) == 1 else None


def _bound(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
    return []


def function_refusal(node: Function, parameters: Sequence[str], *, method: bool, asynchronous: bool) -> str | None:
    """Why a function cannot be called with these parameters by position, or none; a decorated one may change both."""
    if node.decorator_list:
        return None
    if isinstance(node, ast.AsyncFunctionDef) != asynchronous:
        return "is not async" if asynchronous else "is async, and nobody would await it"
    told = node.args
    places = len(told.posonlyargs) + len(told.args) - method
    needed = places - len(told.defaults)
    unnamed = [word.arg for word, default in zip(told.kwonlyargs, told.kw_defaults, strict=True) if default is None]
    if unnamed:
        return f"needs the keyword {unnamed[0]!r}, which nobody gives"
    if needed <= len(parameters) and (len(parameters) <= places or told.vararg):
        return out_of_order([each.arg for each in (*told.posonlyargs, *told.args)][method:], parameters)
    takes = f"{max(0, places)} parameter{'' if places == 1 else 's'}"
    return f"takes {takes}, not {len(parameters)}: ({', '.join(parameters)})"


def out_of_order(names: Sequence[str], parameters: Sequence[str]) -> str | None:
    """Why a function that has these parameters in another order would take one for the other, or none."""
    first = list(names[: len(parameters)])
    if first == list(parameters) or sorted(first) != sorted(parameters):
        return None
    return f"has its parameters in another order, ({', '.join(first)}); it is called with ({', '.join(parameters)})"


def methods(node: ast.ClassDef) -> dict[str, Function]:
    """The methods that a class itself has."""
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def tool_refusal(node: Function) -> str | None:
    """Return why no model can be told of a method as a tool, or none; a decorated one may be described elsewhere."""
    if node.decorator_list:
        return None
    told, text = node.args, ast.get_docstring(node)
    arguments = [*told.posonlyargs, *told.args, *told.kwonlyargs][1:]
    if text is None:
        return f"{node.name} has no docstring, which tells the model of it"
    for each in (*arguments, *filter(None, (told.vararg, told.kwarg))):
        if each.annotation is None:
            return f"parameter {each.arg} of {node.name} has no type hint"
    for each in arguments:
        if not re.search(rf"^\s*{re.escape(each.arg)}\s*(\(.*?\))?:", text, re.MULTILINE):
            return f"parameter {each.arg} of {node.name} has no line under Args: in the docstring"
    return None


def needed(node: Function) -> list[str]:
    """The parameters of a method that have no default, but for the object itself."""
    told = node.args
    places = [each.arg for each in (*told.posonlyargs, *told.args)]
    words = [word.arg for word, default in zip(told.kwonlyargs, told.kw_defaults, strict=True) if default is None]
    return [*places[1 : len(places) - len(told.defaults)], *words]


def inherits(node: ast.ClassDef) -> bool:
    """True if a class may have methods that are not written in it."""
    return bool(node.decorator_list or node.keywords) or any(
        not (isinstance(base, ast.Name) and base.id == "object") for base in node.bases
    )
