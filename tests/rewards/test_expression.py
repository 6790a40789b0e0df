"""Mathematical expressions: what counts as equal, what as no answer, and what as a failure of ours."""

from __future__ import annotations

import pytest

from stretto.rewards.expression import judge


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"The answer is \boxed{\frac{1}{2}}.", "0.5"),
        ("so it is 1/2", r"\frac{1}{2}"),
        ("I get 12. But no, 13", "13"),
        ("1,234", "1234"),
        (r"\boxed{5} and then some 7", "5"),
        ("The answer is 42.", "#### 42"),
        ("$x^2+1$", "1+x^2"),
        (r"\boxed{Paris}", "Paris"),
        ("$x=5$", r"\boxed{5}"),
    ],
)
def test_equal_expressions_are_right(answer: str, reference: str) -> None:
    assert judge(answer, reference) == 1.0


@pytest.mark.parametrize("answer", ["", "12", "no idea", r"\boxed{}", "(" * 3000, r"\frac{1}{" * 300, "\x00\ud800 %"])
def test_another_value_or_no_expression_is_wrong(answer: str) -> None:
    assert judge(answer, "13") == 0.0


def test_a_reference_that_is_no_expression_is_a_failure() -> None:
    with pytest.raises(ValueError, match="holds no mathematical expression"):
        judge("5", "$")


def test_the_deadlines_of_the_library_are_off_and_it_says_nothing_about_it(capfd: pytest.CaptureFixture[str]) -> None:
    judge("5", "5")
    assert capfd.readouterr() == ("", "")
