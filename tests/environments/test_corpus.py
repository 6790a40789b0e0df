"""The search finds what fits best, in folders and files, and refuses what is no collection of texts."""

import math

import pytest

from stretto.environments.corpus import LENGTH, SATURATION, Corpus, Passage
from stretto.errors import RecipeError


def corpus(*texts):
    return Corpus([Passage(title="", text=text) for text in texts])


def test_the_rarer_and_the_denser_word_wins_and_ties_keep_their_order():
    made = corpus("the cat sat", "the dog sat", "the cat and the other cat", "a bird")
    assert [each.text for each in made.search("Cat", 3)] == ["the cat and the other cat", "the cat sat"]
    assert [each.text for each in made.search("sat", 1)] == ["the cat sat"]
    assert made.search("whale", 3) == []
    assert made.shown("whale", 3) == "nothing"


def test_the_score_is_that_of_bm25():
    made = corpus("a a b", "c")
    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    score = rarity * 2 * (SATURATION + 1) / (2 + SATURATION * (1 - LENGTH + LENGTH * 3 / 2))
    assert score > rarity  # twice in a passage that is longer than the mean
    assert made.search("a", 1)[0].text == "a a b"


def test_a_folder_is_read_by_paragraphs_and_a_file_by_lines(tmp_path):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "one.txt").write_text("First thing.\n\nSecond thing.\n")
    (tmp_path / "texts" / "deep" / "two.md").write_text("Third thing.")
    (tmp_path / "texts" / "skipped.py").write_text("thing")
    (tmp_path / "lines.jsonl").write_text('{"text": "Fourth thing.", "title": "T"}\n\n{"text": "Fifth."}\n')
    found = Corpus.read("texts", root=tmp_path).search("thing", 9)
    assert {(each.title, each.text) for each in found} == {
        ("one.txt", "First thing."),
        ("one.txt", "Second thing."),
        ("deep/two.md", "Third thing."),
    }
    assert Corpus.read("lines.jsonl", root=tmp_path).shown("thing", 9) == "[T] Fourth thing."


@pytest.mark.parametrize(("path", "says"), [(None, "needs a collection"), ("none", "cannot be read")])
def test_no_collection_is_refused(tmp_path, path, says):
    with pytest.raises(RecipeError, match=says):
        Corpus.read(path, root=tmp_path)


@pytest.mark.parametrize(("lines", "says"), [("", "holds no texts"), ("3\n", "corpus.jsonl:1"), ("{}", "jsonl:1")])
def test_a_file_of_something_else_is_refused_by_its_line(tmp_path, lines, says):
    (tmp_path / "corpus.jsonl").write_text(lines)
    with pytest.raises(RecipeError, match=says):
        Corpus.read("corpus.jsonl", root=tmp_path)
