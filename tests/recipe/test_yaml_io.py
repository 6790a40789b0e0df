"""YAML as recipes have it: what is a number, what is refused, and that what is written reads back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import RecipeError
from stretto.recipe.yaml_io import read, write


def value(text):
    data, problems = read(f"key: {text}", name="recipe")
    assert problems == []
    return data["key"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2e-4", 2e-4),
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("-2.5e+1", -25.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("7", 7),
        ("-7", -7),
        ("010", 10),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'2e-4'", "2e-4"),
        ("e5", "e5"),
        ("[1, a, 2e0]", [1, "a", 2.0]),
    ],
)
def test_a_plain_value_is_what_it_looks_like(text, expected):
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


def test_keys_are_always_text():
    data, _ = read("1: a\ntrue: b\nno: c\nnull: d", name="recipe")
    assert data == {"1": "a", "true": "b", "no": "c", "null": "d"}


def test_a_key_given_twice_is_named_with_both_lines():
    _, problems = read("a: 1\nb:\n  - c: 1\n    d: 2\n    c: 3\na: 2", name="recipe")
    assert [problem.field for problem in problems] == ["b.0.c", "a"]
    assert "line 5" in problems[0].reason and "line 3" in problems[0].reason
    assert "line 6" in problems[1].reason and "line 1" in problems[1].reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "line 1"),
        ("a: b: c", "line 1, column 5"),
        ("a:\n\tb: 1", "line 2"),
        ("- a\nb: c", "line 2"),
        ("a: 1\n---\nb: 2", "line 2"),
        ("a: &x [1]\nb: *x", "anchors"),
        ("a: *x", "anchors"),
        ("a: !!python/object/apply:os.system [ls]", "tags"),
        ("a: !!binary aGk=", "tags"),
        ("a: !!float x", "tags"),
        ("a: ! 5", "tags"),
        ("? [1, 2]\n: 3", "a key must be text"),
        ("? {a: 1}\n: 3", "a key must be text"),
        ("a: " + "9" * 5000, "too many digits"),
        ("a: \x00", "character"),
        ("[" * 5000, "nested too deeply"),
        ('a: "\\q"', "line 1"),
        ("a: @b", "line 1"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_problem(text, reason):
    with pytest.raises(RecipeError) as caught:
        read(text, name="some.yaml")
    (problem,) = caught.value.problems
    assert problem.field == "some.yaml"
    assert reason in problem.reason


def test_tabs_are_called_by_their_name():
    with pytest.raises(RecipeError, match="spaces, not tabs"):
        read("a:\n\tb: 1", name="recipe")


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(lambda key: len(key) < 100), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(DATA)
def test_what_is_written_reads_back_equal(data):
    assert read(write(data), name="recipe") == (data, [])


@pytest.mark.parametrize(
    "text", ["1e-3", "no", "010", "~", "2024-01-01", "true", "=", "<<", "1_000", "", " ", "a: b", "# c"]
)
def test_text_that_looks_like_something_else_reads_back_as_text(text):
    assert read(write({"key": text}), name="recipe")[0] == {"key": text}


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        read(text, name="recipe")
    except RecipeError as error:
        assert error.problems
