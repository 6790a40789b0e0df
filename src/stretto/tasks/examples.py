"""From a row to what is learned from without sampling: a question with the answer to imitate, or with two of which one
is better.

The answer to imitate, or the better one, is the prompt's reference; the worse one and the margin stand in its tags.
What the question is, `columns` says. Rows with several answers become some pairs of them (`task.source.ranking`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from stretto.recipe.schema import ColumnsSource, Ranking, TaskSection
from stretto.tasks.columns import Columns, Row, RowError, messages_in
from stretto.tasks.template import LONGEST, as_text, pick_one
from stretto.types import Message, Prompt

REJECTED, MARGIN = "rejected", "margin"
"""The tags of a pair: the worse answer, and by how much the better one's score should be higher."""

QUESTION = "messages"
"""The column of the question, where it is taken from a row's chats."""


def chats_of(prompt: Prompt) -> list[list[Message]]:
    """A row as whole chats: one with the answer to imitate, or two, the better answer's first."""
    worse = [str(prompt.tags[REJECTED])] if REJECTED in prompt.tags else []
    answers = [prompt.reference or "", *worse]
    return [[*prompt.messages, {"role": "assistant", "content": answer}] for answer in answers]


CHAT = 'write it as text, or as [{"role": "assistant", "content": "…"}]'


def reader_of(task: TaskSection, source: ColumnsSource, first: Row) -> RowReader:
    """What reads rows that look like the first one."""
    if source.rows == "prompts":
        return Questions(columns=Columns.of(task, source, first))
    pairs = PairColumns.of(dict(source.columns), source.ranking, first) if source.rows == "pairs" else None
    named = dict(source.columns)
    if task.prompt is None and pairs is not None and pairs.question(first) is not None:
        others = {key: name for key, name in source.columns.items() if key not in ("prompt", "messages")}
        asking = source.model_copy(update={"columns": {**others, "messages": QUESTION}})
        return Pairs(columns=Columns.of(task, asking, {**first, QUESTION: pairs.question(first)}), pairs=pairs)
    columns = Columns.of(task, source, first)
    if pairs is not None:
        return Pairs(columns=columns, pairs=pairs)
    answer = named.get("answer")
    if answer is None and not _ends_with_an_answer(first.get(columns.messages or "")):
        answer = next((name for name in ("answer", "completion") if name in first), None)
    if answer is None and columns.messages is None:
        reason = "there is no column 'answer' or 'completion', so nothing is shown that could be imitated"
        raise RowError(reason, pick_one("completion", first), "task.source.columns.answer")
    return Demonstrations(columns=replace(columns, answer=None), answer=answer)


def _ends_with_an_answer(chat: Any) -> bool:
    last = chat[-1] if isinstance(chat, list) and chat else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


class RowReader(Protocol):
    """From a row to prompts."""

    @property
    def columns(self) -> Columns:
        """Where the question is."""
        ...

    def prompts(self, row: Row) -> list[Prompt]:
        """The prompts of a row. RowError if it has none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Rows that ask something."""

    columns: Columns
    """Where the question is."""

    def prompts(self, row: Row) -> list[Prompt]:
        """One."""
        return [self.columns.read(row)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Rows that ask something and show the answer."""

    columns: Columns
    """Where the question is."""
    answer: str | None
    """Column of the answer, or none where a chat ends with it."""

    def prompts(self, row: Row) -> list[Prompt]:
        """One, whose reference is the answer."""
        if self.answer is not None:
            text, asked = answer_in(row, self.answer), {key: row[key] for key in row if key != self.answer}
        else:
            column = str(self.columns.messages)
            before, text = demonstration_chat(messages_in(row.get(column), column), column)
            asked = {**row, column: list(before)}
        return [replace(self.columns.read(asked, whole=row), reference=text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Rows that ask something and compare answers."""

    columns: Columns
    """Where the question is."""
    pairs: PairColumns
    """Where the answers are."""

    def prompts(self, row: Row) -> list[Prompt]:
        """One for each pair; where there are several, the id has their number."""
        found, columns = self.pairs.pairs(row), self.pairs.all
        question = self.pairs.question(row) if self.columns.messages == QUESTION and QUESTION not in row else None
        asked = {key: row[key] for key in row if key not in columns}
        prompt = self.columns.read(asked if question is None else {**asked, QUESTION: list(question)}, whole=row)
        return [
            replace(
                prompt,
                id=prompt.id if len(found) == 1 else f"{prompt.id}/{number}",
                reference=better,
                tags={**prompt.tags, REJECTED: worse, MARGIN: margin},
            )
            for number, (better, worse, margin) in enumerate(found)
        ]


def demonstration_chat(chat: Sequence[Message], column: str) -> tuple[tuple[Message, ...], str]:
    """A whole chat as (what comes before the last answer, that answer)."""
    if chat[-1]["role"] != "assistant":
        reason = f"the chat in column {column!r} ends with the {chat[-1]['role']}, so it shows no last answer"
        raise RowError(reason, "let it end with the assistant's turn")
    if len(chat) == 1:
        raise RowError(f"the chat in column {column!r} is an answer to nothing", "let it begin with the user's turn")
    empty = next((number for number, each in enumerate(chat, 1) if _says_nothing(each)), None)
    if empty is not None:
        raise RowError(f"message {empty} in column {column!r} is an empty answer", "write one, or remove the row")
    return tuple(chat[:-1]), str(chat[-1]["content"])


def _says_nothing(message: Message) -> bool:
    return message["role"] == "assistant" and not str(message["content"]).strip()


def answer_in(row: Row, column: str) -> str:
    """The text of an answer, which may stand in a chat of one message."""
    if column not in row:
        raise RowError(f"there is no column {column!r}, which the first row has", pick_one(column, row))
    return answer_text(row[column], f"column {column!r}")


def answer_text(value: Any, where: str) -> str:
    """The answer as text; refuses what is none, or empty."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content") if value[0].get("role") == "assistant" else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"the answer in {where} is no text", CHAT)
    text = as_text(value)
    if not text.strip():
        raise RowError(f"the answer in {where} is empty", "write one, or remove the row")
    if len(text) > LONGEST:
        raise RowError(
            f"the answer in {where} has {len(text):,} characters, more than the {LONGEST:,} that are read", "shorten it"
        )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class PairColumns:
    """Where the answers of a pair, or of a ranking, are in a row."""

    chosen: str
    """Column of the better answer."""
    rejected: str
    """Column of the worse one."""
    margin: str
    """Column of the margin, if the row has one."""
    answers: str | None
    """Column of several answers, or none: then there are two."""
    scores: str
    """Column of their scores, higher for better ones."""
    ranking: str
    """Column of their numbers, the best one's first, where there are no scores."""
    rule: Ranking
    """Which of several become pairs."""

    @classmethod
    def of(cls, named: Mapping[Any, str], rule: Ranking, first: Row) -> PairColumns:
        """Finds the columns in the first row."""
        several = named.get("answers", "answers")
        found = cls(
            chosen=named.get("chosen", "chosen"),
            rejected=named.get("rejected", "rejected"),
            margin=named.get("margin", "margin"),
            answers=several if several in first else None,
            scores=named.get("scores", "scores"),
            ranking=named.get("ranking", "ranking"),
            rule=rule,
        )
        wanted = [found.chosen, found.rejected] if found.answers is None else []
        for column in wanted:
            if column not in first:
                raise RowError(
                    f"there is no column {column!r}",
                    "a row is a pair (chosen, rejected) or a ranking (answers with scores or ranking); "
                    f"{pick_one(column, first)}",
                )
        if found.answers is not None and found.scores not in first and found.ranking not in first:
            reason = f"column {found.answers!r} holds several answers, and nothing says which are better"
            raise RowError(reason, "add a column scores, or ranking with the numbers of the answers, best first")
        return found

    @property
    def all(self) -> frozenset[str]:
        """Every column that is no tag of a prompt."""
        named = {self.chosen, self.rejected, self.margin, self.scores, self.ranking, self.answers}
        return frozenset(name for name in named if name is not None)

    def question(self, row: Row) -> tuple[Message, ...] | None:
        """What both chats begin with, where the answers are whole chats."""
        chats = [row.get(self.chosen), row.get(self.rejected)]
        if not all(isinstance(chat, list) and len(chat) > 1 for chat in chats):
            return None
        better, worse = chats
        if better[:-1] != worse[:-1]:  # type: ignore[index]
            reason = f"the chats in {self.chosen!r} and {self.rejected!r} differ before their last message"
            raise RowError(reason, "let both answer the same question")
        return tuple(better[:-1])  # type: ignore[index]

    def pairs(self, row: Row) -> list[tuple[str, str, float]]:
        """(better answer, worse one, margin) of every pair."""
        if self.answers is not None:
            return self._of_ranking(row, self.answers)
        better, worse = (answer_in(_last(row, column), column) for column in (self.chosen, self.rejected))
        if better == worse:
            reason = f"the answers in {self.chosen!r} and {self.rejected!r} are the same, so neither is better"
            raise RowError(reason, "remove the row")
        return [(better, worse, _number(row.get(self.margin, 0.0), self.margin, least=0.0))]

    def _of_ranking(self, row: Row, column: str) -> list[tuple[str, str, float]]:
        """The best answers, each against worse ones from all over the ranking."""
        value = row.get(column)
        if not isinstance(value, list) or len(value) < 2:
            raise RowError(f"column {column!r} is no list of two answers or more", "write one, or remove the row")
        answers = [answer_text(each, f"column {column!r}") for each in value]
        scores = self._scores(row, len(answers))
        order = sorted(range(len(answers)), key=lambda place: -scores[place])
        count = min(len(order) - 1, math.ceil(self.rule.best * len(order)))
        best, rest = order[:count], order[count:]
        found = []
        most = min(self.rule.pairs, len(best) * len(rest))
        for number in range(most):
            one, other = best[number % count], rest[int((number + 0.5) * len(rest) / most)]
            if scores[one] > scores[other] and answers[one] != answers[other]:
                margin = scores[one] - scores[other] if self.rule.margins else 0.0
                found.append((answers[one], answers[other], margin))
        if not found:
            raise RowError(f"no answer in column {column!r} is better than another", "remove the row")
        return list(dict.fromkeys(found))

    def _scores(self, row: Row, count: int) -> list[float]:
        if self.scores in row:
            value = row[self.scores]
            if not isinstance(value, list) or len(value) != count:
                raise RowError(f"column {self.scores!r} is no list of {count} numbers, one per answer", "write one")
            return [_number(each, self.scores) for each in value]
        if self.rule.margins:
            reason = f"there is no column {self.scores!r}, and margins are differences of scores"
            raise RowError(reason, "add one, or leave margins out", "task.source.ranking.margins")
        order = row.get(self.ranking)
        numbers = isinstance(order, list) and all(type(place) is int for place in order)
        if not isinstance(order, list) or not numbers or sorted(order) != list(range(count)):
            reason = f"column {self.ranking!r} is no list of the numbers 0 to {count - 1}, the best answer's first"
            raise RowError(reason, "write one, or scores")
        return [float(-order.index(place)) for place in range(count)]


def _last(row: Row, column: str) -> Row:
    """The row with the last message of a whole chat in the column's place."""
    value = row.get(column)
    return {**row, column: value[-1:]} if isinstance(value, list) and len(value) > 1 else row


def _number(value: Any, column: str, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" of {least:g} or more"
        raise RowError(f"column {column!r} holds {str(value)[:40]!r}, which is no number{bound}", "write a number")
    return float(value)
