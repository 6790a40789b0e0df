"""Memory: nothing of a document is lost on its way through the pieces, and each piece is a conversation of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.checks.rules.environment import SIGNALS
from stretto.environments.memory import MemoryEnvironment, chunks
from stretto.errors import RolloutError
from stretto.recipe.schema import MemorySection
from stretto.types import Prompt
from talking import played

SECTION = {"chunk": 4, "empty": "-", "update": "Q{question}M{memory}C{chunk}", "answer": "Q{question}M{memory}"}


def prompt(document="a=1 b=2 c=3 ", question="b", **tags):
    return Prompt(
        id="p",
        messages=({"role": "user", "content": question},),
        reference="2",
        tags={"document": document, **tags},
    )


def memory(**section):
    return MemoryEnvironment(MemorySection(**{**SECTION, **section}))


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 20))
def test_pieces_are_the_document(document, size):
    pieces = list(chunks(document, size))
    assert "".join(pieces) == document
    assert all(0 < len(piece) <= size for piece in pieces)


def test_pieces_end_behind_a_space_where_one_is_near():
    assert list(chunks("ab cdefgh ijklmnopqr", 5)) == ["ab ", "cdefg", "h ijk", "lmnop", "qr"]


def test_every_piece_is_a_conversation_with_the_memory_of_the_one_before():
    outcome, talk = played(memory(), prompt(), ["-", "2", "2!", "2"])
    assert outcome.answer == "2"
    assert talk.texts() == [
        "<|user|>QbM-Ca=1 <|assistant|>-<|end|>",
        "<|user|>QbM-Cb=2 <|assistant|>2<|end|>",
        "<|user|>QbM2Cc=3 <|assistant|>2!<|end|>",
        "<|user|>QbM2!<|assistant|>2<|end|>",
    ]
    assert talk.trained() == ["-<|end|>", "2<|end|>", "2!<|end|>", "2<|end|>"]
    assert [each.parent for each in talk.conversations()] == [None] * 4
    assert outcome.signals == {"chunks": 3, "memory_cut": 0, "memory_characters": 2, "truncated": 0}
    assert outcome.signals.keys() == set(SIGNALS[MemorySection])


def test_a_memory_has_a_length_of_its_own_and_what_is_cut_is_counted():
    outcome, talk = played(memory(memory_tokens=2), prompt(), ["longer", "22", "3", "a long answer"])
    assert outcome.signals["memory_cut"] == 2
    assert [text.rpartition("M")[2][:2] for text in talk.read] == ["-C", "lo", "22", "3<"]
    assert outcome.answer == "a long answer"


def test_without_memory_every_piece_finds_it_empty():
    _, talk = played(memory(keep=False), prompt(), ["2"] * 4)
    assert all("M-" in text for text in talk.read)


def test_braces_in_documents_questions_and_memories_are_text():
    _, talk = played(memory(chunk=100), prompt("{memory}", "{chunk}"), ["{question}", "2"])
    assert talk.read == [
        "<|user|>Q{chunk}M-C{memory}<|assistant|>",
        "<|user|>Q{chunk}M{question}<|assistant|>",
    ]


def test_a_system_message_stays_before_every_conversation():
    asked = prompt()
    asked = Prompt(id="p", messages=({"role": "system", "content": "S"}, *asked.messages), tags=asked.tags)
    _, talk = played(memory(chunk=100), asked, ["m", "2"])
    assert all(text.startswith("<|system|>S<|user|>Qb") for text in talk.read)


@pytest.mark.parametrize("document", ["", None, 3])
def test_a_prompt_without_a_document_is_a_failure(document):
    with pytest.raises(RolloutError, match="'document'"):
        played(memory(), prompt(document), ["-"])


def test_the_player_that_is_imitated_remembers_what_it_has_read():
    made, asked = memory(), prompt("a=1,b=4,b=2,c=3,", evidence="b=(.)")
    assert [made.demonstrate(asked, turn, ()) for turn in range(5)] == ["-", "4", "2", "2", "2"]
    asked = prompt("a=1,b=4,b=2,c=3,", evidence="[24]")
    assert [made.demonstrate(asked, turn, ()) for turn in range(4)] == ["-", "4", "2", "2"]
    forgetful = memory(shown=1e-9)
    assert [forgetful.demonstrate(asked, turn, ()) for turn in range(5)] == [*"----2"]
    assert [made.demonstrate(prompt(), turn, ()) for turn in range(4)] == ["-", "-", "-", "2"]
