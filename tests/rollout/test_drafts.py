"""Drafts are guesses of what was said before; whatever they are, the samples stay the same."""

import numpy as np
import pytest

from alone import assert_alone, drained
from stretto.rollout import admission
from stretto.rollout.base import Request
from stretto.rollout.drafts import ANSWERS, FIRST_GUESS, WIDTHS, Drafts
from stretto.rollout.native import NativeEngine

CONTEXT = np.array([5, 6, 7, 5, 6])
KEY = CONTEXT.tobytes()


def knowing(*answers):
    drafts = Drafts()
    for answer in answers:
        drafts.learn(KEY, answer)
    return drafts


def test_an_answer_that_began_alike_is_followed():
    drafts = knowing([1, 2, 3, 4, 5], [1, 2, 9, 8])
    assert drafts.guess(CONTEXT, [1, 2, 3], 3) == [4, 5]
    assert drafts.guess(CONTEXT, [1, 2], 3) == [9, 8]  # the newest of those that fit
    assert drafts.guess(CONTEXT, [], 2) == [1, 2]


def test_without_such_an_answer_the_last_two_tokens_are_looked_up():
    drafts = knowing([1, 2, 3, 4, 5])
    assert drafts.guess(CONTEXT, [7, 2, 3], 3) == [4, 5]
    assert drafts.guess(CONTEXT, [7, 2], 3) == []


def test_the_context_itself_is_looked_up_last():
    assert Drafts().guess(CONTEXT, [], 3) == []  # 5, 6 stand last at its very end
    assert Drafts().guess(np.array([5, 6, 7, 8]), [5, 6], 3) == [7, 8]


def test_another_context_knows_nothing():
    assert knowing([1, 2, 3]).guess(np.array([5, 6]), [1], 2) == []


def test_only_what_was_settled_is_known_to_a_copy():
    drafts = knowing([1, 2, 3])
    drafts.settle()
    drafts.learn(KEY, [1, 2, 4])
    copy = Drafts()
    copy.restore(drafts.state())
    assert drafts.guess(CONTEXT, [1, 2], 1) == [4]
    assert copy.guess(CONTEXT, [1, 2], 1) == [3]


def test_the_newest_answers_and_contexts_are_kept(monkeypatch):
    drafts = knowing(*([number, 0] for number in range(ANSWERS + 5)))
    drafts.settle()
    assert [text.tokens[0] for text in drafts.known[KEY]] == list(range(5, ANSWERS + 5))
    monkeypatch.setattr("stretto.rollout.drafts.MOST_TOKENS", 2 * ANSWERS + 1)
    drafts.learn(b"other", [1, 2])
    drafts.settle()
    assert list(drafts.known) == [b"other"]


def test_many_sequences_or_poor_guesses_are_not_worth_a_wider_forward():
    drafts = Drafts()
    assert drafts.width(500, fixed=24.0) == 1
    assert drafts.width(1, fixed=24.0) > 1
    for _ in range(200):
        drafts.judge(tried=8, right=0)
    assert drafts.width(1, fixed=24.0) == 1
    drafts.restart()
    assert drafts.right == FIRST_GUESS
    for _ in range(200):
        drafts.judge(tried=8, right=8)
    assert drafts.width(1, fixed=24.0) == max(WIDTHS)


def asked(count, *, key=0, limit=12, temperature=1.0):
    contexts = [np.arange(5, 30), np.arange(8, 20), np.array([9, 9, 10])]
    return [
        Request(
            key=key + index,
            tokens=contexts[index % 3],
            max_new_tokens=limit + index % 4,
            stop=frozenset({6}),
            temperature=temperature,
        )
        for index in range(1, count + 1)
    ]


class Spy(Drafts):
    """Counts the tokens that were right."""

    right_ones = 0

    def judge(self, tried, right):
        self.right_ones += right
        super().judge(tried, right)


@pytest.mark.parametrize("worth", [1, 10**9])
def test_answers_are_the_same_with_drafts_and_most_of_a_repetition_is_guessed(policy, monkeypatch, worth):
    """The same questions under the same keys, twice: the second time every answer is known in advance."""
    monkeypatch.setattr(admission, "WORTH_A_TRUNK", worth)
    requests = asked(9)
    engine = NativeEngine(policy)
    engine.drafts = Spy()
    engine.submit(requests)
    assert_alone(policy, requests, drained(engine))
    engine.drafts.settle()
    before = engine.drafts.right_ones
    engine.submit(requests)
    done = drained(engine)
    assert_alone(policy, requests, done)
    assert engine.drafts.right_ones - before > 20
    off = NativeEngine(policy, speculate=False)
    off.submit(requests)
    assert {k: c.tokens.tolist() for k, c in drained(off).items()} == {k: c.tokens.tolist() for k, c in done.items()}
    assert not off.drafts.known and not off.drafts.fresh


def test_greedy_answers_are_neither_changed_nor_remembered(policy):
    engine = NativeEngine(policy)
    engine.submit(asked(9))
    drained(engine)
    known = {context: len(texts) for context, texts in engine.drafts.fresh.items()}
    greedy = asked(6, key=100, temperature=0.0)
    engine.submit(greedy)
    assert_alone(policy, greedy, drained(engine))
    assert {context: len(texts) for context, texts in engine.drafts.fresh.items()} == known


def test_a_perfect_draft_does_not_run_past_limit_or_stop(plain_policy):
    requests = asked(3, limit=5)
    engine = NativeEngine(plain_policy)
    engine.submit(requests)
    done = drained(engine)
    for request in requests:  # what was said, and then more
        for _ in range(3):
            engine.drafts.learn(request.tokens.tobytes(), [*done[request.key].tokens.tolist(), 11, 12, 13, 14])
    engine.submit(requests)
    again = drained(engine)
    assert {k: (c.tokens.tolist(), c.stop) for k, c in again.items()} == {
        k: (c.tokens.tolist(), c.stop) for k, c in done.items()
    }


def test_an_abort_while_drafts_are_in_flight_moves_them_too(plain_policy):
    """Drafts are right here, so the next step accepts what is in the cache already: it must have moved with its row."""
    requests = asked(6, limit=20)
    engine = NativeEngine(plain_policy)
    engine.submit(requests)
    expected = drained(engine)
    for request in requests:
        engine.drafts.learn(request.tokens.tobytes(), expected[request.key].tokens.tolist())
    engine.submit(requests)
    assert engine.step(0.0) == []
    assert engine.batch.drafts.shape[1] > 0
    gone = [request.key for request in requests[:3]]
    engine.abort(gone)
    assert_alone(plain_policy, requests[3:], drained(engine))


def test_sequences_that_enter_while_others_speculate_are_answered_as_alone(plain_policy):
    engine = NativeEngine(plain_policy)
    first, second = asked(3, limit=20), asked(4, key=50)
    for request in first:
        engine.drafts.learn(request.tokens.tobytes(), list(range(7, 25)))
    engine.submit(first)
    done = {c.key: c for c in engine.step(0.0)}
    engine.submit(second)
    done |= drained(engine)
    assert_alone(plain_policy, [*first, *second], done)
