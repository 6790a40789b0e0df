"""Rows with answers: demonstrations, pairs and rankings as others write them, and what is said of those that fail."""

import json

import pytest

from stretto.errors import RecipeError
from stretto.recipe.schema import Ranking, Source, TaskSection
from stretto.tasks.source import load_prompts, places

USER = {"role": "user", "content": "1+1?"}


def said(text):
    return {"role": "assistant", "content": text}


def task(rows, *, prompt=None, system=None, **source):
    section = Source(kind="jsonl", path="data.jsonl", rows=rows, **source)
    return TaskSection(source=section, prompt=prompt, system=system)


def write(folder, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "data.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def read(folder, section, *rows):
    write(folder, *rows)
    return load_prompts(section, folder)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "completion": "2"},
        {"prompt": "1+1?", "answer": 2},
        {"prompt": [USER], "completion": [said("2")]},
        {"messages": [USER, said("2")]},
        {"messages": [USER], "answer": "2"},
    ],
    ids=["completion", "answer", "chats", "a whole chat", "chat and answer"],
)
def test_a_demonstration_is_a_question_with_the_answer_as_its_reference(row, tmp_path):
    (prompt,) = read(tmp_path, task("demonstrations"), row)
    assert (prompt.messages, prompt.reference, prompt.tags) == ((USER,), "2", {})


def test_a_chat_keeps_its_earlier_turns_and_columns_may_be_called_anything(tmp_path):
    chat = [USER, said("2"), {"role": "user", "content": "and one?"}, said("3")]
    (prompt,) = read(tmp_path, task("demonstrations", columns={"messages": "talk"}), {"talk": chat, "level": 4})
    assert (prompt.messages, prompt.reference, prompt.tags) == (tuple(chat[:3]), "3", {"level": 4})
    (prompt,) = read(
        tmp_path, task("demonstrations", prompt="{a}+1?", system="s", columns={"answer": "is"}), {"a": 1, "is": 2}
    )
    assert [message["content"] for message in prompt.messages] == ["s", "1+1?"]
    assert prompt.reference == "2"


def test_rows_that_show_other_answers_to_one_question_are_other_rows(tmp_path):
    both = read(tmp_path, task("demonstrations"), *({"prompt": "1+1?", "completion": text} for text in ("2", "two")))
    assert len({prompt.id for prompt in both}) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": 0.5},
        {"prompt": [USER], "chosen": [said("2")], "rejected": [said("3")], "margin": 0.5},
        {"chosen": [USER, said("2")], "rejected": [USER, said("3")], "margin": 0.5},
    ],
    ids=["texts", "chats", "whole chats"],
)
def test_a_pair_is_a_question_with_the_better_answer_as_its_reference(row, tmp_path):
    (prompt,) = read(tmp_path, task("pairs"), row)
    assert (prompt.messages, prompt.reference) == ((USER,), "2")
    assert prompt.tags == {"rejected": "3", "margin": 0.5}


def test_a_ranking_becomes_pairs_of_its_best_answers_with_worse_ones_from_all_over_it(tmp_path):
    answers, scores = [f"a{number}" for number in range(20)], [float(number) for number in range(20)]
    row = {"prompt": "?", "answers": answers, "scores": scores, "id": "q"}
    rule = Ranking(best=0.05, pairs=4, margins=True)
    found = read(tmp_path, task("pairs", ranking=rule), row)
    assert [(p.id, p.reference, p.tags["rejected"], p.tags["margin"]) for p in found] == [
        ("q/0", "a19", "a16", 3.0),
        ("q/1", "a19", "a11", 8.0),
        ("q/2", "a19", "a7", 12.0),
        ("q/3", "a19", "a2", 17.0),
    ]
    row = {"prompt": "?", "answers": ["mid", "worst", "best"], "ranking": [2, 0, 1]}
    found = read(tmp_path, task("pairs", ranking=Ranking(best=0.5, pairs=9)), row)
    assert {(p.reference, p.tags["rejected"]) for p in found} == {("best", "worst"), ("mid", "worst")}


def test_places_in_a_ranking_are_no_margins(tmp_path):
    row = {"prompt": "?", "answers": ["worse", "better"], "ranking": [1, 0]}
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, task("pairs", ranking=Ranking(margins=True)), row)
    assert caught.value.problems[0].field == "task.source.ranking.margins"


def test_answers_of_the_same_score_are_no_pair(tmp_path):
    row = {"prompt": "?", "answers": ["a", "b", "c"], "scores": [1, 1, 0]}
    found = read(tmp_path, task("pairs"), row)
    assert [(p.reference, p.tags["rejected"]) for p in found] == [("a", "c")]


GOOD = {
    "demonstrations": {"prompt": "q", "completion": "c"},
    "chats": {"messages": [USER, said("2")]},
    "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "whole": {"chosen": [USER, said("2")], "rejected": [USER, said("3")]},
    "ranked": {"prompt": "q", "answers": ["a", "b"], "scores": [1, 0]},
}
BAD = [
    ("demonstrations", {"prompt": "q", "completion": " "}, "the answer in column 'completion' is empty"),
    ("demonstrations", {"prompt": "q"}, "there is no column 'completion'"),
    ("demonstrations", {"prompt": "q", "completion": ["c"]}, "is no text"),
    ("demonstrations", {"prompt": "", "completion": "c"}, "is no text, or empty"),
    ("demonstrations", b'{"prompt": "\xff", "completion": "c"}', "is not UTF-8"),
    ("demonstrations", b'{"prompt": "q", ', "is not JSON"),
    ("chats", {"messages": [USER]}, "ends with the user"),
    ("chats", {"messages": [said("2")]}, "an answer to nothing"),
    ("chats", {"messages": [USER, said(""), USER, said("2")]}, "message 2 in column 'messages' is an empty answer"),
    ("chats", {"messages": "hello"}, "is not a list of messages"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
    ("pairs", {"prompt": "q", "chosen": "a"}, "there is no column 'rejected'"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": ""}, "in column 'rejected' is empty"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "wide"}, "no number of 0 or more"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": -1}, "no number of 0 or more"),
    ("whole", {"chosen": [USER, said("2")], "rejected": [said("x"), said("3")]}, "differ before their last message"),
    ("ranked", {"prompt": "q", "answers": ["a"], "scores": [1]}, "no list of two answers or more"),
    ("ranked", {"prompt": "q", "answers": ["a", "b"], "scores": [1]}, "no list of 2 numbers"),
    ("ranked", {"prompt": "q", "answers": ["a", "b"], "scores": [1, True]}, "is no number"),
    ("ranked", {"prompt": "q", "answers": ["a", "b"], "scores": [1, 1]}, "better than another"),
    ("ranked", {"prompt": "q", "answers": ["a", "b"], "ranking": [1, 1]}, "the numbers 0 to 1"),
    ("ranked", {"prompt": "q", "answers": ["a", "b"], "ranking": ["1", "0"]}, "the numbers 0 to 1"),
]


@pytest.mark.parametrize(("kind", "row", "reason"), BAD, ids=[f"{kind}: {reason}" for kind, _, reason in BAD])
def test_a_bad_row_is_named_by_file_and_line_with_a_reason_and_a_fix(kind, row, reason, tmp_path):
    rows = "demonstrations" if kind in ("demonstrations", "chats") else "pairs"
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, task(rows), GOOD[kind], row)
    (problem,) = caught.value.problems
    assert problem.field == f"{tmp_path / 'data.jsonl'}:2"
    assert reason in problem.reason
    assert problem.fix


@pytest.mark.parametrize(
    ("rows", "first", "reason"),
    [
        ("demonstrations", {"prompt": "q", "reply": "c"}, "no column 'answer' or 'completion'"),
        ("demonstrations", {"text": "c"}, "no column 'prompt'"),
        ("pairs", {"prompt": "q", "better": "a", "rejected": "b"}, "no column 'chosen'"),
        ("pairs", {"prompt": "q", "answers": ["a", "b"]}, "nothing says which are better"),
    ],
)
def test_a_first_row_of_another_kind_says_which_columns_there_are(rows, first, reason, tmp_path):
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, task(rows), first)
    (problem,) = caught.value.problems
    assert reason in problem.reason
    assert list(first)[-1] in f"{problem.reason} {problem.fix}"


def test_a_row_can_be_looked_up_by_its_id(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    first, second = read(tmp_path, task("demonstrations"), *rows)
    path = tmp_path / "data.jsonl"
    assert places(task("demonstrations"), tmp_path) == {first.id: f"{path}:1", second.id: f"{path}:2"}
