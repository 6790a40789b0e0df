"""What is wrong with a recipe's data, in words for people, from what validation reports.

Validation names every alternative of a type that did not fit; here each place in the recipe gets one problem: what
was given, what is expected, and what to write instead, with the nearest name where one is close.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto.errors import Problem
from stretto.recipe import schema_text as words
from stretto.recipe.schema_text import Path, dotted


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The closest name, if one is close; of several, one with the same letters: swapped keys are the commonest slip."""
    found = difflib.get_close_matches(word, list(names), n=5, cutoff=cutoff)
    swapped = [name for name in found if sorted(name) == sorted(word)]
    return next(iter(swapped or found), None)


def explain(errors: Sequence[Mapping[str, Any]], data: object) -> dict[Path, Problem]:
    """One problem for every place at fault. `errors` is pydantic's list, `data` what it was given."""
    found: dict[Path, Problem] = {}
    places = [_place(error, data) for error in errors]
    above = {path[:length] for path, _ in places for length in range(len(path))}
    for error, (path, value) in zip(errors, places, strict=True):
        # What is wrong inside a value says more than that the value fits none of its types.
        if path in found or path in above:
            continue
        if error["type"] == "extra_forbidden" or error["loc"][-1:] == ("[key]",):
            found[path] = _unknown(path)
        elif error["type"] == "missing" and value is _ABSENT:
            found[path] = _missing(path)
        elif not path:
            found[path] = _document(value)
        else:
            found[path] = _unfit(path, value)
    return found


_ABSENT = object()


def _place(error: Mapping[str, Any], data: object) -> tuple[Path, object]:
    """Where in the data an error is, less the names of alternatives that validation puts between, and what is there."""
    path: list[str | int] = []
    here: Any = data
    location = error["loc"]
    for part in location:
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and _index(part, here)):
            path.append(part)
            here = here[part]
    if error["type"] == "missing" and isinstance(here, dict):
        return (*path, location[-1]), _ABSENT
    return tuple(path), here


def _index(part: object, items: list[Any]) -> bool:
    return isinstance(part, int) and 0 <= part < len(items)


def intended(path: Path) -> tuple[str, ...]:
    """Full names of the keys that an unknown one may have been meant for, at most three."""
    key, siblings = str(path[-1]), _siblings(path)
    here = dotted(path[:-1]) + "." if path[:-1] else ""
    homes = words.homes()
    if close := nearest(key, siblings, 0.7):
        return (here + close,)
    if key in homes:
        inside = tuple(name for name in homes[key] if here and name.startswith(here))
        return (inside or homes[key])[:3]
    if close := nearest(key, siblings):
        return (here + close,)
    return homes[close][:3] if (close := nearest(key, homes, 0.8)) else ()


def _siblings(path: Path) -> list[str]:
    """The keys that the schema has at this level."""
    above = words.at(path[:-1])
    names: list[str] = []
    for kind in above[0] if above else []:
        if words.is_section(kind):
            names += kind.type.model_fields
        elif typing.get_origin(kind.type) is dict:
            names += words.choices(list(words.kinds(typing.get_args(kind.type)[0])))
    return names


def _unknown(path: Path) -> Problem:
    """A key that the schema does not have at this place."""
    where = f"in `{dotted(path[:-1])}`" if path[:-1] else "at the top of a recipe"
    meant = " or ".join(f"`{name}`" for name in intended(path))
    fix = f"did you mean {meant}?" if meant else f"take it out; the keys here are {', '.join(_siblings(path))}"
    return Problem(field=dotted(path), reason=f"there is no such key {where}", fix=fix)


def _missing(path: Path) -> Problem:
    here = words.at(path)
    need = words.expected(here[0]) if here else "a value"
    return Problem(field=dotted(path), reason=f"is missing: {need}", fix=f"add `{path[-1]}`, or take out its section")


def _document(value: object) -> Problem:
    """The recipe as a whole is at fault."""
    if value is None:
        return Problem(field="recipe", reason="is empty", fix="write at least one key, such as `seed: 0`")
    if isinstance(value, dict):
        return Problem(field="recipe", reason="is nested too deeply", fix="a recipe has few levels; write it flat")
    return Problem(
        field="recipe",
        reason=f"is {words.given(value)}, not sections of keys",
        fix="write `key: value`, one key a line",
    )


def _unfit(path: Path, value: object) -> Problem:
    """A value that does not fit its key."""
    here = words.at(path)
    kinds, field = here if here else ([], None)
    if value is None and any(words.is_section(kind) for kind in kinds):
        return Problem(
            field=dotted(path),
            reason="is null, and a section is needed here",
            fix="leave the key out to get its defaults, or write keys below it",
        )
    reason = f"got {words.given(value)}, expected {words.expected(kinds)}"
    return Problem(field=dotted(path), reason=reason, fix=_correction(path, value, kinds, field))


def _correction(path: Path, value: object, kinds: Sequence[words.KeyType], field: Any) -> str:
    if isinstance(value, str):
        if close := nearest(value, [str(word) for word in words.choices(kinds)]):
            return f"did you mean '{close}'?"
        if any(kind.type in (int, float) for kind in kinds) and value.replace(".", "", 1).isdigit():
            return f"write it without quotes: {value}"
        if any(typing.get_origin(kind.type) is tuple for kind in kinds):
            return f"write it as a list: [{value}]"
    if field is not None and not field.is_required() and isinstance(field.default, str | int | float):
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        return f"change it, or leave it out for the default, {default}"
    return "change it, or leave it out" if field is not None and not field.is_required() else "change it"
