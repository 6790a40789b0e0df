"""From a row of somebody's dataset to a prompt: which column is the id, the message, the answer.

The first row decides what the data looks like; every later row has to look the same. A row that does not raises
`RowError`, and whoever read the row knows which line that was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from stretto.recipe.schema import ColumnsSource, TaskSection
from stretto.tasks.template import LONGEST, TooLongError, as_text, chat, fill, pick_one
from stretto.tasks.template import problems as template_problems
from stretto.types import Message, Prompt

LONGEST_ID = 1000
"""Characters of an id, which every record of a run repeats."""

TRUTH = "reward_model.ground_truth"
"""Where verl's data have the reference answer."""
ABSENT = object()
"""What is not in a row."""

ROLES = ("system", "user", "assistant", "tool")

Row = Mapping[str, Any]


class RowError(ValueError):
    """A row that cannot become a prompt: why, and what to do about it."""

    def __init__(self, reason: str, fix: str, field: str | None = None) -> None:
        """`field` is the recipe key at fault, where it is not the row."""
        super().__init__(reason)
        self.reason = reason
        self.fix = fix
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where the parts of a prompt are in a row."""

    id: str | None
    """Column of the id, or none: then the id is a hash of the row's content."""
    answer: str | None
    """Column of the reference answer, or column.key for a value within it, or none."""
    prompt: str | None
    """Column of the user's message, or none."""
    messages: str | None
    """Column of a whole chat, or none."""
    template: str | None
    """Template of the user's message, or none."""
    system: str | None
    """A system message before it all, or none."""

    @classmethod
    def of(cls, task: TaskSection, source: ColumnsSource, first: Row) -> Self:
        """Finds the columns in the first row. RowError naming what is missing and what there is."""
        named = source.columns
        for role, column in named.items():
            if (_within(first, column) is ABSENT) if role == "answer" else column not in first:
                field = f"task.source.columns.{role}"
                raise RowError(f"there is no column {column!r}", pick_one(column, first), field)
        if task.prompt is not None:
            wrong = next(template_problems(task.prompt, list(first)), None)
            if wrong is not None:
                raise RowError(wrong.reason, wrong.fix, wrong.field)
        asked = named.get("prompt", "prompt")
        chats = "messages" not in named and isinstance(first.get(asked), list)  # as TRL's and verl's data have it
        whole = task.prompt is None and (chats or "messages" in named or (asked == "prompt" and asked not in first))
        messages = (asked if chats else named.get("messages", "messages")) if whole else None
        if messages is not None and messages not in first:
            fix = f"name the column with the question here; {pick_one('prompt', first)}"
            raise RowError("there is no column 'prompt'", fix, "task.source.columns.prompt")
        return cls(
            id=named.get("id", "id" if "id" in first else None),
            answer=named.get("answer", _answer_in(first)),
            prompt=asked if task.prompt is None and not whole else None,
            messages=messages,
            template=task.prompt,
            system=task.system,
        )

    def read(self, row: Row, *, whole: Row | None = None) -> Prompt:
        """The prompt that a row describes; an id is that of the `whole` row, where this is a part of it."""
        special = {self.id, self.answer, self.prompt, self.messages}
        messages, reference = self._chat(row), self._reference(row)
        _refuse_long(
            "messages", sum(len(str(message["content"])) for message in messages), "task.source.columns.prompt"
        )
        _refuse_long("answer", len(reference or ""), "task.source.columns.answer")
        return Prompt(
            id=self._id(whole or row),
            messages=messages,
            reference=reference,
            tags={name: value for name, value in row.items() if name not in special},
        )

    def _id(self, row: Row) -> str:
        if self.id is None:
            content = json.dumps(row, sort_keys=True, ensure_ascii=False)
            return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        id = _column(row, self.id)
        if not isinstance(id, str | int) or isinstance(id, bool) or id == "":
            raise RowError(f"the id in column {self.id!r} is neither text nor a whole number", "give each row an id")
        if len(name := as_text(id)) > LONGEST_ID:
            raise RowError(f"the id has {len(name):,} characters, more than {LONGEST_ID:,}", "give the row a short id")
        return name

    def _reference(self, row: Row) -> str | None:
        answer = ABSENT if self.answer is None else _within(row, self.answer)
        if isinstance(answer, list | dict):
            fix = "write it as text, or name another column, or column.key, in task.source.columns.answer"
            raise RowError(f"the answer in column {self.answer!r} is neither text nor a number", fix)
        return None if answer is None or answer is ABSENT else as_text(answer)

    def _chat(self, row: Row) -> tuple[Message, ...]:
        if self.messages is not None:
            return _messages(_column(row, self.messages), self.messages, self.system)
        if self.template is not None:
            try:
                return chat(fill(self.template, row), self.system)
            except KeyError as error:
                name = str(error.args[0])
                raise RowError(f"there is no column {name!r}, which task.prompt names", pick_one(name, row)) from None
            except TooLongError as error:
                raise RowError(str(error), SHORTEN) from None
        text = _column(row, str(self.prompt))
        if not isinstance(text, str) or not text:
            fix = "write the question as text, or remove the row"
            raise RowError(f"the message in column {self.prompt!r} is no text, or empty", fix)
        return chat(text, self.system)


SHORTEN = "shorten it, or take the row out"


def _refuse_long(what: str, length: int, key: str) -> None:
    """Refuses text that no model could read, before anything is done with it."""
    if length > LONGEST:
        reason = f"the {what} ({key}) has {length:,} characters, more than the {LONGEST:,} that are read"
        raise RowError(reason, SHORTEN)


def _column(row: Row, name: str) -> Any:
    if name not in row:
        raise RowError(f"there is no column {name!r}, which the first row has", pick_one(name, row))
    return row[name]


def _within(row: Row, name: str) -> Any:
    """What a column holds, or, named `column.key`, a value within it; ABSENT where there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        value = value.get(key, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def _answer_in(first: Row) -> str | None:
    """Where the reference answer is if nobody says it."""
    if "answer" in first:
        return "answer"
    return TRUTH if isinstance(_within(first, TRUTH), str | int | float) else None


def messages_in(value: Any, column: str) -> tuple[Message, ...]:
    """A column that holds a chat."""
    fix = 'write a list such as [{"role": "user", "content": "…"}]'
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r} is not a list of messages", fix)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RowError(f"column {column!r} holds a message without text in 'content'", fix)
        if message.get("role") not in ROLES:
            raise RowError(f"column {column!r} holds a message whose role is none of {', '.join(ROLES)}", fix)
    return tuple(value)


def _messages(value: Any, column: str, system: str | None) -> tuple[Message, ...]:
    """A chat that ends where the model is to speak."""
    chat = messages_in(value, column)
    if chat[-1]["role"] == "assistant":
        raise RowError(f"the chat in column {column!r} ends with the assistant", "let it end with the user's turn")
    if system is None:
        return chat
    if chat[0]["role"] == "system":
        raise RowError(f"the chat in column {column!r} has a system message of its own", "remove task.system")
    return ({"role": "system", "content": system}, *chat)
