"""Answers in the terminal: each with its reward as a sum and why it was not trained on; hostile text steers nothing."""

import pytest

from sample_rows import row
from stretto.algorithms.catalog import CATALOG
from stretto.report.samples_text import chosen, harmless, page, reward_text, use_text

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202eabc\r\x9b31m\ttab"


def test_a_reward_is_shown_as_the_sum_that_it_is():
    reward = {"value": 1.0, "parts": {"format": 0.0, "correct": 1.0}}
    assert reward_text(reward, {"format": 0.2, "correct": 1.0}) == "1 = 0.2*format 0 + correct 1"
    assert reward_text(None, {}) == "none"


def test_an_answer_says_whether_it_was_trained_on_and_if_not_why():
    mixed, alike = [row(0, 1.0), row(1, 0.0)], [row(0, 1.0, advantage=0), row(1, 1.0, advantage=0)]
    assert use_text(mixed[0], mixed) == "yes, advantage +0.5"
    assert use_text(alike[0], alike).startswith("yes, but it taught nothing: all 2 answers")
    dropped = [row(0, 1.0, used=False), row(1, 1.0, used=False)]
    assert "the algorithm drops such groups" in use_text(dropped[0], dropped)
    assert use_text(alike[0], alike, CATALOG["distill"]) == "yes"
    assert use_text(alike[0], alike, CATALOG["grpo"]).startswith("yes, but it taught nothing")
    assert "not accepted" in use_text(dropped[0], dropped, CATALOG["ppo"])
    assert use_text(row(failure="judge: \x1b[31m timed out"), mixed).startswith(
        "no: it has no verdict (judge: \ufffd[31m"
    )
    assert "not accepted" in use_text(row(used=False), mixed)


def test_best_worst_and_dropped():
    rows = [row(0, 0.5), row(1, 1.0), row(2, 0.0, used=False), row(3, failure="late", used=False)]
    assert [each["attempt"] for each in chosen(rows, "best")] == [1, 0, 2]
    assert [each["attempt"] for each in chosen(rows, "worst")] == [2, 0, 1]
    assert [each["attempt"] for each in chosen(rows, "dropped")] == [2, 3]
    assert [each["attempt"] for each in chosen(rows, "first")] == [0, 1, 2, 3]


def test_the_page_shows_prompt_answer_reference_and_reward():
    shown = page([row(0), row(1, 0.0)], {"format": 0.2}, order="best", most=1)
    lines = [line.split() for line in shown.splitlines()]
    assert shown.startswith(
        "step 3: 2 answers to 1 prompts, 2 with a verdict, 2 trained on\n1 of 2 answers, best first"
    )
    assert ["asked", "user:", "3+4?"] in lines
    assert ["answer", "7"] in lines
    assert ["reference", "7"] in lines
    assert ["reward", "1", "=", "0.2*format", "0", "+", "correct", "1"] in lines
    assert "<|assistant|>" not in shown
    assert "<|assistant|>" in page([row()], {}, full=True)


@pytest.mark.parametrize("full", [False, True])
def test_nothing_that_a_model_or_a_dataset_says_steers_a_terminal(full):
    hostile = row(answer=HOSTILE, prompt=HOSTILE)
    hostile["messages"] = [{"role": "user", "content": HOSTILE}]
    hostile["conversations"][0]["text"] = hostile["reference"] = HOSTILE
    hostile["reward"]["parts"] = {HOSTILE: 1.0}
    shown = page([hostile], {}, full=full)
    assert not {char for char in shown if not char.isprintable()} - {"\n"}
    assert "abc" in shown and harmless("a\tb") == "a    b"


def test_a_long_answer_is_cut_and_says_how_to_see_the_rest():
    shown = page([row(answer="x" * 3000)], {})
    assert "(1,800 more characters; --full shows them)" in shown
    assert "more characters" not in page([row(answer="x" * 3000)], {}, full=True)


def test_held_out_answers_say_nothing_of_training():
    shown = page([row(0), row(0, 0.0)], {}, step=7, held_out=True)
    assert shown.startswith("step 7: 2 held-out answers, 2 with a verdict\n2 of 2 answers")
    assert "used" not in shown and "trained on" not in shown
