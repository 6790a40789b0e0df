"""Which files of the user's a `module:name` is made of: its module and what that imports, read without running them.

Imports are found in the syntax trees, wherever in a file they stand, and followed as long as they lead to files on the
user's paths. Installed packages are not followed. What cannot be seen so: modules whose names are only known while
running, and data that the code opens.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from stretto.sandbox.target import spec_in

DYNAMIC = ("import_module", "__import__")
"""Functions that import what their first argument names."""


def sources(target: str, paths: Sequence[str] = ()) -> dict[str, Path]:
    """Dotted name -> file of every module of the user's that importing the module of `module:name` can run."""
    importlib.invalidate_caches()
    places = [os.path.abspath(path) for path in paths]
    own = _with_packages(target.partition(":")[0])
    found: dict[str, Path] = {}
    waiting, seen = list(own), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        spec = _spec(name, [*places, *sys.path] if name in own else places)
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            continue
        found[name] = Path(spec.origin)
        if spec.origin.endswith(".py"):
            waiting += imported(Path(spec.origin), name, package=spec.submodule_search_locations is not None)
    return found


def imported(file: Path, name: str, *, package: bool) -> list[str]:
    """Dotted names that a module called `name` may import, packages on the way included."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # running it would say what is wrong
    around = name if package else name.rpartition(".")[0]
    named = [full for node in ast.walk(tree) for full in _named(node, around)]
    if package:
        named += [f"{name}.{text}" for text in _exported(tree)]
    return [part for full in named for part in _with_packages(full)]


def _named(node: ast.AST, around: str) -> Iterator[str]:
    """What one piece of a tree imports; `around` is the package that relative imports count from."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            above = around.split(".")[: len(around.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(text)), *_]):
            if called in DYNAMIC and text:
                yield f"{around}{text}" if text.startswith(".") else text


def _exported(tree: ast.Module) -> Iterator[str]:
    """The names of `__all__`, which `from package import *` imports where they are modules."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=items) | ast.Tuple(elts=items)):
                yield from (
                    item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)
                )


def _with_packages(name: str) -> list[str]:
    """`a.b.c` -> a, a.b, a.b.c: importing the last runs them all."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)] if all(parts) else []


def _spec(name: str, places: list[str]) -> ModuleSpec | None:
    """Where a module is, if that is in one of these places. Imports no package on the way."""
    spec = None
    try:
        for part in name.split("."):
            spec = spec_in(part, places)
            if spec is None:
                return None
            places = list(spec.submodule_search_locations or [])
    except (ImportError, ValueError, OSError):
        return None
    return spec
