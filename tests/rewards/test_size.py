"""What an expression would cost is known before it is computed: bombs are refused, and what is usual is not."""

from __future__ import annotations

import pytest

from stretto.rewards import size
from stretto.rewards.expression import judge, verdict
from stretto.rewards.size import TooLargeError
from stretto.rewards.tree import of_text

BOMBS = r"""
9^9^9^9
$2^{100000000}$
5 * 3 ^ 8 ^ 8 ^ 8
$10!!!$
$100000000!$
$(10^{10})!$
$\prod_{k=1}^{10^8} k$
$\prod_{k=1}^{5000} \prod_{j=1}^{5000} (k+j)$
$\sum_{k=1}^{10^8} \frac{1}{k}$
$\sum_{i=1}^{100000} i^{i}$
$\sum_{n=1}^{200} (n!)^{n}$
$(x+y+z+1)^{200}$
$(x+1)^{100000}$
$((x+1)^{40}+1)^{40}$
$(x+1)(x+2)(x+3)(x+4)(x+5)(x+6)(y+1)(y+2)(y+3)(z+1)(z+2)(z+3)(w+1)(w+2)(w+3)(v+1)(v+2)(u+1)(u+2)$
$x^{10^{10^{10}}}$
$\sin(\exp(\exp(99)))$
$\lfloor e^{e^{20}} \rfloor$
$\cosh(\cosh(99))$
$\pi^{\pi^{\pi^{\pi}}}$
$\log(9^{9^9})$
$\sqrt{2^{10^9}}$
$0.1^{10^9}$
$\binom{10^9}{5*10^8}$
$\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^9}$
$\begin{pmatrix}x&y\\z&w\end{pmatrix}^{200}$
$\left(\frac{3}{7}\right)^{-10^9}$
\boxed{2^{2^{2^{2^{2^2}}}}}
$\frac{1}{9^{9^{9}}}$
$\{1, 2, 9^{9^{9}}\}$
$x = 9^{9^{9}}$
""".strip().splitlines()


@pytest.mark.parametrize("answer", BOMBS)
def test_a_bomb_is_wrong_and_said_to_be_costly_without_being_computed(answer: str) -> None:
    assert verdict(answer, "13") == (0.0, True)


USUAL = [
    (r"$2^{2024}$", r"2^{2023}\cdot 2"),
    (r"$100!$", r"100 \cdot 99!"),
    (r"$\frac{2024!}{2023!}$", "2024"),
    (r"$\binom{100}{50}$", r"\frac{100!}{50!50!}"),
    (r"$\sum_{k=1}^{100} k$", "5050"),
    (r"$\prod_{k=1}^{10} k$", "3628800"),
    (r"$(x+1)^{10} - (x+1)^{10}$", "0"),
    (r"$(a+b)^2$", "a^2+2ab+b^2"),
    (r"$\sqrt{50}$", r"5\sqrt{2}"),
    (r"$\sqrt[3]{8}$", "2"),
    (r"$\log_2(1024)$", "10"),
    (r"$\begin{pmatrix}1&1\\1&0\end{pmatrix}$", r"\begin{pmatrix}1&1\\1&0\end{pmatrix}"),
    (r"$\int_0^1 x^2 dx$", r"\frac{1}{3}"),
    (r"$10^{1000}$", r"10^{999} \cdot 10"),
    (r"$\sin(\frac{\pi}{6})$", r"\frac{1}{2}"),
    (r"$x^{2023} + 1$", "1 + x^{2023}"),
    (r"$1.5 \times 10^{-9}$", r"1.5 \cdot 10^{-9}"),
]


@pytest.mark.parametrize(("answer", "reference"), USUAL)
def test_usual_expressions_are_computed(answer: str, reference: str) -> None:
    assert verdict(answer, reference) == (1.0, False)


@pytest.mark.parametrize("huge", [r"2^{2^{2024}}", r"9^{9^{9^{9}}}", r"(10^{10})!", r"\prod_{k=1}^{10^8} k"])
def test_a_reference_that_is_too_large_is_compared_as_it_is_written(huge: str) -> None:
    assert verdict(rf"so \boxed{{{huge}}}", huge) == (1.0, False)
    assert verdict("5", huge) == (0.0, False), "this answer is not to blame"
    assert verdict(rf"\boxed{{{huge}+1}}", huge) == (0.0, True)


@pytest.mark.parametrize("answer", ["(" * 500 + "1" + ")" * 500 + "+1", "$" + "-" * 500 + "1$", "1+" * 3000 + "1"])
def test_deep_and_long_expressions_end(answer: str) -> None:
    assert judge(answer, "13") == 0.0


FUNCTIONS = frozenset({"exp", "sin", "sqrt"})


@pytest.mark.parametrize("text", ["f(1)", "x.real", "[1]", "1 if x else 2", "'a'", "x := 3", "1j", "True", "sin", "a1"])
def test_what_is_no_formula_has_no_size(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        of_text(text, FUNCTIONS, letters=True)


def test_sizes_by_hand() -> None:
    assert of_text("2**10", FUNCTIONS, letters=False).magnitude == pytest.approx(10)
    assert of_text("3*x**2 + x*y", FUNCTIONS, letters=True).degrees == {"x": 2.0, "y": 1.0}
    assert of_text("(x+y)**3", FUNCTIONS, letters=True).terms == pytest.approx(4)
    assert of_text("(x+1)**2*(x+2)**3", FUNCTIONS, letters=True).terms <= 6
    assert size.factorial(size.number(20)).bits >= 61
    assert size.binomial(size.number(10**9), size.number(2)).bits < 100


@pytest.mark.parametrize(
    "make",
    [
        lambda: size.power(size.number(2), size.number(10**30)),
        lambda: size.power(size.number(1, 3), size.number(-(10**9))),
        lambda: size.factorial(size.factorial(size.number(12))),
        lambda: size.repeated(size.number(1), 1e9, multiplied=False),
        lambda: size.repeated(size.letter("x"), 9000, multiplied=True),
        lambda: size.number(10**20000),
        lambda: size.exponential(size.number(1e300)),
        lambda: size.power(size.number(2), size.number(float("inf"))),
    ],
)
def test_each_way_to_become_too_large_is_seen(make: object) -> None:
    with pytest.raises(TooLargeError):
        make()  # type: ignore[operator]
