import numpy as np
import pytest

from stretto.bench.cases import CAP, ROLLOUT, STEP, BenchCase, answer_lengths, choose, enough_prompts, make_prompts
from stretto.errors import RecipeError


def characters(messages):
    return sum(len(message["content"]) for message in messages)


def test_the_lengths_of_answers_are_the_same_for_ever():
    lengths = answer_lengths(STEP[0])
    assert lengths.tolist()[0] == [26, 22, 35, 26, 17, 30, 52, 42]
    assert lengths.tolist()[-1] == [31, 36, 12, 16, 18, 12, 64, 18]
    assert lengths.sum() == 1828


def test_lengths_follow_the_distribution_that_is_named():
    lengths = answer_lengths(BenchCase(name="many", prompt=1, prompts=100, samples=100))
    assert np.median(lengths) == 24
    assert lengths.max() == CAP
    below = np.log(lengths[lengths < 24]) - np.log(24)
    assert np.sqrt(np.mean(below**2)) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("wanted", [200, 201, 202, 203, 512])
def test_worked_examples_fill_every_prompt_up_to_the_wanted_tokens(wanted):
    prompts = make_prompts(BenchCase(name="long", prompt=wanted), characters)
    assert [characters(prompt.messages) for prompt in prompts] == [wanted] * 8


def test_a_prompt_that_is_as_long_as_wanted_has_no_examples():
    prompts = make_prompts(BenchCase(name="short", prompt=1), characters)
    assert len({prompt.id for prompt in prompts}) == 8
    for prompt in prompts:
        (a, b) = prompt.id.removeprefix("bench/").split("+")
        assert prompt.messages[0]["content"] == f"What is {a}+{b}? Answer with just the number."
        assert int(prompt.reference) == int(a) + int(b)


def test_examples_are_right_and_each_prompt_has_its_own_unless_they_are_common():
    def shown(case):
        return ["\n".join(p.messages[0]["content"].splitlines()[:-1]) for p in make_prompts(case, characters)]

    own, common = shown(BenchCase(name="a", prompt=300)), shown(BenchCase(name="b", prompt=300, common=True))
    assert len(set(own)) == 8
    assert len(set(common)) == 1
    for line in own[0].splitlines():
        question, answer = line.split("=")
        assert sum(map(int, question.split("+"))) == int(answer)


def test_every_repetition_has_prompts_of_its_own():
    case = BenchCase(name="rounds", prompt=100, prompts=3)
    once, thrice = make_prompts(case, characters), make_prompts(case, characters, rounds=3)
    assert thrice[:3] == once
    assert len({prompt.id for prompt in thrice}) == 9


def test_more_repetitions_than_there_are_prompts_for_are_refused():
    enough_prompts(prompts=25, steps=3)
    with pytest.raises(RecipeError, match="there are 100"):
        enough_prompts(prompts=26, steps=3)


def test_cases_are_chosen_by_name():
    def names(*asked):
        return [case.name for case in choose(STEP, asked, prompts=2, samples=4)]

    assert names() == ["full-43"]
    assert names("lora-43", "full-512", "lora-43") == ["lora-43", "full-512"]
    assert names("all") == [case.name for case in STEP]
    assert choose(ROLLOUT, (), prompts=2, samples=4)[0].answers == 8
    with pytest.raises(RecipeError, match="full-44") as error:
        names("full-44")
    assert "full-43" in error.value.problems[0].fix
