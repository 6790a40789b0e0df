"""Whether a `module:name` of a recipe exists, asked without running a line of the user's code.

The top of the module is read as a syntax tree. So the answer is exact for a function that is written down, and generous
where only running would tell (star imports, a module-level `__getattr__`, compiled modules).
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

ANYTHING = "*"
"""Stands for names that only running the module would tell."""


def exists(target: str, paths: Sequence[str] = ()) -> str | None:
    """A sentence on why `target` cannot be found on `paths` or among installed modules, or None if it is there."""
    module, _, name = target.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return f"{target!r} is not of the form module:name"
    spec, missing = find_module(module, [os.path.abspath(path) for path in paths])
    if spec is None:
        where = ", ".join(str(path) for path in paths) or "the installed packages"
        return f"there is no module {missing!r} in {where}"
    if spec.origin is None:
        return f"{module!r} is a folder without code of its own"
    if not spec.origin.endswith(".py"):
        return None
    try:
        names = _names(spec.origin)
    except OSError as error:
        return f"{spec.origin} cannot be read: {error.strerror}"
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"{spec.origin} is not valid Python: {error}"
    if name in names or ANYTHING in names or "__getattr__" in names:
        return None
    near = get_close_matches(name, sorted(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{spec.origin} defines no {name!r}{hint}"


def foreign(target: str, paths: Sequence[str] = ()) -> str | None:
    """A sentence on why an existing `target` is no function of a Python file below one of the `paths`, or None.

    So a recipe alone runs no code. Libraries have functions that would run what a model wrote: `builtins:exec`,
    `os:system`, `sympy:sympify`. A file of the user's may import what it likes from packages, and nothing from Python
    itself that would be the reward as it is.
    """
    module, _, name = target.partition(":")
    top = module.partition(".")[0]
    spec, _ = find_module(module, [os.path.abspath(path) for path in paths])
    origin = spec.origin if spec else None
    own = origin is not None and _within(origin, paths)
    if top in sys.stdlib_module_names:
        if own:
            return f"{origin} has the name of a module of Python's own; give the file another name"
        return f"{target} belongs to Python itself and is no function of yours"
    if origin is None or not own:
        return f"{target} belongs to an installed package and is no function of yours"
    if not origin.endswith(".py"):
        return f"{origin} is not a Python file, so what it would do with an answer cannot be read"
    imported = next(_imported(name, origin), None)
    return f"{name} in {origin} is only imported from {imported}, which belongs to Python itself" if imported else None


def _imported(name: str, file: str) -> Iterator[str]:
    """The modules of Python's own from which a file imports a name."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            top = (node.module or "").partition(".")[0]
            if node.level == 0 and top in sys.stdlib_module_names:
                yield top


def _within(origin: str, paths: Sequence[str]) -> bool:
    """True if a file lies below one of the paths, and not among the packages that happen to be installed there."""
    places = [os.path.join(os.path.abspath(path), "") for path in paths]
    return "site-packages" not in Path(origin).parts and any(origin.startswith(place) for place in places)


def find_module(module: str, paths: list[str]) -> tuple[ModuleSpec | None, str]:
    """The module's spec, and the dotted name that is missing where there is none. Imports no package on the way."""
    importlib.invalidate_caches()
    top, *rest = module.split(".")
    try:
        spec = PathFinder.find_spec(top, [*paths, *sys.path]) or find_spec(top)
    except ValueError:
        spec = None
    found = top
    for part in rest:
        if spec is None:
            break
        found = f"{found}.{part}"
        spec = spec_in(part, spec.submodule_search_locations or [])
    return spec, found


def spec_in(part: str, places: Iterable[str]) -> ModuleSpec | None:
    """The spec of what a package calls `part`, which is looked for in its places.

    Asked by its full name, a folder without code wants the package above it among the imported modules.
    """
    return PathFinder.find_spec(part, list(places))


def _names(file: str) -> set[str]:
    """Every name that the module's top level binds."""
    return set(_bound(tree_of(file).body))


def tree_of(file: str) -> ast.Module:
    """What a file says; old-fashioned escapes in it are nobody's concern here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(Path(file).read_bytes(), file)


def _bound(body: Sequence[ast.AST]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                continue
            case _:
                yield from _bound(list(ast.iter_child_nodes(node)))
