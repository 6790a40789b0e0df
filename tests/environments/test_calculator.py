"""Arithmetic that a model wrote is exact, and too much of it is refused at once."""

import asyncio

import pytest

from stretto.environments.calculator import calculator


def calculated(expression):
    return asyncio.run(calculator(expression))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12+7", "19"),
        ("(3+4)*12", "84"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("1/3+1/6", "0.5"),
        ("7//2", "3"),
        ("-7 % 3", "2"),
        ("1,000*3", "3000"),
        ("0.1+0.2", "0.3"),
        ("sqrt(16)", "4"),
        ("sqrt(2)", "1.41421356237"),
        ("4**0.5", "2"),
        ("2**-2", "0.25"),
        ("123456789*987654321", "121932631112635269"),
    ],
)
def test_arithmetic_is_exact(expression, result):
    assert calculated(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "two",
        "1calc",
        "1if",
        "0x",
        "1+",
        "1/0",
        "0**-1",
        "sqrt(-1)",
        "(-8)**0.5",
        "9**9**9",
        "10**400",
        "1e999",
        "True+1",
        "'a'*9",
        "[1][0]",
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "x",
        "sqrt(1, 2)",
        "1 if 1 else 2",
        "(" * 199 + "1" + ")" * 198,
        "-" * 300 + "1",
        "1+" * 500 + "1",
    ],
)
def test_what_is_no_arithmetic_or_too_much_is_refused_in_words(expression):
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        calculated(expression)
