"""The schema in plain words: what a key expects, what was given, and where a key lives.

For error messages and for the reference page, which must not speak of pydantic. Everything comes from the annotations
of `recipe.schema`; nothing here knows a key by name.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.recipe.schema import Choice, Recipe
from stretto.recipe.schema.base import OWN

Path = tuple[str | int, ...]
"""Where a value stands in a recipe: ("rewards", 0, "kind")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyType:
    """One of the types a value may have, without the wrappers of `typing`."""

    type: Any
    """A Section class, int, a Literal, tuple[...] and so on."""
    limits: tuple[Any, ...]
    """Bounds on it."""


def dotted(path: Path) -> str:
    """`rewards.0.kind`, the way overrides are written too."""
    return ".".join(str(part) for part in path)


def kinds(annotation: Any, limits: Sequence[Any] = ()) -> Iterator[KeyType]:
    """The alternatives of an annotation, in its own order."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *extras = typing.get_args(annotation)
        found = [limit for extra in extras for limit in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        yield from kinds(inner, [*limits, *found])
    elif origin in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from kinds(option, limits)
    else:
        yield KeyType(type=annotation, limits=tuple(limits))


def is_section(kind: KeyType) -> bool:
    """True for a record of keys."""
    return isinstance(kind.type, type) and issubclass(kind.type, BaseModel)


def keys_of(section: type[BaseModel], data: object = None) -> dict[str, FieldInfo]:
    """The keys of a section; of one with kinds those of the kind that the data names, without data those of all."""
    if not (issubclass(section, Choice) and section.is_union()):
        return section.model_fields
    named = section.record_of(data) if isinstance(data, dict) else None
    if named:
        return named.model_fields
    return {key: field for record in reversed(section.records()) for key, field in record.model_fields.items()}


def defaults_of(section: type[BaseModel]) -> dict[str, list[Any]]:
    """The keys of a section with kinds, each with its default in every kind, as plain data."""
    found: dict[str, list[Any]] = {}
    for record in section.records() if issubclass(section, Choice) else ():
        for key, field in record.model_fields.items():
            value = field.get_default(call_default_factory=True)
            found.setdefault(key, []).append(list(value) if isinstance(value, tuple) else value)
    return found


def choices(found: Sequence[KeyType]) -> list[str]:
    """The words among which a value may choose."""
    return [word for kind in found if typing.get_origin(kind.type) is Literal for word in typing.get_args(kind.type)]


def expected(found: Sequence[KeyType]) -> str:
    """Return the accepted values as one phrase: `'auto' or int >= 1`."""
    return " or ".join(_expected(kind) for kind in found)


def _expected(kind: KeyType) -> str:
    origin, arguments = typing.get_origin(kind.type), typing.get_args(kind.type)
    if kind.type is type(None):
        return "null"
    if origin is Literal:
        named = [f"'{word}'" for word in arguments]
        return f"one of {', '.join(named)}" if len(named) > 2 else " or ".join(named)
    if origin is tuple:
        each = expected(list(kinds(arguments[0])))
        if arguments[-1] is not Ellipsis:
            return f"list of {len(arguments)} (each {each})"
        fewest = _limit(kind, "min_length")
        return f"list{f' of at least {fewest}' if fewest else ''} (each {each})"
    if origin is dict or kind.type is dict:
        return "section"
    if is_section(kind):
        return f"section ({', '.join(kind.type.model_fields)}{', …' if issubclass(kind.type, Choice) else ''})"
    if kind.type in (int, float):
        return f"{kind.type.__name__}{_bounds(kind)}"
    if kind.type is str:
        pattern = _limit(kind, "pattern")
        if pattern and pattern.endswith(":"):
            return OWN
        if pattern:
            return f"string that matches {pattern}"
        shortest = _limit(kind, "min_length") or 0
        if shortest > 1:
            return f"string of at least {shortest} characters"
        return "non-empty string" if shortest else "string"
    return "true or false" if kind.type is bool else "anything"


def _limit(kind: KeyType, name: str) -> Any:
    return next((value for limit in kind.limits if (value := getattr(limit, name, None)) is not None), None)


def _bounds(kind: KeyType) -> str:
    above, least, most = (_limit(kind, name) for name in ("gt", "ge", "le"))
    if most is None:
        return f" > {above:g}" if above is not None else f" >= {least:g}" if least is not None else ""
    if above is None and least is None:
        return f" <= {most:g}"
    return f" in {'[' if above is None else '('}{least if above is None else above:g}, {most:g}]"


def given(value: object) -> str:
    """What was written, short enough for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value if len(value) <= 40 else value[:37] + '...'!r}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "a section"
    return f"the number {value}" if len(str(value)) <= 40 else "a very long number"


def step(
    found: Sequence[KeyType], part: str | int, data: object = None
) -> tuple[list[KeyType], FieldInfo | None] | None:
    """What the schema says one level down, or none where it has no such key. `data` is what stands at this level."""
    for kind in found:
        origin, arguments = typing.get_origin(kind.type), typing.get_args(kind.type)
        if is_section(kind) and (field := keys_of(kind.type, data).get(str(part))):
            return list(kinds(field.annotation, field.metadata)), field
        if origin is tuple and isinstance(part, int):
            return list(kinds(arguments[0])), None
        if origin is dict:
            return list(kinds(arguments[1])), None
    return None


def at(path: Path, data: Any = None) -> tuple[list[KeyType], FieldInfo | None] | None:
    """What the schema says about a place in the recipe, or none where it has no such place; without `data`, for any
    kind of the sections above."""
    here: tuple[list[KeyType], FieldInfo | None] | None = (list(kinds(Recipe)), None)
    for part in path:
        here = step(here[0], part, data) if here else None
        inside = isinstance(data, dict | list) and (part in data if isinstance(data, dict) else isinstance(part, int))
        data = data[part] if inside else None
    return here


@cache
def homes() -> dict[str, tuple[str, ...]]:
    """Every key of the recipe -> the full names it has, so that a misplaced key can be sent home."""
    found: dict[str, list[str]] = {}
    for name in _names(list(kinds(Recipe)), ()):
        found.setdefault(name.rpartition(".")[2], []).append(name)
    return {key: tuple(names) for key, names in found.items()}


def _names(found: Sequence[KeyType], path: Path) -> Iterator[str]:
    for kind in found:
        if typing.get_origin(kind.type) is tuple:
            inner = [item for item in kinds(typing.get_args(kind.type)[0]) if is_section(item)]
            yield from _names(inner, (*path, 0))
        elif is_section(kind):
            for name, field in keys_of(kind.type).items():
                yield dotted((*path, name))
                yield from _names(list(kinds(field.annotation, field.metadata)), (*path, name))
