"""The facts of an algorithm by module:name: `FACTS = AlgorithmFacts(...)` in its file, read without running it.

So `stretto check` and `stretto plan` know them without PyTorch. A file that says none is taken for a clipped algorithm
over groups without further needs; what it builds then says the rest, before anything is loaded. Facts that are written
down are held against what is built.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from stretto import plugins
from stretto.algorithms import catalog
from stretto.algorithms.catalog import OWN, AlgorithmFacts
from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import AlgorithmSection
from stretto.sandbox.imports import sources
from stretto.sandbox.target import tree_of

if TYPE_CHECKING:
    from stretto.algorithms.base import Algorithm

FIELD = "algorithm.name"
NAME = "FACTS"
SHOWN = "FACTS = AlgorithmFacts(scope=..., min_samples=..., needs=frozenset({...}), ...)"
COMPARED = ("scope", "min_samples", "drops")
"""Facts that an algorithm has too."""


def usual(name: str) -> AlgorithmFacts:
    """What is assumed of an algorithm that says nothing."""
    return AlgorithmFacts(name=name, module=name.partition(":")[0])


def announce(name: str, folders: Sequence[str]) -> list[Problem]:
    """Makes the facts of an algorithm of the user's known to this process; returns what is wrong with its file.

    Without facts that make sense it is known by the usual ones, so that whoever asks more has an answer.
    """
    given = plugins.is_given(name)  # whether it was given again is no question of files
    if not given and not plugins.is_plugin(name):
        return []
    facts, found = usual(name), [] if given else list(plugins.problems("algorithm", name, folders, field=FIELD))
    if not found:
        try:
            facts = _facts(name, folders) or facts
        except ValueError as error:
            file = sources(name, folders).get(name.partition(":")[0], name)
            found.append(Problem(field=FIELD, reason=f"{NAME} in {file} {error}", fix=f"write {SHOWN}"))
    OWN[name] = facts
    return found


def _facts(name: str, folders: Sequence[str]) -> AlgorithmFacts | None:
    """The facts that a file has written down, or none. ValueError on what they are instead."""
    thing = plugins.REGISTERED.get(("algorithm", name))
    if thing is not None:
        given = getattr(thing, "facts", None) or getattr(thing, "__globals__", {}).get(NAME)
        return replace(given, name=name) if isinstance(given, AlgorithmFacts) else None
    file = sources(name, folders).get(name.partition(":")[0])
    written = None if file is None or file.suffix != ".py" else _written(file)
    if written is None:
        return None
    try:
        facts = TypeAdapter(AlgorithmFacts).validate_python(vars_of(usual(name)) | written | {"name": name})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"is wrong at {first['loc'][0]}: {first['msg']}") from error
    try:
        facts.surrogate.format(low=0.0, high=0.0)
        facts.average.format(constant=1)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"has a formula with braces that mean nothing ({error})") from error
    return facts


def vars_of(facts: AlgorithmFacts) -> dict[str, Any]:
    """The fields of an algorithm's facts."""
    return {name: getattr(facts, name) for name in AlgorithmFacts.__dataclass_fields__}


def _written(file: Path) -> dict[str, Any] | None:
    """The keywords of the call that `FACTS` is assigned at the top of a file."""
    constants: dict[str, ast.expr] = {}
    for node in tree_of(str(file)).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constants[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                constants[name] = value
    match constants.get(NAME):
        case None:
            return None
        case ast.Call(args=[], keywords=keywords) if all(word.arg for word in keywords):
            unknown = [word.arg for word in keywords if word.arg not in AlgorithmFacts.__dataclass_fields__]
            if unknown:
                raise ValueError(f"has {unknown[0]!r}, which is no fact; {', '.join(vars_of(usual('')))} are")
            return {
                str(word.arg): _value(word.value, constants) for word in keywords if word.arg not in ("name", "module")
            }
    raise ValueError("is not written as a call with keywords, so it cannot be read without running it")


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    """A plain value as it is written; names are those of this file's constants and of the catalog's formulas."""
    match node:
        case ast.Name(id=name) if name in constants:
            return _value(constants[name], {key: value for key, value in constants.items() if key != name})
        case ast.Name(id="CLIPPED") | ast.Attribute(attr="CLIPPED"):
            return catalog.CLIPPED
        case ast.Call(func=ast.Name(id="frozenset"), args=[], keywords=[]):
            return frozenset()
        case ast.Call(func=ast.Name(id="frozenset"), args=[inner], keywords=[]):
            return frozenset(_value(inner, constants))
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"has {ast.unparse(node)[:60]!r}, which cannot be read without running it") from error


def compare(algorithm: Algorithm, section: AlgorithmSection, folders: Sequence[str]) -> None:
    """Holds what was built against its facts, or learns those that were not written. RecipeError if they differ."""
    name, known = section.name, OWN[section.name]
    written = _facts(name, folders)
    provided = {"old"} if written and section.kl.coef == 0 else {"old", "reference"}
    if lacking := sorted(algorithm.needs - known.needs - provided):
        raise _other(name, f"needs {', '.join(lacking)}, and {NAME} in its file does not say so")
    if written is None:
        built = {fact: getattr(algorithm, fact) for fact in COMPARED}
        OWN[name] = replace(known, **built, needs=algorithm.needs - {"old"})
        return
    for fact in COMPARED:
        is_so, said = getattr(algorithm, fact), getattr(known, fact)
        if is_so != said:
            raise _other(name, f"builds an algorithm with {fact} {is_so!r}, and {NAME} in its file says {said!r}")


def _other(name: str, why: str) -> RecipeError:
    return RecipeError.of(FIELD, f"{name} {why}", f"write {SHOWN} with what it builds")
