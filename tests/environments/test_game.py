"""Games: hidden secrets, honest feedback, and players that win."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.checks.rules.environment import SIGNALS
from stretto.environments.game import GameEnvironment
from stretto.errors import RolloutError
from stretto.recipe.schema import CodeGame, GameSection, NumberGame
from stretto.types import Prompt
from talking import played


def secret(text):
    return Prompt(id="p", messages=({"role": "user", "content": "Guess."},), reference=text)


def number(**section):
    return GameEnvironment(NumberGame(**{"range": (0, 15), "turns": 4, **section}))


def code(**section):
    return GameEnvironment(CodeGame(alphabet="abc", **{"length": 2, **section}))


def test_guesses_are_compared_until_the_right_one():
    outcome, talk = played(number(), secret("9"), ["I say 7.", "12", "9"])
    assert (outcome.answer, outcome.signals) == ("9", {"won": 1.0, "turns": 3.0, "invalid": 0.0})
    assert outcome.signals.keys() == set(SIGNALS[GameSection])
    (text,) = talk.texts()
    assert text.endswith("7.<|end|><|user|>higher<|assistant|>12<|end|><|user|>lower<|assistant|>9<|end|>")
    assert talk.trained() == ["I say 7.<|end|>12<|end|>9<|end|>"]


def test_a_guess_is_worth_what_it_finds_out_and_all_of_a_won_game_is_worth_one():
    """16 numbers, 8 left after 7, 4 after 12 (8 to 11), 1 after 9: one bit, one bit, two of four bits."""
    outcome, _ = played(number(), secret("9"), ["7", "12", "9"])
    assert outcome.turn_rewards == pytest.approx((1 / 4, 1 / 4, 2 / 4))
    outcome, _ = played(number(), secret("9"), ["7", "7", "?", "3"])
    assert outcome.turn_rewards == pytest.approx((1 / 4, 0, 0, 0))


def test_after_the_last_turn_the_game_is_lost_and_the_last_words_are_the_answer():
    outcome, talk = played(number(turns=2), secret("9"), ["1", "no idea"])
    assert (outcome.answer, outcome.signals["won"], outcome.signals["invalid"]) == ("no idea", 0.0, 1.0)
    assert len(talk.read) == 2


def test_codes_are_told_what_is_right_and_what_is_misplaced():
    game = code(length=4)
    assert game.feedback("abca", "aacb") == "2 right, 2 misplaced"
    assert game.feedback("aabb", "bbaa") == "0 right, 4 misplaced"
    assert game.feedback("aabb", "cccc") == "0 right, 0 misplaced"
    outcome, talk = played(code(), secret("cb"), ["bc", "it is cb"])
    assert outcome.signals["won"] == 1.0
    assert "<|user|>0 right, 2 misplaced<|assistant|>" in talk.texts()[0]


@given(st.integers(0, 99))
def test_the_player_that_is_imitated_bisects(n):
    game = number(range=(0, 99), turns=7)
    prompt = secret(str(n))
    messages = list(prompt.messages)
    for turn in range(7):
        guess = game.demonstrate(prompt, turn, messages)
        if guess == str(n):
            return
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": game.feedback(str(n), guess)}]
    raise AssertionError("bisection needs at most seven guesses of a hundred numbers")


@pytest.mark.parametrize("text", [None, "16", "x"])
def test_a_prompt_without_a_secret_of_the_game_is_a_failure(text):
    with pytest.raises(RolloutError, match="no secret"):
        played(number(), secret(text), ["1"])


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("I say 7!", "7"),
        ("0", "0"),
        ("Guess: -5", "-5"),
        ("My guess is 1,234.", "1234"),
        ("42.0", "42"),
        ("between 10-20", "20"),
        ("first 3, then 41.5", "3"),
        ("41.5", None),
        ("none", None),
    ],
)
def test_a_guess_is_the_last_whole_number_as_people_write_it(text, guess):
    assert number().read(text) == guess


@pytest.mark.parametrize("text", ["9" * 5000, "-" * 50 + "3", "", "\N{ARABIC-INDIC DIGIT THREE}"])
def test_hostile_guesses_are_guesses_or_none(text):
    outcome, _ = played(number(turns=2), secret("9"), [text, "9"], context=20_000, limit=6000)
    assert outcome.signals["won"] == 1.0


def test_an_episode_whose_context_is_full_ends():
    outcome, talk = played(number(turns=50), secret("9"), lambda text: "1", context=60)
    assert outcome.signals["turns"] < 50
    assert talk.full == 1
    assert len(outcome.turn_rewards) == talk.calls
