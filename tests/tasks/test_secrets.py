"""Tasks whose prompts hide something: secrets, and logs that are longer than a context."""

import re

import pytest

from stretto.recipe.schema import AdditionSource, Holdout, Recipe, Source, TaskSection
from stretto.tasks.source import load_prompts, peek, split, split_task


def prompts(tmp_path, **source):
    return load_prompts(TaskSection(source=Source(**source), prompt="?"), tmp_path)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ({"name": "number", "range": (3, 5), "count": 60}, "[345]"),
        ({"name": "code", "alphabet": "ab", "length": 3, "count": 60}, "[ab]{3}"),
        ({"name": "lookup", "pairs": 9, "keys": 4, "count": 60}, "[0-9]"),
        ({"name": "latest", "length": 20, "kinds": 3, "letters": 2, "count": 60}, "[a-f]"),
    ],
)
def test_secrets_are_drawn_alike_everywhere_and_more_of_them_extend_the_set(tmp_path, source, form):
    made = prompts(tmp_path, **source)
    assert made == prompts(tmp_path, **source)
    assert made == prompts(tmp_path, **{**source, "count": 90})[:60]
    assert len({prompt.id for prompt in made}) == 60
    assert all(re.fullmatch(form, prompt.reference) for prompt in made)
    assert len({prompt.reference for prompt in made}) > 2
    assert {str(prompt.messages) for prompt in made} == {str(made[0].messages)}, "nothing of the secret is said"


def test_the_answer_of_a_lookup_is_the_last_digit_of_the_letter(tmp_path):
    for prompt in prompts(tmp_path, name="lookup", pairs=12, keys=3, count=50):
        document = prompt.tags["document"]
        assert re.fullmatch("([abc][0-9], ){12}", document)
        assert re.findall(f"{prompt.tags['key']}([0-9])", document)[-1] == prompt.reference
        assert re.findall(prompt.tags["evidence"], document)[-1] == prompt.reference


def test_the_last_letter_of_a_kind_may_stand_anywhere(tmp_path):
    places = set()
    for prompt in prompts(tmp_path, name="latest", length=8, kinds=3, letters=2, count=200):
        document, letters = prompt.tags["document"], prompt.tags["letters"]
        assert re.fullmatch("[a-f]{8}", document)
        assert letters == ("ab", "cd", "ef")[prompt.tags["kind"] - 1]
        places.add(max(document.rfind(letter) for letter in letters))
        assert re.findall(prompt.tags["evidence"], document)[-1] == prompt.reference
    assert places == set(range(8))


def test_games_that_open_alike_can_be_held_out_and_questions_that_do_cannot(tmp_path):
    task = TaskSection(source=Source(name="number", count=50), prompt="?", holdout=Holdout(prompts=10))
    made = load_prompts(task, tmp_path)
    training, heldout = split_task(Recipe(task=task, environment={"kind": "game"}), made)
    assert (len(training), len(heldout)) == (40, 10)
    assert not {each.id for each in training} & {each.id for each in heldout}
    with pytest.raises(Exception, match="ask what the 10 that are held out ask"):
        split(made, task.holdout)


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"name": "number", "range": (5, 3)}, "task.source.range"),
        ({"name": "code", "alphabet": "aab"}, "task.source.alphabet"),
        ({"name": "lookup", "count": 10**6}, "task.source.count"),
        ({"name": "latest", "kinds": 9, "letters": 6}, "task.source.letters"),
    ],
)
def test_settings_that_cannot_be_are_told(tmp_path, source, field):
    (problem,) = peek(TaskSection(source=Source(**source)), tmp_path).problems
    assert problem.field == field


def test_the_default_messages_can_be_filled_in(tmp_path):
    for name in ("number", "code", "lookup", "latest"):
        assert load_prompts(TaskSection(source=Source(name=name, count=2)), tmp_path)[0].messages
    assert isinstance(Source(), AdditionSource)
