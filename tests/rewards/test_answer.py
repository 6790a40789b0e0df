"""Exact, numeric and regex verdicts on friendly and on hostile text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.readings import numbers
from stretto.rewards.answer import exact, numeric, regex


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7.", ["7"]),
        ("The answer is 7.", ["7"]),
        ("1,234,567.89 and 12,34", ["1,234,567.89", "12", "34"]),
        ("1,2,3", ["1", "2", "3"]),
        ("12345,678", ["12345", "678"]),
        ("1,111,1111", ["1,111", "1111"]),
        (".5 and -.5 and is.5", [".5", "-.5", "5"]),
        ("...5", ["5"]),
        ("5-3, 5 - 3, 5 -3", ["5", "3", "5", "3", "5", "-3"]),
        ("7+12=19", ["7", "12", "19"]),
        ("x=-3 (-4) **-5** \N{MINUS SIGN}6 +7", ["-3", "-4", "-5", "\N{MINUS SIGN}6", "+7"]),
        ("$12 13% 14km", ["12", "13", "14"]),
        ("1e5 1.5E-3 2e1234 3e", ["1e5", "1.5E-3", "2", "1234", "3"]),
        ("0x7f, 0b11, 0o17, -0x7, 1_000, 10_0.5 and 0x7.5 hold 3", ["3"]),
        ("0 x 7, 0x and 00", ["0", "7", "0", "00"]),
        ("3/4. -3/4 3/0 1.5/2 60 km/h", ["3/4", "-3/4", "3", "0", "1.5/2", "60"]),
        ("3.14.15", ["3.14", "15"]),
        ("", []),
        ("no numbers, not even \N{ARABIC-INDIC DIGIT THREE}", []),
    ],
)
def test_numbers_are_found_as_a_reader_would(text: str, found: list[str]) -> None:
    assert list(numbers(text)) == found


@pytest.mark.parametrize(
    ("answer", "reference", "pick", "verdict"),
    [
        ("12", "12", "last", 1.0),
        ("12", "13", "last", 0.0),
        ("first 3, then 7.", "7", "last", 1.0),
        ("first 3, then 7.", "7", "first", 0.0),
        ("first 3, then 7.", "3", "first", 1.0),
        ("first 3, then 7.", "7", "only", 0.0),
        ("it is 7.0!", "7", "only", 1.0),
        ("14/2", "7", "last", 1.0),
        ("2/6", "1/3", "last", 1.0),
        ("0.3333333333333333", "1/3", "last", 0.0),
        ("1,000", "1000", "last", 1.0),
        ("1e3", "$1,000", "last", 1.0),
        ("0.1", ".10", "last", 1.0),
        ("-0", "0", "last", 1.0),
        ("\N{MINUS SIGN}4", "-4", "last", 1.0),
        ("100000000000000000000000000000000001", "100000000000000000000000000000000000", "last", 0.0),
        ("", "7", "last", 0.0),
        ("seven", "7", "first", 0.0),
        ("9" * 2000, "9" * 2000, "last", 0.0),
    ],
)
def test_numeric_compares_exact_values(answer: str, reference: str, pick: Any, verdict: float) -> None:
    assert numeric(answer, reference, pick) == verdict


@pytest.mark.parametrize(("reference", "says"), [("seven", "holds 0 numbers"), ("3 or 4", "holds 2 numbers")])
def test_a_reference_that_is_not_one_number_is_an_error(reference: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        numeric("7", reference, "last")


def test_exact_ignores_only_the_white_space_around() -> None:
    assert exact(" a b\n", "a b") == 1.0
    assert exact("a  b", "a b") == 0.0
    assert exact("A b", "a b") == 0.0


HOSTILE = ["9", "1,111", "1,111,", "-", ".", "1.", "1e", "1/", "1/0", "0/" + "0" * 1000, "1e99", ",1", "+-", "1/0000"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_megabyte_of_hostile_text_is_judged(piece: str) -> None:
    assert numeric(piece * (1_000_000 // len(piece)), "123456", "last") == 0.0


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="0123456789.,-+/eE \N{MINUS SIGN}x)"), st.sampled_from(["last", "first", "only"]))
def test_no_text_breaks_the_numeric_verdict(answer: str, pick: Any) -> None:
    assert numeric(answer, "7", pick) in (0.0, 1.0)


@settings(deadline=None)
@given(st.integers(), st.sampled_from(["{}", "{:,}", "it is {}.", "= {:,}!", "({})", "{}.0"]))
def test_every_integer_is_recognised_in_every_form(value: int, form: str) -> None:
    assert numeric(form.format(value), str(value), "only") == 1.0


@pytest.mark.parametrize(
    ("answer", "pattern", "pick", "compare", "verdict"),
    [
        ("Answer: blue", r"Answer: (\w+)", "last", "exact", 1.0),
        ("Answer: red. Answer: blue", r"Answer: (\w+)", "last", "exact", 1.0),
        ("Answer: red. Answer: blue", r"Answer: (\w+)", "first", "exact", 0.0),
        ("Answer: red. Answer: blue", r"Answer: (\w+)", "only", "exact", 0.0),
        ("it is blue", r"blue", "only", "exact", 1.0),
        ("nothing", r"Answer: (\w+)", "last", "exact", 0.0),
        ("Answer:", r"Answer:( \w+)?", "last", "exact", 0.0),
    ],
)
def test_regex_compares_what_it_extracts(answer: str, pattern: str, pick: Any, compare: Any, verdict: float) -> None:
    assert regex(answer, "blue", pattern, pick, compare) == verdict


def test_regex_can_compare_numbers() -> None:
    assert regex("so #### 1,000 apples", "1000", r"#### (.*)", "last", "numeric") == 1.0
    assert regex("so #### 1 or 2", "2", r"#### (.*)", "last", "numeric") == 0.0
    assert regex("so 2", "2", r"#### (.*)", "last", "numeric") == 0.0
