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


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        # Currencies.
        (r"\boxed{18.90}", r"\$18.90", 1), ("18.90", r"\$18.90", 1), (r"\boxed{\$18.90}", r"\$18.90", 1),
        ("$18.90", r"\$18.90", 1), (r"\boxed{18.9}", "$18.90", 1), (r"\boxed{19}", r"\$18.90", 0),
        (r"\boxed{1000}", r"\$1,000", 1), (r"\boxed{5}", r"$\$5$", 1), (r"\boxed{€5}", "5", 1), ("5", "£5", 1),
        # A percentage is a hundredth, unless the reference is one too.
        (r"\boxed{7\%}", "7", 0), (r"\boxed{7%}", "7", 0), ("7%", "7", 0), (r"\boxed{7 \text{ percent}}", "7", 0),
        (r"\boxed{7\%}", "0.07", 1), (r"\boxed{1,000\%}", "10", 1), (r"\boxed{7\%}", r"7\%", 1),
        (r"\boxed{7}", r"7\%", 1), (r"\boxed{0.07}", r"7\%", 1), (r"\boxed{8}", r"7\%", 0),
        # Words behind a number are its unit, unless they take it back.
        (r"\boxed{1 \text{ is wrong}}", "1", 0), (r"\boxed{1\text{ not }}", "1", 0),
        (r"\boxed{1 \mbox{ isn't it}}", "1", 0), (r"\boxed{5\text{ cm}}", "5", 1), (r"\boxed{\text{1}}", "1", 1),
        (r"\boxed{\text{(B)}}", "B", 1), (r"\boxed{\text{No solution}}", r"\text{no solution}", 1),
        # Full stops, digits that repeat, the empty set.
        (r"\boxed{7.}", "7", 1), (r"\boxed{7}", "7.", 1), (r"\boxed{-7.}", "-7", 1), (r"\[7.\]", "7", 1),
        (r"\boxed{7.5}", "7", 0), (r"\boxed{0.\overline{3}}", r"\frac{1}{3}", 1), (r"\boxed{.\overline{9}}", "1", 1),
        (r"\boxed{0.1\overline{6}}", "1/6", 1), (r"\boxed{2.\bar{3}}", "7/3", 1), (r"\boxed{0.\dot{3}}", "1/3", 1),
        (r"\boxed{\frac13}", r"0.\overline{3}", 1), (r"\boxed{0.33}", r"0.\overline{3}", 0),
        (r"\boxed{\varnothing}", r"\emptyset", 1), (r"\boxed{\emptyset}", r"\varnothing", 1),
        (r"\boxed{0}", r"\varnothing", 0),
        # Of several boxes the last one counts, or all of them as a set.
        (r"First \boxed{5}, corrected: \boxed{7}", "7", 1), (r"First \boxed{5}, corrected: \boxed{7}", "5", 0),
        (r"\boxed{5} and \boxed{\frac{1}{2}}", "1/2", 1), (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2", 1),
        (r"\boxed{\boxed{7}}", "7", 1), (r"\fbox{7}", "7", 1), (r"\boxed{5} and {\boxed{7", "5", 1),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", 1),
        # Signs, colors and spaces.
        ("\\boxed{\u20b9500}", "500", 1), ("\\boxed{90\u00b0}", "90", 1), ("\\boxed{\u00bd}", "0.5", 1),
        ("\\boxed{\uff17}", "7", 1), (r"\boxed{\textcolor{red}{7}}", "7", 1), (r"\boxed{\color{red}7}", "7", 1),
        (r"\boxed{1\,234}", "1234", 1), (r"\boxed{1\,2}", "12", 0), (r"\boxed{7\;\%}", "0.07", 1),
        (r"\boxed{7\text{\%}}", "7", 0), (r"\boxed{7 percent}", "0.07", 1), (r"\boxed{1\mathit{wrong}}", "1", 0),
    ],
)  # fmt: skip
def test_a_value_counts_in_whatever_form_it_is_written(answer: str, reference: str, score: int) -> None:
    assert judge(answer, reference) == score


@pytest.mark.parametrize("answer", ["", "12", "no idea", r"\boxed{}", "(" * 3000, r"\frac{1}{" * 300, "\x00\ud800 %"])
def test_another_value_or_no_expression_is_wrong(answer: str) -> None:
    assert judge(answer, "13") == 0.0


def test_a_reference_that_is_no_expression_is_a_failure() -> None:
    with pytest.raises(ValueError, match="holds no mathematical expression"):
        judge("5", "$")


def test_the_deadlines_of_the_library_are_off_and_it_says_nothing_about_it(capfd: pytest.CaptureFixture[str]) -> None:
    judge("5", "5")
    assert capfd.readouterr() == ("", "")
