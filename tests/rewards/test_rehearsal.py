"""Rewards are imported and tried before a model is loaded, and what is wrong with them is said readably."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto.errors import DeadlineError, RecipeError
from stretto.recipe.schema import RewardPart
from stretto.rewards.combine import Rewards
from stretto.rewards.rehearsal import rehearse
from stretto.sandbox.pool import Pool
from stretto.types import Prompt

PROMPT = Prompt(id="p1", messages=({"role": "user", "content": "3+4?"},), reference="7")
USER = """
import os, pathlib
(pathlib.Path(__file__).parent / "loads").open("a").write(f"{os.getpid()}\\n")

def sound(answer, prompt, signals): return signals["tokens"] == len(answer)
def first_letter(answer, prompt, signals): return ord(answer[0])
def seven(answer, prompt, signals): return 1 / int(prompt["reference"])
def game(answer, prompt, signals): return signals["score"]
def spread(answers, prompt, signals): return [each == max(answers, key=len) for each in answers]
def together(answers, prompt, signals): return 1.0
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return solution_str == ground_truth
def trl(completions, level, **rest): return [1.0]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tried_rewards.py").write_text(USER)
    (tmp_path / "slow_rewards.py").write_text("import time; time.sleep(60)\ndef f(answer, prompt, signals): return 1\n")
    (tmp_path / "broken_rewards.py").write_text("import no_such_library\ndef f(answer, prompt, signals): return 1\n")
    return tmp_path


def tried(folder: Path, *kinds: str, prompts: Sequence[Prompt] = (PROMPT,), seconds: float = 20.0) -> None:
    async def main() -> None:
        async with Pool(workers=3, paths=[str(folder)], start_deadline=seconds) as pool:
            parts = [RewardPart(name=f"part{n}", kind=kind, deadline=10.0) for n, kind in enumerate(kinds)]
            await rehearse(Rewards((RewardPart(), *parts), pool), prompts)

    asyncio.run(main())


def test_every_worker_has_imported_what_can_be_called(folder: Path) -> None:
    tried(folder, "tried_rewards:sound", "tried_rewards:spread", "tried_rewards:compute_score")
    assert len(set((folder / "loads").read_text().split())) == 3


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "tried_rewards:first_letter",
            r"IndexError: string index out of range.*(\n.*)*tried with an empty answer to the",
        ),
        ("tried_rewards:game", "KeyError: 'score'"),
        ("tried_rewards:together", "no list with a number for each answer"),
        ("tried_rewards:trl", "needs the column 'level', which the data do not have"),
        ("broken_rewards:f", "No module named 'no_such_library'"),
    ],
)
def test_what_fails_is_a_wrong_recipe_and_named(folder: Path, kind: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as refused:
        tried(folder, "tried_rewards:sound", kind)
    assert [problem.field for problem in refused.value.problems] == ["rewards.2.kind"]


def test_one_row_on_which_a_reward_fails_refuses_nothing(folder: Path) -> None:
    odd = Prompt(id="p0", messages=PROMPT.messages, reference="")
    tried(folder, "tried_rewards:seven", prompts=(odd, PROMPT))
    with pytest.raises(RecipeError, match="to the prompt p0"):
        tried(folder, "tried_rewards:seven", prompts=(odd, odd))


def test_signals_that_nobody_can_pretend_are_not_tried(folder: Path) -> None:
    tried(folder, "tried_rewards:game", prompts=())


def test_an_import_has_a_deadline_of_its_own(folder: Path) -> None:
    with pytest.raises(
        DeadlineError, match=r"importing slow_rewards took longer than 0.5 s(.|\n)*raise deadlines.start"
    ):
        tried(folder, "slow_rewards:f", seconds=0.5)
