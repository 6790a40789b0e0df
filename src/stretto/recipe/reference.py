"""The reference page of the recipe, made from the schema: every key with its type, its default and what it does.

`scripts/reference` writes it to docs/reference/recipe.md, and a test fails when the page there is not this text.
"""

from __future__ import annotations

import ast
import inspect
import json
import typing
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.algorithms.catalog import CATALOG
from stretto.checks.rules.not_available import ONLY
from stretto.recipe.schema import Recipe
from stretto.recipe.schema_text import KeyType, expected, is_section, kinds

HEAD = """# The recipe

Every key that a recipe may have, with what it takes, its default and what it does. A recipe states only what it
changes. Keys that do not exist, keys that would have no effect and combinations that cannot work are refused by
`stretto check`, all at once. This page is made from the schema by `scripts/reference`; do not edit it.
"""


LIMITS = {
    row.field: " Not available yet."
    if row.values == (None,)
    else f" Only {', '.join(f'`{value}`' for value in row.values)} so far."
    for row in ONLY
}
"""Key -> which of its values a run takes, where that is not all of them."""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_section(Recipe, "", {}), *_algorithms()])


def _section(section: type[BaseModel], name: str, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """A heading, a table of keys, and the sections below. What was described before is only pointed to."""
    if name:
        yield f"{'#' * (2 + name.removesuffix('.N').count('.'))} {name}\n"
        yield f"{(section.__doc__ or '').strip()}\n"
    if section in seen:
        yield f"The keys are those of `{seen[section]}`.\n"
        return
    seen[section] = name
    yield "| key | takes | default | what it does |\n|---|---|---|---|"
    below: list[tuple[type[BaseModel], str]] = []
    sentences = _sentences(section)
    for key, field in section.model_fields.items():
        found = list(kinds(field.annotation, field.metadata))
        place = f"{name}.{key}" if name else key
        below += [(kind.type, place) for kind in found if is_section(kind)]
        below += [(item.type, f"{place}.N") for kind in found for item in _items(kind) if is_section(item)]
        told = f"{sentences.get(key, '')}{LIMITS.get(place, '')}"
        yield f"| `{key}` | {_cell(_takes(found))} | {_cell(_default(field))} | {_cell(told)} |"
    yield ""
    for inside, place in below:
        yield from _section(inside, place, seen)


def _sentences(section: type[BaseModel]) -> dict[str, str]:
    """Key -> the sentence below it. Only this page asks, so that no other import of the schema reads its source."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for key, sentence in pairwise(node.body):
        match key, sentence:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def _items(kind: KeyType) -> list[KeyType]:
    """What a list holds."""
    return list(kinds(typing.get_args(kind.type)[0])) if typing.get_origin(kind.type) is tuple else []


def _takes(found: list[KeyType]) -> str:
    """The types of a key; sections have tables of their own, so they are only named here."""
    if any(is_section(item) for kind in found for item in _items(kind)):
        return "a list of sections"
    return " or ".join("a section" if is_section(kind) else expected([kind]) for kind in found)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none, must be given"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or (isinstance(value, tuple) and value and isinstance(value[0], BaseModel)):
        return "as below"
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value or ' '}`"


def _cell(text: str) -> str:
    """Text that stays inside its cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _algorithms() -> Iterator[str]:
    yield "## Algorithms\n"
    yield "| name | what it is | advantage | samples | clip |\n|---|---|---|---|---|"
    for facts in CATALOG.values():
        clip = "none" if facts.clip is None else f"{facts.clip[0]:g}, {facts.clip[1]:g}"
        yield f"| `{facts.name}` | {facts.summary} | {_cell(facts.advantage)} | at least {facts.min_samples} | {clip} |"
    yield ""
