"""Files of rows: what is read from them, and what is said about those that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import Source, TaskSection
from stretto.tasks.source import load_prompts, peek
from stretto.types import Prompt


def write(folder: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    """A file with a row per line; text and bytes are written as they are."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return folder


def task(prompt: str | None = None, system: str | None = None, **source: Any) -> TaskSection:
    return TaskSection(source=Source(kind="jsonl", **{"path": "data.jsonl", **source}), prompt=prompt, system=system)


def refused(folder: Path, task: TaskSection) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as caught:
        load_prompts(task, folder)
    return caught.value.problems


def test_default_columns_need_no_setting(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "1+1?", "answer": 2, "level": 3}, {"prompt": "é\u2028?", "answer": None, "level": 4})
    first, second = load_prompts(task(), tmp_path)
    assert first.messages == ({"role": "user", "content": "1+1?"},)
    assert first.reference == "2"
    assert first.tags == {"level": 3}
    assert second.messages[0]["content"] == "é\u2028?"
    assert second.reference is None
    assert first.id != second.id


def test_an_id_is_that_of_the_row_or_a_stable_hash_of_its_content(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "a", "answer": "b"})
    (hashed,) = load_prompts(task(), tmp_path)
    write(tmp_path, {"answer": "b", "prompt": "a"})
    assert load_prompts(task(system="brief"), tmp_path)[0].id == hashed.id == "211d65780ebb5b09"
    write(tmp_path, {"prompt": "a", "id": 7}, {"prompt": "a", "id": "x"})
    assert [prompt.id for prompt in load_prompts(task(), tmp_path)] == ["7", "x"]


def test_columns_can_be_called_anything(tmp_path: Path) -> None:
    write(tmp_path, {"Question": "q", "gold answer": 0.5, "key": "k", "answer": "not this", "prompt": "nor this"})
    columns = {"prompt": "Question", "answer": "gold answer", "id": "key"}
    (one,) = load_prompts(task(columns=columns), tmp_path)
    assert (one.id, one.messages[0]["content"], one.reference) == ("k", "q", "0.5")
    assert one.tags == {"answer": "not this", "prompt": "nor this"}


def test_a_template_makes_the_message_of_columns(tmp_path: Path) -> None:
    write(tmp_path, {"a": 1, "text": "{a} {0.__class__}", "answer": "x"})
    (one,) = load_prompts(task("<{a}> {text}", "be brief"), tmp_path)
    assert [message["content"] for message in one.messages] == ["be brief", "<1> {a} {0.__class__}"]
    assert one.tags == {"a": 1, "text": "{a} {0.__class__}"}


def test_a_row_may_hold_a_whole_chat(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "1+1"},
    ]
    write(tmp_path, {"messages": chat, "answer": "2"})
    assert load_prompts(task(), tmp_path)[0].messages == tuple(chat)
    assert load_prompts(task(columns={"messages": "messages"}), tmp_path)[0].tags == {}
    assert load_prompts(task(system="s"), tmp_path)[0].messages[0] == {"role": "system", "content": "s"}
    write(tmp_path, {"prompt": chat, "answer": "2"})  # as TRL's and verl's data have it
    (one,) = load_prompts(task(), tmp_path)
    assert (one.messages, one.tags, one.reference) == (tuple(chat), {}, "2")
    write(tmp_path, {"asked": chat, "prompt": "p"})
    assert load_prompts(task(columns={"prompt": "asked"}), tmp_path)[0].messages == tuple(chat)
    assert load_prompts(task("<{prompt}>"), tmp_path)[0].messages[-1]["content"] == "<p>"


def test_a_reference_answer_may_be_within_a_column(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1?"}]
    verl = {"prompt": chat, "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"answer": 2.5}}
    write(tmp_path, verl)
    (one,) = load_prompts(task(), tmp_path)
    assert (one.reference, one.tags["reward_model"]) == ("2", verl["reward_model"])
    assert load_prompts(task(columns={"answer": "extra_info.answer"}), tmp_path)[0].reference == "2.5"
    for other in ({"answer": "3"}, {"extra_info.answer": "3"}):
        write(tmp_path, {**verl, **other})
        assert load_prompts(task(columns={"answer": next(iter(other))}), tmp_path)[0].reference == "3"
    write(tmp_path, {**verl, "reward_model": {"ground_truth": ["2"]}})
    assert load_prompts(task(), tmp_path)[0].reference is None
    for column, says in (("reward_model", "neither text nor a number"), ("reward_model.gold", "there is no column")):
        assert says in refused(tmp_path, task(columns={"answer": column}))[0].reason


def test_the_prompt_column_comes_before_the_messages_column_unless_named(tmp_path: Path) -> None:
    write(tmp_path, {"messages": [{"role": "user", "content": "chat"}], "prompt": "text"})
    assert load_prompts(task(), tmp_path)[0].messages[0]["content"] == "text"
    assert load_prompts(task(columns={"messages": "messages"}), tmp_path)[0].messages[0]["content"] == "chat"


def test_blank_lines_and_a_byte_order_mark_are_nothing(tmp_path: Path) -> None:
    write(tmp_path, b"\xef\xbb\xbf" + b'{"prompt": "a"}', "", "   ", {"prompt": "b"})
    assert [prompt.messages[0]["content"] for prompt in load_prompts(task(), tmp_path)] == ["a", "b"]


def test_a_path_is_looked_up_beside_the_recipe_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, cwd = tmp_path / "recipes", tmp_path / "work"
    recipe.mkdir()
    write_at = {"both.jsonl": (recipe, cwd), "here.jsonl": (cwd,)}
    cwd.mkdir()
    for name, folders in write_at.items():
        for folder in folders:
            write(folder, {"prompt": folder.name}, name=name)
    monkeypatch.chdir(cwd)

    def content(path: str) -> Any:
        return load_prompts(task(path=path), recipe)[0].messages[0]["content"]

    assert content("both.jsonl") == "recipes"
    assert content("here.jsonl") == "work"
    assert content(str(cwd / "both.jsonl")) == "work"


GOOD = {"prompt": "good", "answer": "1"}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{not json", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{"prompt": "a"} {"prompt": "b"}', "not JSON: Extra data at column 17"),
        ("[1, 2]", "not an object"),
        ('"text"', "not an object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "a", "x": NaN}', "NaN is no JSON number"),
        ('{"prompt": "a", "x": 1e999}', "not JSON"),
        ('{"prompt": "a", "x": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"answer": "1", "promt": "a"}, "no column 'prompt', which the first row has"),
        ({"prompt": 5}, "is no text, or empty"),
        ({"prompt": ""}, "is no text, or empty"),
        ({"prompt": "a", "answer": ["1"]}, "neither text nor a number"),
        (GOOD, "the row is the same as on line 1"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, bad: Any, says: str) -> None:
    write(tmp_path, GOOD, "", bad, {"prompt": "fine"})
    (problem,) = refused(tmp_path, task())
    assert problem.field == f"{tmp_path}/data.jsonl:3"
    assert says in problem.reason
    assert problem.fix
    assert peek(task(), tmp_path).problems == (problem,)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}], "the id '1' is that of line 1 already"),
        ([{"id": 1, "prompt": "a"}, {"prompt": "b"}], "no column 'id', which the first row has"),
        ([{"id": 1, "prompt": "a"}, {"id": "", "prompt": "b"}], "neither text nor a whole number"),
        ([{"id": 1, "prompt": "a"}, {"id": True, "prompt": "b"}], "neither text nor a whole number"),
        ([{"id": 1, "prompt": "a"}, {"id": 1.5, "prompt": "b"}], "neither text nor a whole number"),
    ],
)
def test_a_bad_id_is_told(tmp_path: Path, rows: list[Any], says: str) -> None:
    write(tmp_path, *rows)
    (problem,) = refused(tmp_path, task())
    assert says in problem.reason


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "not a list"),
        ([], "not a list"),
        (["hi"], "without text"),
        ([{"role": "user"}], "without text"),
        ([{"role": "user", "content": 1}], "without text"),
        ([{"role": ["user"], "content": "a"}], "role is none of"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ends with the assistant"),
        ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "a system message of its own"),
    ],
)
def test_a_bad_chat_is_told(tmp_path: Path, messages: Any, says: str) -> None:
    write(tmp_path, {"messages": messages})
    (problem,) = refused(tmp_path, task(system="s"))
    assert says in problem.reason


@pytest.mark.parametrize(
    ("source", "prompt", "field", "says"),
    [
        ({}, None, "task.source.columns.prompt", "the columns are: answr, question"),
        ({"columns": {"prompt": "qestion"}}, None, "task.source.columns.prompt", "did you mean question?"),
        (
            {"columns": {"prompt": "question", "answer": "answer"}},
            None,
            "task.source.columns.answer",
            "did you mean answr?",
        ),
        ({}, "{qestion}", "task.prompt", "did you mean question?"),
        ({}, "{question.x}", "task.prompt", "no column 'question.x'"),
    ],
)
def test_a_missing_column_is_told_once_with_those_that_exist(
    tmp_path: Path, source: dict[str, Any], prompt: str | None, field: str, says: str
) -> None:
    write(tmp_path, {"answr": "1", "question": "a"}, {"answr": "1", "question": "b"})
    (problem,) = refused(tmp_path, task(prompt, **source))
    assert problem.field == field
    assert says in str(problem)
    assert "data.jsonl:1" in problem.reason


def test_a_column_that_only_some_rows_have_is_told(tmp_path: Path) -> None:
    write(tmp_path, {"question": "a"}, {"quesion": "b"})
    (problem,) = refused(tmp_path, task("{question}"))
    assert problem.field.endswith(":2")
    assert "did you mean quesion?" in problem.fix


def test_several_bad_lines_are_told_at_once_but_not_a_million(tmp_path: Path) -> None:
    write(tmp_path, GOOD, *["broken"] * 3)
    assert [problem.field[-2:] for problem in refused(tmp_path, task())] == [":2", ":3", ":4"]
    write(tmp_path, GOOD, *["broken"] * 1000)
    assert len(refused(tmp_path, task())) == 10


def test_names_of_columns_cannot_disturb_a_terminal(tmp_path: Path) -> None:
    write(tmp_path, {"\x1b[2J" + "x" * 1000: 1})
    (problem,) = refused(tmp_path, task())
    assert "\x1b" not in str(problem)
    assert len(str(problem)) < 500


@pytest.mark.parametrize("rows", [[], [""], ["", "  "]])
def test_an_empty_file_is_told(tmp_path: Path, rows: list[str]) -> None:
    write(tmp_path, *rows)
    (problem,) = refused(tmp_path, task())
    assert (problem.field, problem.reason) == (f"{tmp_path}/data.jsonl", "the file holds no rows")


@pytest.mark.parametrize("path", ["no.jsonl", "folder", "x" * 5000, "a\x00b", "~nobody_of_that_name/x", ""])
def test_a_file_that_is_not_there_is_told(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (problem,) = refused(tmp_path, task(path=path))
    assert problem.field == "task.source.path"


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (task("{prompt}", columns={"prompt": "prompt"}), "task.source.columns.prompt"),
        (task("{prompt}", columns={"messages": "prompt"}), "task.source.columns.messages"),
        (task(columns={"messages": "prompt", "prompt": "prompt"}), "task.source.columns"),
    ],
)
def test_settings_without_effect_are_told(tmp_path: Path, recipe: TaskSection, field: str) -> None:
    write(tmp_path, GOOD)
    assert field in [problem.field for problem in refused(tmp_path, recipe)]


def test_peek_reads_only_the_first_rows(tmp_path: Path) -> None:
    write(tmp_path, *({"prompt": str(number)} for number in range(5)), "broken")
    seen = peek(task(), tmp_path)
    assert [prompt.messages[0]["content"] for prompt in seen.prompts] == ["0", "1", "2", "3", "4"]
    assert seen.problems == ()
    assert len(peek(task(), tmp_path, rows=2).prompts) == 2
    assert len(peek(task(), tmp_path, rows=6).problems) == 1


def test_a_file_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "open", refuse)
    (problem,) = refused(tmp_path, task())
    assert problem.reason == "cannot be read: Permission denied"


def test_prompts_are_records(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    assert all(isinstance(prompt, Prompt) for prompt in load_prompts(task(), tmp_path))


MIB = 2**20


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b'{"prompt": "' + b"x" * (30 * MIB) + b'"}', "the line has more than 4 MiB"),
        (b'{"prompt": "' + b"x" * (4 * MIB) + b'"}', "the line has more than 4 MiB"),
        (b"[" * (5 * MIB), "the line has more than 4 MiB"),
        (
            {"prompt": "x" * 2_000_001},
            "messages (task.source.columns.prompt) has 2,000,001 characters, more than the 2,0",
        ),
        (
            {"prompt": "1", "answer": "x" * 2_000_001},
            "the answer (task.source.columns.answer) has 2,000,001 characters",
        ),
        ({"prompt": "1", "id": "x" * 1001}, "the id has 1,001 characters"),
        ({"prompt": "1", "id": 10**1500}, "the id has 1,501 characters"),
        (b'{"prompt": "\x00"}', "not JSON: Invalid control character"),
        ('{"prompt": "1"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"prompt": "1", "prompt": "2"}', "has the key 'prompt' twice"),
        (b'{"prompt": "1", "more": [{"a": 1, "b": 2, "a": 1}]}', "has the key 'a' twice"),
        (b'{"prompt": "1", "answer": 1e999}', "not JSON that can be read"),
        (b'{"prompt": "1", "answer": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
        (b'{"prompt": "1", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not JSON that can be read"),
        (b'{"prompt": ["1"]}', "is no text, or empty"),
        (b'{"prompt": {"role": "user"}}', "is no text, or empty"),
        (b'{"prompt": true}', "is no text, or empty"),
        (b'{"prompt": "1", "id": [1]}', "neither text nor a whole number"),
        (b'{"prompt": "1", "answer": {"a": 1}}', "neither text nor a number"),
    ],
    ids=[
        *("30 MiB", "4 MiB", "brackets", "prompt", "answer", "id", "number as id", "NUL", "UTF-16", "surrogate"),
        *(
            "key twice",
            "inner key twice",
            "infinite",
            "digits",
            "nested",
            "list",
            "object",
            "boolean",
            "list as id",
            "object as answer",
        ),
    ],
)
def test_a_row_that_no_model_could_read_is_refused_and_the_next_is_read(tmp_path: Path, row: Any, said: str) -> None:
    write(tmp_path, {"prompt": "0", "answer": "1", "id": "a"}, row, {"prompt": "2"})
    named = task(columns={"answer": "answer", "id": "id"})
    problems = refused(tmp_path, named)
    assert problems[0].field == f"{tmp_path / 'data.jsonl'}:2"
    assert said in problems[0].reason
    assert problems[0].fix
    assert [problem.field.rpartition(":")[2] for problem in problems[1:]] == ["3"], "it has no id; the count goes on"


def test_the_longest_row_and_text_are_read(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "x" * 2_000_000, "answer": "y" * 2_000_000, "more": ""})
    padded = row[:-2] + "z" * (4 * MIB - len(row) - 1) + '"}'
    write(tmp_path, padded)
    assert len(load_prompts(task(), tmp_path)[0].messages[0]["content"]) == 2_000_000


def test_a_template_that_repeats_a_column_is_stopped_early(tmp_path: Path) -> None:
    write(tmp_path, {"text": "x" * 1_000_000})
    (problem,) = refused(tmp_path, task("{text}" * 10_000))
    assert "the message has more than 2,000,000 characters" in problem.reason


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    write(tmp_path, b"\xef\xbb\xbf" + b'{"prompt": "1"}', b"\xef\xbb\xbf" + b'{"prompt": "2"}')
    assert [problem.field[-2:] for problem in refused(tmp_path, task())] == [":2"]
    write(tmp_path, b"\xef\xbb\xbf" + b'{"prompt": "\\u0000"}')
    assert load_prompts(task(), tmp_path)[0].messages[0]["content"] == "\0"
