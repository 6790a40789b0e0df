"""Base classes of recipe sections: strict records, bounded numbers, and sections with several kinds.

A section with several kinds (`rewards.0`, `task.source`, `algorithm`, ...) is a `Choice`: a class with the shared keys,
and one subclass per kind with the keys that act in it. Validation joins the subclasses to a union discriminated by
`kind` (or `name`), so a new kind is a new subclass.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

OWN = "module:name"
"""Placeholder in messages for a class or function of the user."""

Plugin = Annotated[str, Field(pattern=":")]
"""module:name of an object in a Python file next to the recipe or in the working folder, or in a package."""

Given = Annotated[str, Field(pattern="^<function |:")]
"""The same, or what stands for a function that a Python program gave as an object."""


class Section(BaseModel):
    """Strict: unknown keys and wrong types are errors, values cannot be changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Choice(Section):
    """A section of several kinds: the classes that nothing is derived from, the first of them the default.

    Such a section is made by any of its keys: `RewardPart(kind="regex", pattern="x")` is a `RegexReward`.
    """

    told_by: ClassVar[tuple[str, ...]] = ("kind",)
    """Keys whose values select the kind; a later key decides if several kinds remain."""

    def __new__(cls, **keys: Any) -> Self:
        """An instance of the kind that the keys name, as `pathlib.Path` does."""
        if not cls.is_union():
            return super().__new__(cls)
        key, among, left = cls.narrowed(keys)
        if not left:
            raise ValueError(f"there is no {key} {keys[key]!r}: use one of {', '.join(names_of(among, key))}")
        return super().__new__(left[0])

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the discriminated union of a section's kinds."""
        if not cls.is_union():
            return handler(source)
        choices: dict[Any, CoreSchema] = {record.__name__: handler.generate_schema(record) for record in cls.records()}
        return core_schema.tagged_union_schema(choices, discriminator=cls._tag)

    @classmethod
    def _tag(cls, value: Any) -> str | None:
        if isinstance(value, cls):
            return type(value).__name__
        record = cls.record_of(value) if isinstance(value, Mapping) else None
        return record.__name__ if record else None

    @classmethod
    def is_union(cls) -> bool:
        """Return True for a section with kinds, False for one of its kinds."""
        return bool(cls.__subclasses__())

    @classmethod
    def union(cls) -> type[Choice]:
        """Return the section of which this class is a kind."""
        return next(base for base in cls.__mro__ if Choice in base.__bases__)

    @classmethod
    def records(cls) -> tuple[type[Self], ...]:
        """Return the kinds of this section: the default first, `module:name` last."""
        found = [record for below in cls.__subclasses__() for record in below.records() or (below,)]
        return tuple(sorted(found, key=lambda record: OWN in record.values(cls.told_by[0])))

    @classmethod
    def narrowed(cls, keys: Mapping[str, Any]) -> tuple[str, tuple[type[Self], ...], tuple[type[Self], ...]]:
        """Return the deciding key, its candidates, and the remaining kinds (one, or an empty tuple)."""
        left = cls.records()
        for key in cls.told_by:
            among, value = left, keys.get(key, left[0].model_fields[key].default)
            left = tuple(record for record in among if record.takes(key, value))
            if len(left) < 2:
                break
        return key, among, left

    @classmethod
    def record_of(cls, keys: Mapping[str, Any]) -> type[Self] | None:
        """Return the kind that the keys select, or `None`."""
        return next(iter(cls.narrowed(keys)[2]), None)

    @classmethod
    def takes(cls, key: str, value: Any) -> bool:
        """Return True if this kind accepts a value of a selecting key."""
        field = cls.model_fields[key]
        if typing.get_origin(field.annotation) is Literal:
            return value in typing.get_args(field.annotation)
        pattern = next((limit.pattern for limit in field.metadata if hasattr(limit, "pattern")), None)
        return isinstance(value, str) and (pattern is None or re.search(pattern, value) is not None)

    @classmethod
    def values(cls, key: str) -> tuple[str, ...]:
        """Return the values of a selecting key that select this kind."""
        return typing.get_args(cls.model_fields[key].annotation) or (OWN,)

    @classmethod
    def label(cls) -> tuple[str, ...]:
        """Return the keys that identify this kind: `kind`, or `kind` and `name`."""
        others = [record for record in cls.union().records() if record is not cls]
        shared = any(record.takes(cls.told_by[0], cls.values(cls.told_by[0])[0]) for record in others)
        return cls.told_by if shared else cls.told_by[:1]


def names_of(records: Iterable[type[Choice]], key: str) -> tuple[str, ...]:
    """Return the values of a key that select one of these kinds."""
    found = [name for record in records for name in record.values(key)]
    return tuple(dict.fromkeys(found))


def choices_in(value: Any, path: str = "") -> Iterator[tuple[str, Choice]]:
    """Yield every section with kinds in a recipe, with its dotted name."""
    if isinstance(value, Choice):
        yield path, value
    if isinstance(value, Section):
        below: Iterable[tuple[Any, Any]] = vars(value).items()
    else:
        below = enumerate(value) if isinstance(value, tuple) else ()
    for key, inside in below:
        yield from choices_in(inside, f"{path}.{key}" if path else str(key))
