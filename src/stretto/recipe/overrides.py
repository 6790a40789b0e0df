"""`key=value` on the command line: one value into the data of a recipe, before it is validated.

The key is dotted, with numbers for the items of a list (`rewards.0.weight=2`); the value is read as YAML. A section
that the file leaves out or sets to null is made; a list that it leaves out starts from its default. `model=ID` is
`model.name=ID`, and changes nothing else of the section.
"""

from __future__ import annotations

import copy
from typing import Any

from stretto.errors import RecipeError
from stretto.recipe import yaml_io as document
from stretto.recipe.schema import Recipe


def apply(data: Any, change: str) -> Any:
    """The data with a change `key=value` made, in place. Data that is no section at all is left to validation."""
    key, equals, text = change.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise RecipeError.of(change, "is no `key=value`", "write it like batch.samples=4")
    return put(data, key.strip(), value_of_text(key, text))


def put(data: Any, key: str, value: Any) -> Any:
    """The same with a value that needs no reading."""
    parts = ["model", "name"] if key == "model" and isinstance(value, str) else key.split(".")
    if not isinstance(data, dict):
        return data
    here: Any = data
    defaults: Any = Recipe().model_dump(mode="json")
    for depth, (part, below) in enumerate(zip(parts, [*parts[1:], None], strict=True)):
        place = _place(here, part, ".".join(parts[:depth]))
        defaults = defaults.get(part) if isinstance(defaults, dict) else None
        if below is None:
            here[place] = value
        elif isinstance(here, list) or here.get(part) is not None:
            here = here[place]
        else:
            here[part] = copy.deepcopy(defaults) if isinstance(defaults, list) else {}
            here = here[part]
    return data


def value_of_text(key: str, text: str) -> Any:
    """The right-hand side, as YAML would read it in the file."""
    try:
        value, problems = document.read(text, name=key)
    except RecipeError:
        raise RecipeError.of(
            key, f"{text!r} cannot be read as YAML", "put quotes around it, and around them for the shell"
        ) from None
    if problems:
        raise RecipeError(*problems)
    return value


def _place(here: Any, part: str, above: str) -> str | int:
    """What `part` means in a section or a list."""
    if isinstance(here, dict):
        return part
    if not isinstance(here, list):
        raise RecipeError.of(
            f"{above}.{part}", f"`{above}` is a single value, so nothing is below it", f"set {above} itself"
        )
    if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(here):
        return int(part)
    last = f"the last is {above}.{len(here) - 1}" if here else "it is empty"
    raise RecipeError.of(
        f"{above}.{part}", f"`{above}` is a list that has no item {part!r}; {last}", f"set {above} as a whole"
    )
