"""Drafts are guesses of what was said before; whatever they are, the samples stay the same."""

import numpy as np
import pytest

from alone import Remembering, assert_alone, drained
from stretto.engines.base import Request
from stretto.engines.native import admission
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.speculative import ANSWERS, FIRST_GUESS, WIDTHS, GrowingAnswer, NgramDrafts
from tiers import slow_but

CONTEXT = np.array([5, 6, 7, 5, 6])
KEY = CONTEXT.tobytes()


def knowing(*answers):
    drafts = NgramDrafts()
    for answer in answers:
        drafts.learn(KEY, answer)
    return drafts


def guess(drafts, context, said, count):
    """What may come after an answer that has got so far."""
    answer = GrowingAnswer(context)
    answer.said += said
    return drafts.guess(answer, count)


def test_an_answer_that_began_alike_is_followed():
    drafts = knowing([1, 2, 3, 4, 5], [1, 2, 9, 8])
    assert guess(drafts, CONTEXT, [1, 2, 3], 3) == [4, 5]
    assert guess(drafts, CONTEXT, [1, 2], 3) == [9, 8]  # the newest of those that fit
    assert guess(drafts, CONTEXT, [], 2) == [1, 2]


def test_without_such_an_answer_the_last_two_tokens_are_looked_up():
    drafts = knowing([1, 2, 3, 4, 5])
    assert guess(drafts, CONTEXT, [7, 2, 3], 3) == [4, 5]
    assert guess(drafts, CONTEXT, [7, 2], 3) == []


def test_the_context_itself_is_looked_up_last():
    assert guess(NgramDrafts(), CONTEXT, [], 3) == []  # 5, 6 stand last at its very end
    assert guess(NgramDrafts(), np.array([5, 6, 7, 8]), [5, 6], 3) == [7, 8]


def test_another_context_knows_nothing():
    assert guess(knowing([1, 2, 3]), np.array([5, 6]), [1], 2) == []


def test_the_newest_answers_of_a_context_are_kept_until_a_round_begins():
    drafts = knowing(*([number, 0] for number in range(ANSWERS + 5)))
    assert [text.tokens[0] for text in drafts.known[KEY]] == list(range(5, ANSWERS + 5))
    drafts.restart()
    assert not drafts.known


def test_many_sequences_or_poor_guesses_are_not_worth_a_wider_forward():
    drafts = NgramDrafts()
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


class Spy(Remembering):
    """Counts the tokens that were right."""

    right_ones = 0

    def judge(self, tried, right):
        self.right_ones += right
        super().judge(tried, right)


def remembering(policy):
    engine = NativeEngine(policy)
    engine.drafts = Remembering()
    return engine


@pytest.mark.parametrize("worth", slow_but(1, of=[1, 10**9]))
def test_answers_are_the_same_with_drafts_and_most_of_a_repetition_is_guessed(policy, monkeypatch, worth):
    """The same questions under the same keys, twice: the second time every answer is known in advance."""
    monkeypatch.setattr(admission, "WORTH_SHARING", worth)
    requests = asked(9)
    engine = NativeEngine(policy)
    engine.drafts = Spy()
    engine.submit(requests)
    assert_alone(policy, requests, drained(engine))
    before = engine.drafts.right_ones
    engine.submit(requests)
    done = drained(engine)
    assert_alone(policy, requests, done)
    assert engine.drafts.right_ones - before > 20
    off = NativeEngine(policy, speculate=False)
    off.submit(requests)
    assert {k: c.tokens.tolist() for k, c in drained(off).items()} == {k: c.tokens.tolist() for k, c in done.items()}
    assert not off.drafts.known


def test_greedy_answers_are_neither_changed_nor_remembered(policy):
    engine = remembering(policy)
    engine.submit(asked(9))
    drained(engine)
    known = {context: len(texts) for context, texts in engine.drafts.known.items()}
    greedy = asked(6, key=100, temperature=0.0)
    engine.submit(greedy)
    assert_alone(policy, greedy, drained(engine))
    assert {context: len(texts) for context, texts in engine.drafts.known.items()} == known


def test_a_perfect_draft_does_not_run_past_limit_or_stop(plain_policy):
    requests = asked(3, limit=5)
    engine = remembering(plain_policy)
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
    engine = remembering(plain_policy)
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
    engine = remembering(plain_policy)
    first, second = asked(3, limit=20), asked(4, key=50)
    for request in first:
        engine.drafts.learn(request.tokens.tobytes(), list(range(7, 25)))
    engine.submit(first)
    done = {c.key: c for c in engine.step(0.0)}
    engine.submit(second)
    done |= drained(engine)
    assert_alone(plain_policy, [*first, *second], done)


def plain_guess(drafts, context, said, count):
    """What a guess is, by comparing everything that was said with every text there is."""
    texts = drafts.known.get(context.tobytes(), ())[::-1]
    for text in texts:
        if len(text.tokens) > len(said) and text.tokens[: len(said)] == said:
            return text.tokens[len(said) : len(said) + count]
    before = [*context[-2:].tolist(), *said]
    for tokens in [*(text.tokens for text in texts), context.tolist()]:
        for place in range(len(tokens) - 1, 0, -1):
            if len(before) > 1 and tokens[place - 1 : place + 1] == before[-2:]:
                if found := tokens[place + 1 : place + 1 + count]:
                    return found
                break
    return []


@pytest.mark.parametrize("seed", range(2))
def test_a_growing_answer_is_drafted_for_as_if_all_of_it_were_compared_anew(seed, monkeypatch):
    """Of few tokens, so that much is alike; texts come and are forgotten meanwhile."""
    monkeypatch.setattr("stretto.engines.native.speculative.ANSWERS", 4)
    chance, drafts, answers, alike = np.random.default_rng(seed), NgramDrafts(), [], 0
    contexts = [np.array(tokens) for tokens in ([1], [1, 2, 3, 1, 2, 1], [2, 2, 1])]
    for _ in range(1500):
        match chance.integers(40):
            case 0:
                drafts.restart()
            case 2 | 3 | 4 | 5 if answers:
                ended = answers.pop(chance.integers(len(answers)))
                drafts.learn(ended.key, ended.said)
            case 6 | 7 | 8 | 9:
                answers.append(GrowingAnswer(contexts[chance.integers(len(contexts))]))
        for answer in answers:
            if chance.random() < 0.5:
                likely = drafts.guess(answer, 3) if chance.random() < 0.8 else []
                answer.said += likely or chance.integers(1, 4, chance.integers(1, 4)).tolist()
            found = drafts.guess(answer, 3)
            assert found == plain_guess(drafts, answer.context, answer.said, 3)
            alike += bool(found)
    assert alike > 1000


class Compared(Remembering):
    """Guesses for the answers of an engine as by comparing everything they have said."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.compared = engine, 0

    def guess(self, answer, count):
        row = next(row for row, each in enumerate(self.engine.answers) if each is answer)
        said = self.engine.batch.tokens[row, : self.engine.batch.sampled[row]].tolist()
        found = super().guess(answer, count)
        assert found == plain_guess(self, self.engine.active[row].tokens, said, count)
        self.compared += 1
        return found


def test_drafts_follow_their_answers_when_rows_enter_move_leave_and_are_aborted(plain_policy):
    engine = NativeEngine(plain_policy, slots=5)
    engine.drafts = Compared(engine)
    chance = np.random.default_rng(0)
    for turn in range(4):
        requests = asked(14, limit=10, key=7 * turn)  # half of them were asked before
        engine.submit(requests)
        done, gone = {}, [int(key) + 7 * turn for key in chance.permutation(np.arange(1, 15))[:4]]
        for each in range(40):
            done |= {completion.key: completion for completion in engine.step(0.0)}
            if each % 4 == 0 and gone:
                engine.abort([gone.pop()])
        done |= drained(engine)
        assert_alone(plain_policy, [request for request in requests if request.key in done], done)
    assert engine.drafts.compared > 100
