"""The scorers of reasoning-gym behind our door: partial credit, wrong formats, and answers that must not be run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import time
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from stretto.config.schema import RewardPart
from stretto.errors import VerdictError
from stretto.rewards import gym
from stretto.rewards.combine import Rewards
from stretto.sandbox.pool import Pool
from stretto.types import Outcome, Prompt, Trajectory

SLOW = {"acre", "arc_agi", "figlet_font", "futoshiki", "intermediate_integration", "knight_swap", "sokoban", "sudoku"}
OPEN = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many right answers, none of which they give."""


def entry_of(task: str, config: dict[str, Any] | None = None, index: int = 0) -> dict[str, Any]:
    """An entry as it arrives in a worker."""
    made = create_dataset(task, seed=3, size=100, **(config or {}))[index]
    found: dict[str, Any] = json.loads(json.dumps(made))
    return found


@pytest.mark.parametrize("task", sorted(DATASETS.keys() - SLOW - OPEN - {"composite"}))
def test_the_task_s_own_answer_gets_full_marks_after_its_way_through_json(task: str) -> None:
    entry = entry_of(task)
    assert gym.judge(f" {entry['answer']}\n", task, {}, entry) == 1.0
    assert gym.judge(f"It is\n<answer>{entry['answer']}</answer>", task, {}, entry) == 1.0


def test_partial_credit_is_kept_and_a_wrong_format_gets_nothing() -> None:
    entry = entry_of("chain_sum")
    assert gym.judge(f"{entry['answer']} or so", "chain_sum", {}, entry) == pytest.approx(
        len(entry["answer"]) / len(f"{entry['answer']} or so")
    )
    assert gym.judge("", "chain_sum", {}, entry) == 0.0
    assert gym.judge("banana", "prime_factorization", {}, entry_of("prime_factorization")) == 0.0


def test_a_pattern_says_what_of_the_answer_is_judged() -> None:
    entry, config = {"question": "?", "answer": "7", "metadata": {}}, {"min_terms": 2}
    said = "3 + 4 = 7, so 12"
    assert gym.judge(said, "chain_sum", config, entry, "-?[0-9]+", "last") == 0.0
    assert gym.judge(said, "chain_sum", config, entry, "= ([0-9]+)", "last") == 1.0
    assert gym.judge(said, "chain_sum", config, entry, "-?[0-9]+", "only") == 0.0
    assert gym.judge("no number, <answer>7</answer>", "chain_sum", config, entry, "x", "last") == 0.0


def test_a_scorer_that_cannot_judge_its_own_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            raise ValueError("no verdict on anything")

    monkeypatch.setattr(gym, "_scorer", lambda *_: Broken())
    for answer in ("1", None):
        with pytest.raises(ValueError, match="no verdict on anything"):
            gym.judge("7", "chain_sum", {}, {"question": "?", "answer": answer, "metadata": {}})


def test_every_scorer_that_evaluates_an_answer_is_known() -> None:
    """Read from the sources: calls of eval, exec and parse_expr in score_answer and what it calls in its file."""
    found = set()
    for name, (kind, _) in DATASETS.items():
        tree = ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        seen, queue = set(), ["score_answer"]
        while queue:
            function = functions.get(queue.pop())
            if function is None or function.name in seen:
                continue
            seen.add(function.name)
            for call in (node.func for node in ast.walk(function) if isinstance(node, ast.Call)):
                called = call.id if isinstance(call, ast.Name) else call.attr if isinstance(call, ast.Attribute) else ""
                queue.append(called)
                if called in ("eval", "exec", "parse_expr", "sympify") and called not in functions:
                    found.add(name)
    of_the_question = {"bitwise_arithmetic", "number_sorting"}
    assert found - of_the_question == gym.EVALUATED


@pytest.mark.parametrize("task", sorted(gym.EVALUATED - {"intermediate_integration"}))
def test_no_answer_is_run_as_a_program(task: str, tmp_path: Path) -> None:
    entry, mark = entry_of(task), tmp_path / "mark"
    for program in (
        f"open({str(mark)!r}, 'w').close()",
        f"__import__('os').mkdir({str(mark)!r})",
        f"[open({str(mark)!r}, 'w') for _ in [1]]",
        f"<answer>(lambda: open({str(mark)!r}, 'w'))()</answer>",
        repr(f"open({str(mark)!r}, 'w').close()"),
        f"<answer>[{f'open({str(mark)!r}, chr(119))'!r}]</answer>",
    ):
        assert gym.judge(program, task, {}, entry) == 0.0
    assert not mark.exists()


@pytest.mark.parametrize(
    "text", ["(3+4)*6 - 2**3", "x**2/2 + 3*x + C", "sin(x)*exp(2*x)", "(x+1)**(1/2)", "x^-2", "2^x"]
)
def test_formulas_are_computed(text: str) -> None:
    assert gym.formula(text)


@pytest.mark.parametrize("text", ["[['1', 2], [3.5]]", "A B C", "_ Q\n_ _"])
def test_literals_and_words_are_read(text: str) -> None:
    assert gym.literal(text)


@pytest.mark.parametrize(
    "text", ["x.real", "foo(1)", "x_1()", "a.b", "f'{x}'", "lambda: 1", "[x for x in y]", "1" * 3000]
)
def test_anything_else_is_neither(text: str) -> None:
    assert not gym.formula(text)
    assert not gym.literal(text)


@pytest.mark.parametrize("text", ["1" * 1000 + "=", "The numbers are 10234, 11876, 12987, 20345, 31456, 44567, 50123."])
def test_long_numbers_are_read_in_no_time(text: str) -> None:
    begun = time.perf_counter()
    assert not gym.formula(text)
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("text", ["'open(1)'", '"x"', "['x']", "{'x': 1}", "b'x'"])
def test_a_formula_holds_no_string_because_sympy_would_evaluate_it(text: str) -> None:
    assert not gym.formula(text)


@pytest.mark.parametrize(
    "text", ["9^9^9", "9**(9**9)", "2**99999", "(((9^99)^99)^99)^99", "9 ** 9 ** 9", "2^(x)", "9^9.5"]
)
def test_a_power_that_would_take_all_memory_is_not_computed(text: str) -> None:
    assert not gym.formula(text)


def judged(answer: str, prompt: Prompt, **part: Any) -> float:
    trajectory = Trajectory(prompt=prompt, visit=0, attempt=0, conversations=(), outcome=Outcome(answer=answer))

    async def main() -> float:
        async with Pool() as pool:
            rewards = Rewards([RewardPart(**{"deadline": 60.0, **part})], pool)
            return rewards.weigh(await rewards.judge(trajectory)).value

    return asyncio.run(main())


def test_the_reward_takes_the_entry_to_the_scorer_in_a_worker() -> None:
    entry = entry_of("countdown")
    tags = {"task": "countdown", "config": {}, "question": entry["question"], "metadata": entry["metadata"]}
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), reference=entry["answer"], tags=tags)
    assert judged(entry["metadata"]["expression"], prompt, kind="reasoning_gym") == 1.0
    found = f"It is {entry['metadata']['expression']}."
    assert judged(found, prompt, kind="reasoning_gym", pattern=r"It is (.+)\.") == 1.0
    with pytest.raises(VerdictError, match="prompt q is not of a reasoning_gym source"):
        judged("1", Prompt(id="q", messages=({"role": "user", "content": "?"},)), kind="reasoning_gym")


def test_math_is_judged_in_a_worker_whose_deadline_holds() -> None:
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), reference="0.5")
    assert judged(r"so \boxed{\frac{1}{2}}", prompt, kind="math") == 1.0
    with pytest.raises(VerdictError, match="did not answer within 1 s"):
        judged("9^9^9^9", prompt, kind="math", deadline=1.0)
