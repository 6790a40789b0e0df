"""Templates put text in and can do nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.tasks.template import as_text, chat, fill, printable, problems


def test_columns_are_put_in_as_text() -> None:
    columns = {"a": 7, "text": "x", "l": [1, "é"], "n": None, "f": 0.5, "a.b": "dotted"}
    assert fill("{a} {text} {l} {n} {f} {a.b} {{a}}", columns) == '7 x [1, "é"] null 0.5 dotted {a}'


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{a.__class__}", "no column 'a.__class__'"),
        ("{a[0]}", "no column 'a[0]'"),
        ("{a:>10}", "format or conversion"),
        ("{a!r}", "format or conversion"),
        ("{a:{b}}", "format or conversion"),
        ("{}", "no column ''"),
        ("{0}", "no column '0'"),
        ("{qestion}", "did you mean question?"),
        ("{a", "does not parse"),
        ("a}", "does not parse"),
    ],
)
def test_a_template_can_only_name_columns(template: str, says: str) -> None:
    found = list(problems(template, ["a", "question"]))
    assert [problem.field for problem in found] == ["task.prompt"]
    assert says in str(found[0])


def test_a_good_template_has_no_problems() -> None:
    assert list(problems("{{json}} {a}{question}", ["a", "question"])) == []


@settings(deadline=None)
@given(st.text(), st.text())
def test_no_data_is_ever_a_template(first: str, second: str) -> None:
    columns = {"a": first + "{b}{b.__class__}{{", "b": second}
    assert fill("<{a}|{b}>", columns) == f"<{columns['a']}|{second}>"


@settings(deadline=None)
@given(st.text(alphabet="{}ab.[]!:0 "))
def test_a_template_is_refused_or_filled(template: str) -> None:
    if not list(problems(template, ["a", "b"])):
        assert isinstance(fill(template, {"a": "1", "b": "2"}), str)


def test_a_chat_may_have_a_system_message() -> None:
    assert chat("hi", None) == ({"role": "user", "content": "hi"},)
    assert [message["role"] for message in chat("hi", "be kind")] == ["system", "user"]


def test_text_of_strangers_is_short_and_moves_no_cursor() -> None:
    assert printable("a\x1b[2J" + "x" * 100) == "a\ufffd[2J" + "x" * 35 + "…"
    assert as_text(True) == "true"
