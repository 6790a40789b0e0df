"""Tasks without data: complete, keyed, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from stretto.recipe.schema import Source, TaskSection
from stretto.tasks.source import load_prompts, peek
from stretto.tasks.synthetic import prompts

HERE = Path()


def task(name: str | None = "addition", *, prompt: str | None = None, **source: Any) -> TaskSection:
    return TaskSection(source=Source(name=name, **source), prompt=prompt)


def test_addition_asks_every_pair() -> None:
    asked = load_prompts(task(), HERE)
    assert len(asked) == 21 * 21
    assert len({prompt.id for prompt in asked}) == len(asked)
    one = next(prompt for prompt in asked if prompt.id == "addition/7+12")
    assert one.messages == ({"role": "user", "content": "What is 7+12? Answer with just the number."},)
    assert one.reference == "19"
    assert one.tags == {"a": 7, "b": 12}
    assert all(str(prompt.tags["a"] + prompt.tags["b"]) == prompt.reference for prompt in asked)


def test_template_and_system_message_are_the_recipes() -> None:
    recipe = TaskSection(source=Source(max=1), prompt="{a}+{b}=", system="Be {brief}.")
    assert [prompt.messages for prompt in load_prompts(recipe, HERE)][1] == (
        {"role": "system", "content": "Be {brief}."},
        {"role": "user", "content": "0+1="},
    )


@pytest.mark.parametrize(
    ("name", "default", "answer"),
    [
        ("reverse", "Write {} backwards. Answer with just the result.", lambda text: text[::-1]),
        ("sort", "Sort the characters of {}. Answer with just the result.", lambda text: "".join(sorted(text))),
        ("copy", "Repeat {}. Answer with just the result.", lambda text: text),
    ],
)
def test_tasks_on_strings_ask_different_strings_with_their_answers(name: str, default: str, answer: Any) -> None:
    asked = load_prompts(task(name, count=300, alphabet="abc", length=(4, 6)), HERE)
    texts = [prompt.tags["text"] for prompt in asked]
    assert len(set(texts)) == 300
    assert {len(text) for text in texts} == {4, 5, 6}
    assert set("".join(texts)) == set("abc")
    assert [prompt.id for prompt in asked] == [f"{name}/{text}" for text in texts]
    assert [prompt.reference for prompt in asked] == [answer(text) for text in texts]
    assert asked[0].messages[0]["content"] == default.format(texts[0])


def test_the_defaults_are_two_thousand_strings_of_three_to_five_digits() -> None:
    texts = [prompt.tags["text"] for prompt in load_prompts(task("copy"), HERE)]
    assert len(set(texts)) == 2000
    shares = [sum(len(text) == length for text in texts) for length in (3, 4, 5)]
    assert sum(shares) == 2000
    assert min(shares) > 500


def test_all_strings_there_are_can_be_asked() -> None:
    texts = {
        prompt.tags["text"] for prompt in load_prompts(task("copy", alphabet="ab", length=(1, 9), count=1022), HERE)
    }
    assert len(texts) == 2**10 - 2


def test_more_strings_extend_the_set() -> None:
    few, many = (load_prompts(task("copy", count=count), HERE) for count in (50, 80))
    assert many[:50] == few


def test_prompts_do_not_depend_on_the_hash_seed() -> None:
    script = (
        "from itertools import islice; from stretto.recipe.schema import Source, TaskSection;"
        "from stretto.tasks.synthetic import prompts; source = Source(name='copy');"
        "print([prompt.id for prompt in islice(prompts(TaskSection(source=source), source), 20)])"
    )
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": "77"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    here = task("copy")
    assert said.stdout.strip() == str([prompt.id for prompt in islice(prompts(here, here.source), 20)])


@pytest.mark.parametrize(
    ("recipe", "field", "says"),
    [
        (task("addition", max=10**9), "task.source.max", "use at most 315"),
        (task("reverse", length=(5, 3)), "task.source.length", "write [3, 5]"),
        (task("reverse", length=(3, 10**9)), "task.source.length", "use at most 1000"),
        (task("reverse", alphabet="aba"), "task.source.alphabet", "twice"),
        (task("reverse", alphabet="ab", length=(1, 3), count=15), "task.source.count", "use at most 14"),
        (task("reverse", count=10**6), "task.source.count", "use at most 100000"),
        (task(prompt="{c}"), "task.prompt", "no column 'c'"),
    ],
)
def test_settings_that_make_no_sense_are_told(recipe: TaskSection, field: str, says: str) -> None:
    found = peek(recipe, HERE).problems
    assert [problem.field for problem in found] == [field]
    assert says in str(found[0])


def test_the_largest_addition_is_accepted() -> None:
    seen = peek(task("addition", max=315), HERE)
    assert seen.problems == ()
    assert len(seen.prompts) == 5
