"""A recipe file, or the same in Python, and changes to it into a Recipe, or every problem with them at once.

Only form is judged here: names, types and bounds of single keys. What keys mean together is `checks.recipe`'s. Nothing
is guessed and nothing is filled in; defaults come from the schema, dependent values from `recipe.resolve`.
"""

from __future__ import annotations

import json
import math
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from stretto.errors import Problem, RecipeError
from stretto.recipe import schema_text as words
from stretto.recipe import yaml_io as document
from stretto.recipe.overrides import apply, put
from stretto.recipe.schema import Choice, Recipe
from stretto.recipe.schema_text import dotted
from stretto.recipe.validation_errors import choice_at, explain, intended, nearest

LONGEST = 64 * 1024
"""Bytes; a file above is something else than a recipe."""

DEEPEST = 12
"""Levels; the recipe has five, and a plan by hand a few more."""

ROUNDS = 4
"""Taking out a key can show another problem (a section that lacks it); more rounds than this were never needed."""

EXACT = 2**53
"""Whole numbers up to here survive every JSON reader; none in a recipe needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeText:
    """What could be made of a recipe."""

    recipe: Recipe | None
    """The recipe; where there are problems, what is left of it without the keys at fault, or none."""
    problems: tuple[Problem, ...]
    """What is wrong with its form."""
    doubtful: frozenset[str]
    """Full names of keys whose value in `recipe` may not be what the user meant, because theirs could not be used."""


RecipeSource = str | os.PathLike[str] | Mapping[str, Any] | Recipe
"""A recipe as it may be given: the path of its file, its sections as dicts, or a `Recipe`."""

Changes = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""Changes to a recipe: `"optimizer.lr=1e-4"` as on a command line, dotted names with values, or both in a list."""


def load_recipe(source: RecipeSource, changes: Changes = ()) -> Recipe:
    """The recipe, with the changes applied in order; raises a RecipeError with every problem."""
    return _whole(read_recipe(source, changes))


def parse_recipe(data: object) -> Recipe:
    """Plain data (sections as dicts, as from YAML) as a recipe; raises a RecipeError with every problem."""
    return _whole(read_data(data))


def _whole(reading: RecipeText) -> Recipe:
    if reading.problems or reading.recipe is None:
        raise RecipeError(*reading.problems)
    return reading.recipe


def read_recipe(source: RecipeSource, changes: Changes = ()) -> RecipeText:
    """As `load_recipe`, but returns the problems, with what can be used of the recipe without the keys at fault."""
    try:
        told, (data, problems) = listed(changes), _data(source)
    except RecipeError as error:
        return RecipeText(recipe=None, problems=error.problems, doubtful=frozenset())
    data = with_named_model(data)
    for change in told:
        try:
            if isinstance(change, str):
                data = apply(data, change)
            else:
                for key, value in change.items():
                    data = put(data, str(key), plain(value))
        except RecipeError as error:
            problems += error.problems
    reading = read_data(data, problems)
    if reading.recipe is None or reading.recipe.placement.cluster == "auto":
        return reading
    section = reading.recipe.placement
    section = section.model_copy(update={"cluster": cluster_path(section.cluster, folder_of(source))})
    return replace(reading, recipe=reading.recipe.model_copy(update={"placement": section}))


def listed(changes: Changes) -> list[str | Mapping[str, Any]]:
    """Changes one by one. RecipeError if one of them is something else."""
    given: Any = changes
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]
    for each in found:
        if not isinstance(each, str | Mapping):
            reason = f"{each!r} is no change" if each is not given else f"is {each!r}"
            fix = 'write "optimizer.lr=1e-4", {"optimizer.lr": 1e-4}, or a list of such'
            raise RecipeError.of("changes", reason, fix)
    return found


def folder_of(source: RecipeSource) -> Path:
    """The folder that a recipe's own paths are looked for in first: its file's, or the working directory."""
    return Path(os.path.abspath(source)).parent if isinstance(source, str | os.PathLike) else Path.cwd()


def _data(source: object) -> tuple[Any, list[Problem]]:
    """The recipe as plain data, and what is wrong with how it is written.

    Of a `Recipe` these are the keys that were given, so that nobody takes a default for a wish; they are validated
    again, because a copy of it may hold anything.
    """
    if isinstance(source, str | os.PathLike):
        return document.read(read_text(Path(source)), name=str(source))
    if isinstance(source, Recipe | Mapping):
        return plain(source), []
    fix = "give the path of a recipe, a dict of its sections, or a stretto.Recipe"
    raise RecipeError.of("recipe", f"is a {type(source).__name__}", fix)


def with_named_model(data: Any) -> Any:
    """The data, with a `model` that is a single text as its name."""
    if isinstance(data, dict) and isinstance(data.get("model"), str):
        return {**data, "model": {"name": data["model"]}}
    return data


def plain(value: Any, depth: int = 0) -> Any:
    """A copy of a value of Python as YAML would have it; what it has no word for is left to be refused, and so is what
    is nested too deeply, as what holds itself is."""
    if depth > DEEPEST:
        return None
    if isinstance(value, BaseModel):
        given = value.model_fields_set | set(value.told_by if isinstance(value, Choice) else ())
        return {key: plain(item, depth + 1) for key, item in vars(value).items() if key in given}
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        return value.item()
    return value


def cluster_path(told: str, folder: Path) -> str:
    """A cluster file, looked for in the recipe's folder first, as a path that means the same everywhere; else as it is.

    Whoever asks which devices there are need not know that folder then.
    """
    places = (os.path.join(folder, told), told)
    return next((os.path.abspath(place) for place in places if told and os.path.isfile(place)), told)


def read_text(path: Path) -> str:
    """The text of a recipe file."""
    name = str(path)
    if not os.path.exists(path):
        near = nearest(path.name, _recipes_beside(path))
        run = "" if path.suffix else ", or, where a run may be given, of its folder"
        fix = f"did you mean {path.parent / near}?" if near else f"give the path of a recipe, a .yaml file{run}"
        raise RecipeError.of(name, "there is no such file", fix)
    if not os.path.isfile(path):
        raise RecipeError.of(name, "is not a file", "give the path of a recipe, a .yaml file")
    try:
        with open(path, "rb") as file:
            raw = file.read(LONGEST + 1)
    except OSError as error:
        raise RecipeError.of(name, f"cannot be read: {error.strerror}", "make it readable") from None
    if len(raw) > LONGEST:
        raise RecipeError.of(name, f"is larger than {LONGEST // 1024} KiB", "give a recipe, not data or weights")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RecipeError.of(name, "is not text in UTF-8", "give a recipe, written as YAML") from None


def _recipes_beside(path: Path) -> list[str]:
    try:
        return [name for name in os.listdir(path.parent) if name.endswith((".yaml", ".yml"))]
    except (OSError, ValueError):
        return []


def read_data(data: object, problems: Sequence[Problem] = ()) -> RecipeText:
    """Validates plain data. Keys at fault are taken out and the rest is read again, so that it can be checked too."""
    found = list(problems)
    doubtful = {problem.field for problem in found}
    data = with_named_model(plain(data))
    drop_echoes(data, list(words.kinds(Recipe)))
    wrong = dict(_unusable(data))
    for _ in range(ROUNDS):
        found += [problem for problem in wrong.values() if problem.field not in doubtful]
        for path in wrong:
            meant = intended(path) if path else ()
            doubtful |= {dotted(path), dotted(drop(data, path)), *(meant if len(meant) == 1 else ())}
        if () in wrong:
            break
        try:
            recipe = Recipe.model_validate_json(json.dumps(data))
        except ValidationError as error:
            wrong = explain(error.errors(include_url=False, include_context=False), data)
        else:
            return RecipeText(recipe=recipe, problems=tuple(found), doubtful=frozenset(doubtful))
    return RecipeText(recipe=None, problems=tuple(found), doubtful=frozenset(doubtful))


def drop_echoes(data: Any, found: Sequence[words.KeyType]) -> None:
    """Takes out what only repeats that nothing is asked for: keys of another kind of a section, at null or at the value
    that they have there when they are left out. A recipe may list them, and so may one that was written down."""
    for kind in found:
        if isinstance(data, list) and typing.get_origin(kind.type) is tuple:
            for item in data:
                drop_echoes(item, list(words.kinds(typing.get_args(kind.type)[0])))
        elif isinstance(data, dict) and words.is_section(kind):
            keys, usual = words.keys_of(kind.type, data), words.defaults_of(kind.type)
            for key in data.keys() & usual.keys() - keys.keys():
                if data[key] is None or data[key] in usual[key]:
                    del data[key]
            for key in keys.keys() & data.keys():
                drop_echoes(data[key], list(words.kinds(keys[key].annotation, keys[key].metadata)))


def drop(data: Any, path: words.Path) -> words.Path:
    """Takes out what stands at the path; a list goes with its item, and a section with the key it lacks or that says
    of which kind it is. Returns the path of what is gone."""
    parent = data
    for part in path[:-1]:
        if not (part in parent if isinstance(parent, dict) else isinstance(parent, list)):
            return path
        parent = parent[part]
    if isinstance(parent, dict) and path:
        union, lacking = choice_at(path[:-1], data), path[-1] not in parent
        if union and (lacking or path[-1] in union.told_by):
            for key in set(parent) - (set(union.model_fields) - set(union.told_by)):
                del parent[key]
            return path[:-1] if lacking else path
        if not lacking:
            del parent[path[-1]]
            emptied = not parent and path[:-1] and words.at(path[:-1]) is None  # a section that no recipe has
            return drop(data, path[:-1]) if emptied else path
    return drop(data, path[:-1]) if path[:-1] else path


def _unusable(data: object, path: words.Path = ()) -> Iterator[tuple[words.Path, Problem]]:
    """Values that YAML can write and a recipe cannot hold, wherever they stand."""
    reason, fix = "", "change it"
    if len(path) > DEEPEST:
        path, reason, fix = path[:2], "is nested too deeply", "a recipe has few levels; write it flat"
    elif isinstance(data, dict | list):
        for part, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _unusable(value if _is_text(str(part)) else str(part), (*path, part))
    elif isinstance(data, float) and not math.isfinite(data):
        reason, fix = f"{data} is not a finite number", "give a finite number"
    elif isinstance(data, int) and abs(data) > EXACT:
        reason, fix = f"{words.given(data)} is too large", f"give a number of at most {EXACT}"
    elif data is not None and not isinstance(data, str | int | float):
        reason, fix = f"is a {type(data).__name__}, which no recipe can hold", "give text, a number, a list or a dict"
    elif isinstance(data, str) and not _is_text(data):
        reason, fix = "holds a character that is no text (a NUL or half of a surrogate pair)", "take the character out"
    if reason:
        yield path, Problem(field=dotted(path), reason=reason, fix=fix)


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
