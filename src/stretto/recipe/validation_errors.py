"""What is wrong with a recipe's data, in words for people, from what validation reports.

Validation names every alternative of a type that did not fit; here each place in the recipe gets one problem: what
was given, what is expected, and what to write instead, with the nearest name where one is close.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stretto.errors import Problem
from stretto.recipe import schema_text as words
from stretto.recipe.foreign_keys import Counterpart, foreign_keys
from stretto.recipe.schema import Choice, Section
from stretto.recipe.schema.base import OWN, names_of
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
        if error["type"] == "union_tag_not_found" and isinstance(value, dict):
            key, problem = _kind(path, value)
            found[(*path, key)] = problem
        elif error["type"] == "extra_forbidden" or error["loc"][-1:] == ("[key]",):
            found |= _unknown_key(path, value, data)
        elif error["type"] == "missing" and value is _ABSENT:
            found[path] = _missing(path, data)
        elif not path:
            found[path] = _document(value)
        else:
            found[path] = _unfit(path, value, data)
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
    if (foreign := counterpart(path)) is not None:
        return () if foreign.ours is None else (foreign.ours,)
    if close := nearest(key, siblings, 0.7):
        return (here + close,)
    if key in homes:
        inside = tuple(name for name in homes[key] if here and name.startswith(here))
        return _nearest_the_top(inside or homes[key])
    if close := nearest(key, siblings):
        return (here + close,)
    return _nearest_the_top(homes[close]) if (close := nearest(key, homes, 0.8)) else ()


def _nearest_the_top(names: tuple[str, ...]) -> tuple[str, ...]:
    """At most three: `optimizer.lr` before that of a critic, which has an optimizer of its own."""
    least = min(name.count(".") for name in names)
    return tuple(name for name in names if name.count(".") == least)[:3]


def counterpart(path: Path) -> Counterpart | None:
    """What a key is here that another project calls so: by its whole name, or by its last part in a section of ours
    that has nothing nearer."""
    known, here = foreign_keys(), dotted(path[:-1])
    if (whole := known.get(dotted(path))) is not None or len(path) < 2 or words.at(path[:-1]) is None:
        return whole
    found = known.get(str(path[-1]))
    if found is None or (found.ours or "").startswith(f"{here}."):
        return found
    return None if nearest(str(path[-1]), _siblings(path), 0.7) else found


def _siblings(path: Path, data: object = None) -> list[str]:
    """The keys that the schema has at this level; without `data`, those of every kind of the section."""
    above, section = words.at(path[:-1], data), _value(path[:-1], data)
    names: list[str] = []
    for kind in above[0] if above else []:
        if words.is_section(kind):
            names += words.keys_of(kind.type, section)
        elif typing.get_origin(kind.type) is dict:
            names += words.choices(list(words.kinds(typing.get_args(kind.type)[0])))
    return names


def _value(path: Path, data: Any) -> Any:
    """What stands at a place of the data, or none."""
    for part in path:
        known = part in data if isinstance(data, dict) else isinstance(data, list) and _index(part, data)
        data = data[part] if known else None
    return data


def choice_at(path: Path, data: object) -> type[Choice] | None:
    """The section with kinds that stands at a place, if one does."""
    here = words.at(path, data)
    found = [kind.type for kind in (here[0] if here else []) if words.is_section(kind)]
    return next((section for section in found if issubclass(section, Choice)), None)


def _chosen(path: Path, data: object) -> tuple[type[Choice], str, object] | None:
    """Which kind the section at a place is of, the key that says so, and its value."""
    union, keys = choice_at(path, data), _value(path, data)
    record = union.record_of(keys) if union and isinstance(keys, dict) else None
    if record is None:
        return None
    key = record.label()[-1]
    return record, key, keys.get(key, record.model_fields[key].default)


def _kind(path: Path, section: dict[str, Any]) -> tuple[str, Problem]:
    """The key that should tell which kind a section is of, and what is wrong with its value."""
    union = choice_at(path, None) or Choice
    key, among, _ = union.narrowed(section)
    value, names = section.get(key), names_of(among, key)
    noun = next(str(part) for part in reversed(path) if isinstance(part, str)).removesuffix("s")
    near = nearest(value, names) if isinstance(value, str) else None
    return key, Problem(
        field=dotted((*path, key)),
        reason=f"there is no {noun} {value!r}" if near or isinstance(value, str) else f"got {words.given(value)}",
        fix=f"did you mean '{near}'?" if near else f"use one of {', '.join(names)}",
    )


def _elsewhere(path: Path, data: object) -> Problem | None:
    """A key that another kind of the same section has."""
    chosen = _chosen(path[:-1], data)
    owners = [other for other in chosen[0].union().records() if path[-1] in other.model_fields] if chosen else []
    owners = [owner for owner in owners if OWN not in owner.values(owner.told_by[0])] or owners
    if chosen is None or not owners:
        return None
    _, key, here = chosen
    names = [name for owner in owners for name in owner.values(owner.label()[-1])]
    wanted = ", ".join(f"{word}: {owners[0].values(word)[0]}" for word in owners[0].label())
    reason = f"has no effect on {key} {here}; it belongs to {', '.join(names)}"
    return Problem(field=dotted(path), reason=reason, fix=f"take it out, or use {wanted}")


def _unknown_key(path: Path, value: object, data: object) -> dict[Path, Problem]:
    """A key that the schema does not have there; of a section of another project, each key below."""
    leaves = list(_leaves(path, value))
    if counterpart(path) is None and any(counterpart(leaf) for leaf in leaves if leaf != path):
        return {leaf: _unknown(leaf, data) for leaf in leaves}
    return {path: _elsewhere(path, data) or _unknown(path, data)}


def _leaves(path: Path, value: object) -> Iterator[Path]:
    """The places of all single values."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves((*path, key), below)
    else:
        yield path


def _unknown(path: Path, data: object) -> Problem:
    """A key that the schema does not have at this place."""
    ours = words.at(path[:-1]) is not None
    where = f"in `{dotted(path[:-1])}`" if path[:-1] and ours else "at the top of a recipe" if ours else "in a recipe"
    foreign = counterpart(path)
    if foreign is not None or not ours:
        fix = foreign.fix if foreign else "take it out; docs/guides/coming-from.md lists what other projects' keys are"
        return Problem(field=dotted(path), reason=f"there is no such key {where}", fix=fix)
    meant = " or ".join(f"`{name}`" for name in intended(path))
    fix = f"did you mean {meant}?" if meant else f"take it out; the keys here are {', '.join(_siblings(path, data))}"
    return Problem(field=dotted(path), reason=f"there is no such key {where}", fix=fix)


def _missing(path: Path, data: object) -> Problem:
    here = words.at(path, data)
    need = words.expected(here[0]) if here else "a value"
    if chosen := _chosen(path[:-1], data):
        _, key, kind = chosen
        reason = f"is missing, and {key} {kind} needs it: {need}"
        return Problem(field=dotted(path), reason=reason, fix=f"add `{path[-1]}`, or use another {key}")
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


def _unfit(path: Path, value: object, data: object) -> Problem:
    """A value that does not fit its key."""
    here = words.at(path, data)
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
        if naming := next((key for kind in kinds if (key := _naming_key(kind.type))), None):
            return f"write `{dotted(path)}.{naming}: {value[:40]}`"
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


def _naming_key(section: Any) -> str | None:
    """The key of a section that a single text would most likely be meant for."""
    if not (isinstance(section, type) and issubclass(section, Section)):
        return None
    return section.told_by[0] if issubclass(section, Choice) else "name" if "name" in section.model_fields else None
