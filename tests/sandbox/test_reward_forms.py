"""Reward functions of four forms: told apart by the names of their parameters, called accordingly, or refused."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from stretto.sandbox.reward_forms import Parameters, call, form_of, refusal, runner, written

PROMPT = {
    "id": "p",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}],
    "reference": "7",
    "tags": {"data_source": "gsm8k", "level": 2},
}


def asked(*answers: str, group: bool = False) -> dict[str, Any]:
    signals = [{"tokens": float(len(answer))} for answer in answers]
    return {"answers": list(answers), "prompt": PROMPT, "signals": signals, "group": group}


def own(answer, prompt, signals):
    return float(answer == prompt["reference"])


def group(answers, prompt, signals):
    return [float(answer == prompt["reference"]) for answer in answers]


def trl_texts(completions, **kwargs):
    return [float(c == a) for c, a in zip(completions, kwargs["answer"], strict=True)]


def trl_named(prompts, completions, solution, level):
    return [float(completions == solution) * level[0]]


def trl_chats(completions, answer, **kwargs):
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def said(completion):
    return last(completion)["content"] if len(completion) else said(completion)


def last(messages):
    return messages[-1]


def trl_helped(completions, answer, **kwargs):
    return [float((lambda: said(c))() == a) for c, a in zip(completions, answer, strict=True)]


class Judge:
    def __call__(self, completions, answer, **kwargs):
        return trl_helped(completions, answer)


async def slowly(answer, prompt, signals):
    return own(answer, prompt, signals)


async def trl_slowly(completions, answer, **kwargs):
    return trl_helped(completions, answer)


async def verl_slowly(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth)}


def trl_prompts(prompts, completions, **kwargs):
    return [len(prompts[0]) if completions else 0]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["level"] == 2
    return {"score": float(solution_str == ground_truth), "acc": True}


def verl_short(solution_str, ground_truth, **kwargs):
    return float(solution_str == ground_truth) + len(kwargs)


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    """The event loop of this process's calls ends with them."""
    yield
    runner().close()
    runner.cache_clear()


@pytest.mark.parametrize(
    ("function", "form", "right", "wrong"),
    [
        (own, "stretto", 1.0, 0.0),
        (partial(own), "stretto", 1.0, 0.0),
        (lambda *told: float(len(told)), "stretto", 3.0, 3.0),
        (trl_texts, "trl", 1.0, 0.0),
        (trl_named, "trl", 2.0, 0.0),
        (trl_chats, "trl", 1.0, 0.0),
        (trl_helped, "trl", 1.0, 0.0),
        (partial(trl_helped, more=1), "trl", 1.0, 0.0),
        (Judge(), "trl", 1.0, 0.0),
        (Judge().__call__, "trl", 1.0, 0.0),
        (slowly, "stretto", 1.0, 0.0),
        (trl_slowly, "trl", 1.0, 0.0),
        (verl_slowly, "verl", 1.0, 0.0),
        (trl_prompts, "trl", 4.0, 4.0),  # the text of the user: TRL's plain prompts are texts
        (verl, "verl", 1.0, 0.0),
        (verl_short, "verl", 3.0, 2.0),
    ],
)
def test_a_function_is_called_as_its_parameters_are_named(
    function: Callable[..., Any], form: str, right: float, wrong: float
) -> None:
    assert form_of(Parameters.of(function)) == form
    assert (call(function, asked("7")), call(function, asked("8"))) == (right, wrong)


@pytest.mark.parametrize(
    ("tags", "reference", "truth"),
    [
        ({"reward_model": {"ground_truth": ["7"]}, "ground_truth": None}, "2", ["7"]),
        ({"reward_model": {"ground_truth": "7"}, "ground_truth": "8"}, None, "8"),
        ({"reward_model": "judge"}, "9", "9"),
    ],
)
def test_the_truth_is_where_the_data_of_verl_have_it(tags: dict[str, Any], reference: str | None, truth: Any) -> None:
    told: dict[str, Any] = {}
    given = asked("7") | {"prompt": {**PROMPT, "tags": tags, "reference": reference}}
    call(lambda solution_str, ground_truth: told.update(truth=ground_truth), given)
    assert told["truth"] == truth
    with pytest.raises(TypeError, match=r"needs 'ground_truth', and this prompt has no .* reward_model.ground_truth"):
        call(verl, asked("7") | {"prompt": {**PROMPT, "reference": None}})
    optional = {"prompt": {**PROMPT, "reference": None}}
    assert call(lambda solution_str, ground_truth=1: ground_truth or 0.0, asked("7") | optional) == 0.0


def test_a_function_of_a_group_gets_all_answers() -> None:
    async def slow_group(answers, prompt, signals):
        return group(answers, prompt, signals)

    for function in (group, slow_group):
        assert call(function, asked("7", "8", "7", group=True)) == [1.0, 0.0, 1.0]
    with pytest.raises(TypeError, match="judges a group, and its file does not show that"):
        call(group, asked("7"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(answer, prompt): ...", r"takes 2 parameters, not 3: \(answer, prompt, signals\)"),
        ("def f(prompt, answer, signals): ...", "'prompt' is in another place"),
        ("def f(answer, prompt, signals, *, strict): ...", "needs the keyword 'strict'"),
        ("def f(queries, prompts, labels): ...", "has the form of OpenRLHF's"),
        ("def f(answers, signals, prompt): ...", "'signals' is in another place"),
        ("def f(completions, completion_ids, **rest): ...", "needs 'completion_ids', which only TRL's trainers have"),
        ("def f(completions, answer, /): ...", "'completions' by position only"),
        ("def f(data_source, solution_str, ground_truth, tokenizer): ...", "also needs 'tokenizer'"),
        ("def f(answer, prompt, signals, more=1): ...", None),
        ("def f(a, b, c): ...", None),
        ("def f(*everything): ...", None),
        ("def f(completions, **rest): ...", None),
        ("def f(data_source, solution_str, ground_truth, extra_info=None, **rest): ...", None),
    ],
)
def test_the_form_is_read_and_refused_without_running_anything(code: str, reason: str | None) -> None:
    import re

    (node,) = ast.parse(code).body
    parameters = written(node)
    assert parameters is not None
    found = refusal(parameters)
    assert found is None if reason is None else re.search(reason, found or "")
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert Parameters.of(scope["f"]) == parameters  # the same at hand


def test_a_decorated_function_may_have_other_parameters() -> None:
    (node,) = ast.parse("@wrap\ndef f(completions): ...").body
    assert written(node) is None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda completions, hints: [1.0], "needs the column 'hints', which the data do not have; there are answer,"),
        (lambda completions, **rest: 1.0, "where TRL's form gives a list of one number"),
        (lambda completions, **rest: [1.0, 2.0], "where TRL's form gives a list of one number"),
        (lambda data_source, solution_str, ground_truth: {"acc": 1}, "without 'score'"),
        (lambda answer, signals, prompt: 1.0, "'signals' is in another place"),
    ],
)
def test_what_does_not_fit_is_said(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        call(function, asked("7"))


@pytest.mark.parametrize("value", [1.0, [1.0], "ab", {"a": 1, "b": 2}])
def test_a_function_of_a_group_returns_a_number_for_each(value: object) -> None:
    with pytest.raises(TypeError, match="no list with a number for each answer"):
        call(lambda answers, prompt, signals: value, asked("7", "8", group=True))


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("answer", "'answer': the reference answer is prompt[\"reference\"]"),
        ("ground_truth", "'ground_truth': the reference answer is prompt[\"reference\"]"),
        ("level", "'level': this column is prompt[\"tags\"]['level']"),
        ("question", "'question': a prompt has id, messages, reference, tags; other columns are in prompt"),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_a_key_that_a_prompt_does_not_have_says_where_it_is(key, where, together):
    def alone(answer, prompt, signals):
        return prompt[key]

    def grouped(answers, prompt, signals):
        return [prompt[key]]

    with pytest.raises(KeyError) as caught:
        call(grouped if together else alone, asked("7", group=together))
    assert str(caught.value).startswith(where)
