"""Programs in answers: which text is the program, what its tests look like, and what counts as right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stretto.environments.project import taken_apart
from stretto.errors import VerdictError
from stretto.rewards.program import ProgramTests, passed, program_in, same, same_text
from stretto.sandbox.isolated import ProgramLimits, Sandbox

SUM = [{"input": "1 2", "output": "3"}, {"input": "2 2\n", "output": "4\n"}, {"input": "5 5", "output": "10"}]
SQUARE = [{"call": "square", "args": [n], "expected": n * n} for n in range(4)]


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nI hope that helps."


@pytest.fixture(scope="module")
def share() -> Iterator[Callable[..., float]]:
    """The share of tests that a program passes."""
    with asyncio.Runner() as runner:
        sandbox = Sandbox(workers=2, packages=())

        def judged(answer: str, tests: Any, *, all_or_nothing: bool = False, seconds: float = 1.0) -> float:
            limits = ProgramLimits(seconds=seconds, total_seconds=4.0, memory_mb=256)
            found = ProgramTests.read(tests)
            return runner.run(passed(answer, found, sandbox, limits, all_or_nothing=all_or_nothing))

        yield judged
        runner.run(sandbox.close())


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("first\n```python\nx = 1\n```\nno, better:\n```py\nx = 2\n```\ndone", "x = 2"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1"),
        ("```python\nx = 1\n", "x = 1"),
        ("   ~~~python3\nx = 1\n   ~~~", "x = 1"),
        ("1. So:\n   ```python\n   if x:\n       y = '''\n z'''\n   ```\n2. Done", "if x:\n    y = '''\nz'''"),
        ("\t```\n\n\tx = 1\n\n\t```", "x = 1"),
        ("  ```\nif x:\n    y\n  ```", "if x:\n    y"),
        ("x = 1", None),
        ("```rust\nfn main() {}\n```", None),
        ("`x = 1`", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_block_of_python(answer, program):
    assert program_in(answer) == program


QUOTES = 'text = """\n```python\nx = 3\n```\n"""\nprint(text)'
"""A program with fences inside of a string."""


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        # Fences that are left open in the thoughts.
        ("<think>\n```python\nx = 0 maybe? no\n</think>\n```python\nx = 1\n```", "x = 1"),
        ("I try\n```\nfirst the sum\nand then:\n```python\nx = 1\n```\ndone", "x = 1"),
        ("I try\n```\nfirst the sum\nand then:\n```\nx = 1\n```\ndone", "x = 1"),
        ('```python\ndef f():\n    """Adds\n\nBetter:\n```python\ndef f():\n    """Adds."""\n```',
         'def f():\n    """Adds."""'),
        # Fences behind words in a line.
        ("Here it is: ```python\nx = 1\n```", "x = 1"),
        ("Here it is: ```\nx = 1\n```\nDone.", "x = 1"),
        ("1. ```python\n   if x:\n       y()\n   ```", "if x:\n    y()"),
        ("I write it into ```python\nas asked:\n```\nx = 1\n```", "x = 1"),
        ("```python\nprint(1)```", "print(1)"),
        ("```python\nx = 1\n``` That is all.", "x = 1"),
        ("```python print(1)```", "print(1)"),
        # Fences inside of a program.
        (f"```python\n{QUOTES}\n```", QUOTES),
        (f"```\n{QUOTES}\n```\nDone.", QUOTES),
        (f"So:\n```python\n# don't split\n{QUOTES}\n```\nand it prints\n```\nx = 3\n```", f"# don't split\n{QUOTES}"),
        ("~~~python\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''"),
        ("```python\n# between ```\nx = 1\n```", "# between ```\nx = 1"),
        # Blocks behind the program.
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)"),
        ("```\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)"),
        ("```\nprint(1)\n```\nIt prints\n```\n1 2\n3 4\n```", "print(1)"),
        ("```python\nprint(1)\n```\nIt prints\n```text\n1\n```\nbye", "print(1)"),
        ("```python\ndef f():\n    return 1\n```\n```python\n>>> f()\n1\n```", "def f():\n    return 1"),
        ("```python\nx = 1\n```\nAgain:\n```python\ndef f(:", "x = 1"),
        # Marks.
        ("~~~\nx = 1\n~~~", "x = 1"),
        ("~~~~python\nx = 1\n~~~~", "x = 1"),
        ("````markdown\n```python\nx = 1\n```\n````\nbye", "x = 1"),
        ("````python\nx = 1\n```", "x = 1"),
        ("````\nx = 1\n````", "x = 1"),
        ("> ```python\n> if x:\n>     y()\n>\n> z()\n> ```", "if x:\n    y()\n\nz()"),
        ("   ```py\n   x = 1\n   ```", "x = 1"),
        ("```python\n    if x:\n        y()\n    z()\n```", "if x:\n    y()\nz()"),
        ("```Python\nx = 1\n```", "x = 1"),
        ("``` PY\nx = 1\n```", "x = 1"),
        ('```python title="a.py"\nx = 1\n```', "x = 1"),
        ("```{.python .numbers}\nx = 1\n```", "x = 1"),
        ("```python3.11\nx = 1\n```", "x = 1"),
        ("```python\r\nif x:\r\n    y()\r\n```\r\n", "if x:\n    y()"),
        ("Here:\r\n```\r\nx = 1\r\n```\r\nIt prints\r\n```\r\n1\r\n```", "x = 1"),
        # No program.
        ("x = 1\nprint(x)", None),
        ("```rust\nfn main() {}\n```\nx = 1", None),
        ("the fence ``` opens a block", None),
        ("```python\n```", ""),
    ],
)  # fmt: skip
def test_the_program_is_found_in_whatever_form_it_comes(answer, program):
    assert program_in(answer) == program


@pytest.mark.parametrize(
    "piece",
    ["```python\n", "```python", "```\n", "```python\n'''\n", "```python\n\\'''\n", "~~~", "`", "(", "-",
     "[" * 50 + "\n", "```python\n((((((\n", "lambda x: (", "a.b(", "'", '"""', "> ", "    \n",
     "``` python\nx = 1\n```\n", "`" * 40 + "\n"],
)  # fmt: skip
def test_a_hostile_answer_is_read_without_harm(piece):
    count = 60_000 // len(piece)
    for answer in (piece * count, f"```python\n{piece * count}\n```\n```\n```", f"```python\nx = {piece * count}"):
        program_in(answer)
        taken_apart(answer)


def test_a_program_that_reads_and_prints_gets_the_share_of_tests_that_it_passes(share):
    right = fenced("a, b = map(int, input().split())\nprint(a + b)")
    assert share(right, SUM) == 1.0
    assert share(right, json.dumps(SUM)) == 1.0
    assert share(right, {"inputs": ["1 2"], "outputs": ["3"]}) == 1.0
    assert share(fenced("a, b = map(int, input().split())\nprint(a * b)"), SUM) == pytest.approx(1 / 3)
    assert share(fenced("print(3)"), SUM) == pytest.approx(1 / 3)
    assert share(fenced("print(3)"), SUM, all_or_nothing=True) == 0.0
    assert share(right, SUM, all_or_nothing=True) == 1.0
    assert share("a + b", SUM) == 0.0


def test_a_function_gets_the_share_of_calls_that_it_answers(share):
    assert share(fenced("def square(n):\n    return n * n"), SQUARE) == 1.0
    assert share(fenced("class Solution:\n    def square(self, n):\n        return n ** 2"), SQUARE) == 1.0
    assert share(fenced("def square(n):\n    return [0, 1, 4][n]"), SQUARE) == 0.75
    assert share(fenced("def square(n):\n    while n > 2: pass\n    return n * n"), SQUARE, seconds=0.3) == 0.75
    assert share(fenced("def other(n): return n"), SQUARE) == 0.0
    several = {"fn_name": "f", "inputs": ["[1, 2]\n3", '[]\n"4"', [[5], 6]], "outputs": ["[1, 2, 3]", '"4"', [[5, 6]]]}
    assert share(fenced("def f(a, b): return [*a, b] if a else b"), several) == 1.0
    assert share(fenced("def f(a, b): return a[:1]"), several) == 0.0
    assert share(fenced("def square(n): return n"), {"fn_name": "square", "inputs": [[1]], "outputs": [[1]]}) == 1.0
    assert share(fenced("def square(n): return n"), {"fn_name": "square", "inputs": [[1]], "outputs": [[1, 2]]}) == 0.0
    assert share(fenced("def square(n): return n"), [{"call": "square", "args": [1], "expected": [1]}]) == 0.0
    assert share(fenced("def square(n): return"), {"fn_name": "square", "inputs": [[1]], "outputs": [None]}) == 1.0


def test_a_program_never_sees_what_is_expected_of_it(share):
    looks = (
        "import gc, re, sys\n"
        "def square(n):\n"
        "    seen = [repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple))]\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        seen += [repr(frame.f_locals), repr(frame.f_globals)]\n"
        "        frame = frame.f_back\n"
        "    found = re.findall('7654321[0-9]{3}', ' '.join(seen))\n"
        "    return int(found[n]) if len(found) > n else len(seen)"
    )
    assert share(fenced(looks), [{"call": "square", "args": [0], "expected": 7654321987}]) == 0.0
    told = [{"call": "square", "args": [0, [7654321987]], "expected": 7654321987}]
    assert share(fenced(looks.replace("square(n)", "square(n, m)")), told) == 1.0  # it does find what is there


def test_a_sandbox_that_broke_is_no_verdict(share):
    async def broken() -> float:
        async with Sandbox(workers=1, packages=()) as sandbox:

            async def killing() -> None:
                while True:
                    sandbox.kill()
                    await asyncio.sleep(0.01)

            killer = asyncio.create_task(killing())
            try:
                found = ProgramTests.read(SQUARE)
                answer = fenced("def square(n): return n * n")
                return await passed(answer, found, sandbox, ProgramLimits(), all_or_nothing=False)
            finally:
                killer.cancel()

    with pytest.raises(VerdictError, match="sandbox broke"):
        asyncio.run(broken())


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("[{", "no JSON"),
        (3, "no list"),
        ([], "there is none"),
        ([{"input": "1"}], "no 'output'"),
        ([{"input": 1, "output": "1"}], "input is no texts"),
        ([{"input": "1", "output": 1}], "output is no text"),
        ([{"call": "f", "args": 1, "expected": 1}], "input is no arguments"),
        ([{"call": "f", "args": [], "expected": 1}, {"call": "g", "args": [], "expected": 1}], "several functions"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"fn_name": "f", "inputs": ["[1]\n2 3"], "outputs": [1]}, "line 2 of an input is no JSON"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "input is no arguments"),
    ],
)
def test_tests_that_make_no_sense_are_refused_with_the_reason(tests, reason):
    with pytest.raises(ValueError, match=reason):
        ProgramTests.read(tests)


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1, True),
        (1.0, 1, True),
        (1, 1.0, True),
        (1.0000001, 1.0, True),
        (1.001, 1.0, False),
        (1.0000001, 1, False),
        (True, 1, False),
        (1, True, False),
        ([1, [2, "a"]], [1, [2, "a"]], True),
        ([1], [1, 2], False),
        ([1, 2, 3], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ("1", 1, False),
        (None, None, True),
        (None, False, False),
        (float("nan"), 1.0, False),
        (10**400, 1.0, False),
    ],
)
def test_values_are_compared_as_json(value, expected, equal):
    assert same(value, expected) is equal


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("3\n", "3", True),
        ("  3 \n\n", "3", True),
        ("1 2\n3", "1  2 \n3\n", True),
        ("1\n2", "1 2", False),
        ("3", "3\n4", False),
        ("3\n4", "3", False),
        ("0.333333", "0.3333333", True),
        ("0.3334", "0.3333333", False),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("nan", "1.0", False),
        ("", "", True),
        ("", "0", False),
        ("9" * 5000, "1.5", False),
    ],
)
def test_what_is_printed_is_compared_by_lines_and_words(printed, expected, equal):
    assert same_text(printed, expected) is equal
