"""Programs of several files: notes are all that one conversation leaves the next; the files together are a program."""

import asyncio
import subprocess
import sys

import pytest

from stretto.checks.rules.environment import SIGNALS
from stretto.environments.project import ProjectEnvironment, bundled, taken_apart
from stretto.errors import RolloutError
from stretto.recipe.schema import ProjectSection
from stretto.rewards.program import ProgramTests, passed
from stretto.sandbox.isolated import ProgramLimits, Sandbox
from stretto.types import Prompt
from talking import played

FILES = [{"name": "area.py", "task": "the area of a square"}, {"name": "main.py", "task": "solve(side)"}]
FIRST = "Here:\n```python\ndef area(a):\n    return a * a\n```\narea.area(a)"
SECOND = "```python\nimport area\n\ndef solve(side):\n    return area.area(side)\n\nprint(solve(3))\n```"


def prompt(files=FILES):
    return Prompt(id="p", messages=({"role": "user", "content": "Squares."},), tags={"files": files})


def project(**section):
    return ProjectEnvironment(ProjectSection(**{"write": "{goal}|{notes}|{name}|{file}", "empty": "-", **section}))


def program(answer):
    assert answer.startswith("```python\n")
    return answer.removeprefix("```python\n").removesuffix("```")


def test_each_file_is_a_conversation_that_sees_the_notes_alone():
    outcome, talk = played(project(), prompt(), [FIRST, SECOND])
    assert talk.read == [
        "<|user|>Squares.|-|area.py|the area of a square<|assistant|>",
        "<|user|>Squares.|area.area(a)|main.py|solve(side)<|assistant|>",
    ]
    assert [each.parent for each in talk.conversations()] == [None, None]
    assert outcome.signals == {"files": 2, "missing": 0, "truncated": 0, "notes_characters": 0}
    assert outcome.signals.keys() == set(SIGNALS[ProjectSection])


def test_the_files_together_are_a_program_in_one_block():
    outcome, _ = played(project(), prompt(), [FIRST, SECOND])
    done = subprocess.run([sys.executable, "-I", "-c", program(outcome.answer)], capture_output=True, text=True)
    assert done.stdout == "9\n"


def test_the_last_file_is_the_program_as_it_would_be_alone():
    last = "import a\nif __name__ == '__main__':\n    print(ascii(a.smile))"
    answer = bundled({"a": "smile = '\U0001f600'", "main": last})
    done = subprocess.run([sys.executable, "-I", "-c", program(answer)], capture_output=True, text=True)
    assert done.stdout == "'\\U0001f600'\n"


@pytest.mark.parametrize("text", ["'''", '"""', "```", "\\", "{0}", "\n```\n", "\u2028", "#" * 1000])
def test_no_file_can_leave_its_place_in_the_program(text):
    answer = bundled({"a": f"text = {text!r}", "main": "import a\nprint(ascii(a.text))"})
    assert answer.count("\n```") == 1
    done = subprocess.run([sys.executable, "-I", "-c", program(answer)], capture_output=True, text=True)
    assert done.stdout.strip() == ascii(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no code", (None, "no code")),
        ("```\na\n```\nnotes", ("a\n", "notes")),
        ("```py\na\n```\nand\n```python\nb\n```\n", ("b\n", "")),
        ("1. Here:\n   ```python\n   if a:\n       b\n   ```\n   notes", ("if a:\n    b\n", "notes")),
        ("```python\nnever closed", (None, "```python\nnever closed")),
    ],
)
def test_a_reply_is_a_file_and_notes(text, found):
    assert taken_apart(text) == found


def test_a_file_that_is_missing_is_empty_and_counted():
    outcome, _ = played(project(), prompt(), ["I cannot.", SECOND])
    assert outcome.signals["missing"] == 1


@pytest.mark.parametrize(
    "files",
    [None, [], "main.py", [{"name": "../x.py", "task": ""}], [{"name": "for.py", "task": ""}], [{"name": "a.py"}]],
)
def test_a_prompt_without_files_is_a_failure(files):
    with pytest.raises(RolloutError, match="list of files"):
        played(project(), prompt(files), [])


def test_the_program_is_judged_by_its_tests_in_the_sandbox():
    outcome, _ = played(project(), prompt(), [FIRST, SECOND])
    wrong, _ = played(project(), prompt(), [FIRST.replace("a * a", "a + a"), SECOND])
    tests = ProgramTests.read([{"call": "solve", "args": [side], "expected": side * side} for side in (2, 3, 4)])

    async def judged():
        async with Sandbox() as sandbox:
            answers = (outcome.answer, wrong.answer)
            return [await passed(each, tests, sandbox, ProgramLimits(), all_or_nothing=False) for each in answers]

    assert asyncio.run(judged()) == [1.0, pytest.approx(1 / 3)]
