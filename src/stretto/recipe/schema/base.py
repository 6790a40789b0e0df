"""What every section of a recipe is made of: strict records, their numbers, and records of which there are kinds.

A section of several kinds (`rewards.0`, `task.source`, `algorithm`, ...) is a `Choice`: a class with the keys that all
kinds share, and below it one record a kind, with the keys that act in it and no others. Validation joins the records
to a union discriminated by `kind` (or `name`), so adding a kind is adding a record.
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
"""What stands in messages for something of the user's."""

Plugin = Annotated[str, Field(pattern=":")]
"""module:name of something in a Python file beside the recipe or in the working folder, or in a package."""

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
    """The keys whose values tell the kinds apart; a later one is asked where several kinds are left."""

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
        """Of a section with kinds the union of these, discriminated by what they are told by."""
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
        """True for a section with kinds, false for one of the kinds."""
        return bool(cls.__subclasses__())

    @classmethod
    def union(cls) -> type[Choice]:
        """The section that this is a kind of."""
        return next(base for base in cls.__mro__ if Choice in base.__bases__)

    @classmethod
    def records(cls) -> tuple[type[Self], ...]:
        """The kinds of this section, the default first and those of the user's last."""
        found = [record for below in cls.__subclasses__() for record in below.records() or (below,)]
        return tuple(sorted(found, key=lambda record: OWN in record.values(cls.told_by[0])))

    @classmethod
    def narrowed(cls, keys: Mapping[str, Any]) -> tuple[str, tuple[type[Self], ...], tuple[type[Self], ...]]:
        """The key that decides, the kinds that it decides between, and what is left: one kind, or none where its value
        is that of no kind."""
        left = cls.records()
        for key in cls.told_by:
            among, value = left, keys.get(key, left[0].model_fields[key].default)
            left = tuple(record for record in among if record.takes(key, value))
            if len(left) < 2:
                break
        return key, among, left

    @classmethod
    def record_of(cls, keys: Mapping[str, Any]) -> type[Self] | None:
        """The kind that the keys name, or none."""
        return next(iter(cls.narrowed(keys)[2]), None)

    @classmethod
    def takes(cls, key: str, value: Any) -> bool:
        """True if the kind has this value of a key that kinds are told by."""
        field = cls.model_fields[key]
        if typing.get_origin(field.annotation) is Literal:
            return value in typing.get_args(field.annotation)
        pattern = next((limit.pattern for limit in field.metadata if hasattr(limit, "pattern")), None)
        return isinstance(value, str) and (pattern is None or re.search(pattern, value) is not None)

    @classmethod
    def values(cls, key: str) -> tuple[str, ...]:
        """The values of a key that this kind is told by."""
        return typing.get_args(cls.model_fields[key].annotation) or (OWN,)

    @classmethod
    def label(cls) -> tuple[str, ...]:
        """The keys that tell this kind from all others: `kind`, or `kind` and `name`."""
        others = [record for record in cls.union().records() if record is not cls]
        shared = any(record.takes(cls.told_by[0], cls.values(cls.told_by[0])[0]) for record in others)
        return cls.told_by if shared else cls.told_by[:1]


def names_of(records: Iterable[type[Choice]], key: str) -> tuple[str, ...]:
    """What may be written at a key to get one of these kinds."""
    found = [name for record in records for name in record.values(key)]
    return tuple(dict.fromkeys(found))


def choices_in(value: Any, path: str = "") -> Iterator[tuple[str, Choice]]:
    """Every section with kinds in a recipe, with its dotted name."""
    if isinstance(value, Choice):
        yield path, value
    if isinstance(value, Section):
        below: Iterable[tuple[Any, Any]] = vars(value).items()
    else:
        below = enumerate(value) if isinstance(value, tuple) else ()
    for key, inside in below:
        yield from choices_in(inside, f"{path}.{key}" if path else str(key))
