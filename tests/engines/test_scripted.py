"""The scripted engine says what the script says, behind the same seam as the real ones."""

import numpy as np

from stretto.engines.base import Request
from stretto.engines.scripted import ScriptedEngine
from stretto.types import Weights


def request(key, *, limit=8, stop=(0,)):
    return Request(key=key, tokens=np.array([5, key]), max_new_tokens=limit, stop=frozenset(stop), temperature=1.0)


def test_requests_are_answered_in_order_one_a_step():
    engine = ScriptedEngine(lambda asked: [asked.key, 0])
    engine.submit([request(7), request(6)])
    engine.submit([request(8)])
    answers = [[(c.key, c.tokens.tolist()) for c in engine.step(0.0)] for _ in range(4)]
    assert answers == [[(7, [7, 0])], [(6, [6, 0])], [(8, [8, 0])], []]


def test_an_answer_ends_with_its_first_stop_token_or_at_its_limit():
    engine = ScriptedEngine(lambda asked: [9, 0, 9, 3, 9], logprob=-0.5)
    engine.submit([request(1), request(2, limit=1), request(3, stop=(3,)), request(4, stop=(), limit=5)])
    done = [engine.step(0.0)[0] for _ in range(4)]
    assert [(c.tokens.tolist(), c.stop) for c in done] == [
        ([9, 0], "stop"),
        ([9], "length"),
        ([9, 0, 9, 3], "stop"),
        ([9, 0, 9, 3, 9], "length"),
    ]
    assert done[2].logprobs.tolist() == [-0.5] * 4


def test_aborted_requests_leave_the_queue_empty_handed():
    engine = ScriptedEngine(lambda asked: [0])
    engine.submit([request(1), request(2), request(3)])
    assert [(c.key, c.tokens.tolist(), c.stop) for c in engine.abort([3, 1, 9])] == [(1, [], "abort"), (3, [], "abort")]
    assert [c.key for c in engine.step(0.0)] == [2]


def test_a_version_is_noted_and_names_the_answers_after_it():
    engine = ScriptedEngine(lambda asked: [0])
    receipt = engine.receive(Weights(version=4, manifest={}, where="shared"))
    engine.submit([request(1), request(2)])
    assert (receipt.version, engine.step(0.0)[0].version, engine.version) == (4, 4, 4)
    engine.close()
    assert engine.step(0.0) == []
