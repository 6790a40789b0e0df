"""Messages from templates: `{column}` is replaced by the row's text, and that is all a template can do.

No attributes, indices, conversions or format specifications, so a template cannot reach into Python; `{{` and `}}` are
literal braces. Text from a row is put in as it is and never looked at again: a `{` in the data is just a `{`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from string import Formatter
from typing import Any

from stretto.errors import Problem, RecipeError
from stretto.types import Message, Prompt

FIELD = "task.prompt"
"""The recipe key that holds the template."""
TEACHERS = "roles.teacher.prompt"
"""That of another wording, which a teacher is asked."""
LONGEST = 2_000_000
"""Characters that the messages of a prompt may have, and its answer. The longest contexts hold about as many."""


class TooLongError(ValueError):
    """A template that would make too long a text."""


def problems(template: str, columns: Collection[str]) -> Iterator[Problem]:
    """What is wrong with a template over rows that have these columns."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        fix = "write {column} for a column, and {{ or }} for a brace"
        yield Problem(field=FIELD, reason=f"the template does not parse: {error}", fix=fix)
        return
    for _, name, specification, conversion in pieces:
        if name is None:
            continue
        if specification or conversion:
            reason = f"{{{name}}} carries a format or conversion, which templates do not have"
            yield Problem(field=FIELD, reason=reason, fix=f"write just {{{name}}}")
        elif name not in columns:
            yield Problem(field=FIELD, reason=f"task.source has no column {name!r}", fix=pick_one(name, columns))


def fill(template: str, columns: Mapping[str, Any]) -> str:
    """The template with the row's text in it. KeyError for a column that the row lacks, TooLongError for too much."""
    pieces: list[str] = []
    length = 0
    for literal, name, _, _ in Formatter().parse(template):
        pieces.append(literal)
        if name is not None:
            pieces.append(as_text(columns[name]))
        length += sum(map(len, pieces[-2:]))
        if length > 2 * LONGEST:  # asked early, because a template can name a column many times
            raise TooLongError(f"the message has more than {LONGEST:,} characters")
    return "".join(pieces)


def as_text(value: Any) -> str:
    """Text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def chat(text: str, system: str | None) -> tuple[Message, ...]:
    """One user message, after the system message if there is one."""
    user: Message = {"role": "user", "content": text}
    return (user,) if system is None else ({"role": "system", "content": system}, user)


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """What another wording of a prompt may name: the task's columns, `prompt` for the text of its last message, and
    `reference` for the reference answer if it has one."""
    reference = {} if prompt.reference is None else {"reference": prompt.reference}
    return {**prompt.tags, **reference, "prompt": prompt.messages[-1]["content"]}


def reworded(prompt: Prompt, template: str) -> tuple[Message, ...]:
    """The prompt's chat with another last message. RecipeError where the template cannot be filled for it."""
    *before, last = prompt.messages
    columns = columns_of(prompt)
    try:
        said: Message = {**last, "content": fill(template, columns)}
    except KeyError as error:
        reason = f"the prompt {prompt.id!r} has no column {error.args[0]!r}"
        raise RecipeError.of(TEACHERS, reason, pick_one(str(error.args[0]), columns)) from None
    except TooLongError as error:
        reason = f"of the prompt {prompt.id!r} {error}"
        raise RecipeError.of(TEACHERS, reason, "shorten the template, or leave such prompts out") from None
    return (*before, said)


def pick_one(name: str, columns: Collection[str]) -> str:
    """A fix for a column that does not exist: the nearest one, and which there are."""
    near = get_close_matches(name, columns, n=1, cutoff=0.5)
    shown = ", ".join(printable(column) for column in list(columns)[:20]) or "none"
    return f"{f'did you mean {printable(near[0])}? ' if near else ''}the columns are: {shown}"


def printable(text: str, length: int = 40) -> str:
    """Text of a stranger, fit for an error message: short, and without control characters."""
    shown = text if len(text) <= length else f"{text[:length]}…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
