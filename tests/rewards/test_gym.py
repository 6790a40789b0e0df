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

from stretto.errors import VerdictError
from stretto.recipe.schema import RewardPart
from stretto.rewards import gym
from stretto.rewards.combine import Rewards
from stretto.sandbox.pool import Pool
from stretto.types import Outcome, Prompt, Trajectory

EVALUATED = gym.LITERAL | gym.SYMBOLIC
"""The tasks whose scorers evaluate an answer in some way: all of those that are installed."""
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


FIXED = ("", "0", "1", "x", "True", "False", "None", "Yes", "A", "P", "[]", "()", "nan", "...", "a b c", "8*3*1*1")
"""Answers that say nothing of a question."""


def paid(answer: str, entry: dict[str, Any]) -> bool:
    """Whether an answer gets full marks, although it is not the task's own."""
    own = str(entry["answer"]).strip().lower()
    return answer.strip().lower() != own and gym.judge(answer, entry["metadata"]["source_dataset"], {}, entry) >= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(DATASETS.keys() - SLOW - {"composite", "simple_integration", "rubiks_cube"}))
def test_no_fixed_answer_and_no_copied_line_is_paid_by_most_entries(task: str) -> None:
    entries = [entry_of(task, index=index) for index in range(10)]
    for answer in FIXED:
        again = sum(paid(answer, entry) for entry in entries)
        assert again <= 3, (answer, again)  # 0 is the 0.0 of some polynomials
    copied = [
        next((line for line in set(entry["question"].splitlines()) if paid(line, entry)), None) for entry in entries
    ]
    assert sum(line is not None for line in copied) <= 2, copied


def logic(*premises: str) -> dict[str, Any]:
    metadata = {"source_dataset": "propositional_logic", "premises": premises, "variables": ["P", "Q", "R"]}
    return {"answer": None, "metadata": metadata}


def flip(answer: str) -> dict[str, Any]:
    return {"answer": answer, "metadata": {"source_dataset": "coin_flip"}}


MAKES = {"answer": "4*8 - 6 - 2", "metadata": {"source_dataset": "puzzle24", "numbers": [4, 8, 6, 2]}}
HALTS: dict[str, Any] = {"answer": "True", "metadata": {"source_dataset": "game_of_life_halting"}}
GOES_ON = {**HALTS, "answer": "False"}


@pytest.mark.parametrize(
    ("answer", "entry", "full"),
    [
        ("True", HALTS, True), ("false", GOES_ON, True), (" True ", HALTS, True), ("False", HALTS, False),
        ("x", HALTS, False), ("1", HALTS, False), ("True or False", HALTS, False), ("True", GOES_ON, False),
        ("4*8 - 6 - 2", MAKES, True), ("(8-2)*(6-4)*2", MAKES, False), ("8*6/(4-2)", MAKES, True),
        ("8*3*1*1", MAKES, False), ("8*4-6-2+0", MAKES, False), ("24+4-8/2+6-6", MAKES, False), ("24", MAKES, False),
        ("8 + 6 + 4 * 2 + 2.9", MAKES, False), ("6*4 + 2/8", MAKES, False), ("-2 - 6 + 8*4", MAKES, True),
        ("0.234375", flip("0.234375"), True), ("15/64", flip("0.234375"), True), ("0.2344", flip("0.234375"), True),
        ("0", flip("0.234375"), False), ("0.2", flip("0.234375"), False), ("0", flip("0.00003"), False),
        ("0.00003", flip("0.00003"), True), ("1", flip("1"), True), ("0.9999", flip("1"), True),
        ("1", flip("0.1"), False),
        ("¬Q", logic("P", "(P → ¬Q)"), True), ("Q", logic("P", "(P → Q)"), False),
        ("P", logic("P", "(P → Q)"), False), ("¬¬P", logic("P", "(P → Q)"), False),
        ("(P \u2228 R)", logic("P", "(P → Q)"), False), ("(P ∧ (P → Q))", logic("P", "(P → Q)"), False),
        ("(P → R)", logic("(P → Q)", "(Q → R)"), True), ("R", logic("(P → Q)", "(Q → R)"), False),
        ("R", logic("P", "¬P"), False), ("(P → P)", logic("P", "Q"), False), ("(Q ∧ P)", logic("P", "Q"), False),
    ],
)  # fmt: skip
def test_full_marks_are_for_right_answers_where_the_package_gives_them_to_others(
    answer: str, entry: dict[str, Any], full: bool
) -> None:
    score = gym.judge(answer, entry["metadata"]["source_dataset"], {}, entry)
    assert (score == 1.0) is full and 0.0 <= score <= 1.0


def test_a_probability_that_begins_right_keeps_some_of_its_credit() -> None:
    scores = [gym.judge(each, "coin_flip", {}, flip("0.234375")) for each in ("0", "0.2", "0.23", "0.24", "7")]
    assert scores == [0.125, 0.375, 0.5, 0.375, 0.0]


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
    assert found - of_the_question == EVALUATED


@pytest.mark.parametrize("task", sorted(EVALUATED - {"intermediate_integration"}))
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


@pytest.mark.parametrize("text", ["[['1', 2], [3.5]]", "'A B C'", "-1", "{'a': (1, 2)}"])
def test_literals_are_read(text: str) -> None:
    assert gym.literal(text)


WORDS = ["valid_solutions", "valid_solutions,", "oracle_answer", "answer", "self", "entry", "True if answer else 1"]
WORDS += ["A B C", "_ Q\n_ _", "[oracle_answer]", "oracle_answer.split()", "*valid_solutions,", "metadata", "dict", ""]


@pytest.mark.parametrize("text", WORDS)
def test_a_word_is_no_literal(text: str) -> None:
    assert not gym.literal(text)


@pytest.mark.parametrize("task", sorted(gym.LITERAL))
def test_nobody_is_paid_for_naming_a_variable_of_the_scorer(task: str) -> None:
    for index in range(12):
        entry = entry_of(task, index=index)
        assert [gym.judge(text, task, {}, entry) for text in WORDS] == [0.0] * len(WORDS)
        assert gym.judge(entry["answer"], task, {}, entry) == 1.0


def test_a_literal_is_still_worth_what_the_scorer_gives_for_it() -> None:
    queens = entry_of("n_queens")
    for board in queens["metadata"]["valid_answers"]:
        assert gym.judge(board, "n_queens", {}, queens) == 1.0
        assert gym.judge(repr([row.split() for row in board.split("\n")]), "n_queens", {}, queens) == 0.5
    inserted = entry_of("string_insertion")
    assert gym.judge(repr(list(inserted["answer"])), "string_insertion", {}, inserted) == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["nan", "nan+nanj", "inf", "NaN + 1j"])
def test_what_is_no_number_is_at_no_distance(text: str) -> None:
    assert gym.judge(text, "complex_arithmetic", {}, entry_of("complex_arithmetic")) == 0.0


def test_a_list_of_no_numbers_is_not_sorted() -> None:
    entry = entry_of("number_sorting")
    text = str(["NaN"] * len(json.loads(entry["answer"].replace("'", '"')))).replace("'", "")
    assert gym.judge(text, "number_sorting", {}, entry) == 0.0


@pytest.mark.parametrize("text", ["9**9**9", "9^9^9^9", "10**10**7", "2**(3**40)", "(((9**99)**99)**99)**99"])
@pytest.mark.parametrize("task", sorted(gym.ARITHMETIC))
def test_arithmetic_that_is_too_large_is_wrong_and_said_to_be_costly(task: str, text: str) -> None:
    assert gym.verdict(text, task, {}, entry_of(task)) == (0.0, True)


@pytest.mark.parametrize("text", ["24e0", "x", "24 + 0*x", "24.0", "E", "sqrt(576)", "24 # 1 2 3 4", "3!", "-" * 1500])
@pytest.mark.parametrize("task", sorted(gym.ARITHMETIC))
def test_only_plain_arithmetic_is_computed_where_a_number_is_asked(task: str, text: str) -> None:
    assert gym.judge(text, task, {}, entry_of(task)) == 0.0


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("coin_flip", "1e999999999"),
        ("coin_flip", "1E-99999/3"),
        ("rubiks_cube", "R999999999"),
        ("rush_hour", "A+99999999999"),
        ("simple_integration", "(x+1)**100000"),
        ("simple_integration", "exp(exp(exp(99)))"),
        ("polynomial_multiplication", "x**(10**10)"),
    ],
)
def test_what_a_scorer_would_never_be_done_with_does_not_reach_it(task: str, text: str) -> None:
    assert gym.verdict(text, task, {}, entry_of(task)) == (0.0, True)


@pytest.mark.parametrize("text", ["[1]", "[" * 5000, '{"a": 1}', "null", "3"])
def test_an_answer_that_breaks_a_scorer_is_wrong_where_the_scorer_works(text: str) -> None:
    assert gym.judge(text, "boxnet", {}, entry_of("boxnet")) == 0.0


@pytest.mark.parametrize("error", [RecursionError, MemoryError, NotImplementedError, AssertionError])
def test_whatever_a_scorer_raises_on_an_answer_the_answer_is_wrong(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            if answer == "bad":
                raise error
            return 1.0

    monkeypatch.setattr(gym, "_scorer", lambda *_: Breaks())
    assert gym.judge("bad", "chain_sum", {}, {"question": "?", "answer": "7", "metadata": {}}) == 0.0


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
    "text", ["9^9^9", "9**(9**9)", "2**99999", "(((9^99)^99)^99)^99", "9 ** 9 ** 9", "(x+y+1)^300"]
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


def test_math_is_judged_in_a_worker() -> None:
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), reference="0.5")
    assert judged(r"so \boxed{\frac{1}{2}}", prompt, kind="math") == 1.0
    assert judged("9^9^9^9", prompt, kind="math", deadline=1.0) == 0.0
