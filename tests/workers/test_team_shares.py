"""Requests of a lane go to the team that has the least to do, and to those that have their context already."""

from collections import Counter

import numpy as np

from stretto.engines.base import Completion, Request
from stretto.workers.team_shares import TeamShares


def request(key, context, *, most=10):
    """One with a context of so many tokens, all of them its number."""
    number, length = context
    tokens = np.full(length, number)
    return Request(key=key, tokens=tokens, max_new_tokens=most, stop=frozenset(), temperature=1.0)


def over(*keys):
    """These are."""
    return [
        Completion(key=key, tokens=np.zeros(1, np.int64), logprobs=np.zeros(1), stop="stop", version=0) for key in keys
    ]


def keys(parts):
    return [[each.key for each in part] for part in parts]


def test_siblings_stay_together_as_long_as_that_costs_less_than_their_context():
    shares = TeamShares(2)
    parts = shares.parts([request(key, (1, 25)) for key in range(8)])
    # The fourth would wait for 30 tokens here, and has 25 to read there; from then on the other one catches up.
    assert keys(parts) == [[0, 1, 2, 6], [3, 4, 5, 7]]


def test_every_request_goes_to_one_team_and_load_is_even():
    chance, shares, open_keys = np.random.default_rng(0), TeamShares(4), []
    for turn in range(50):
        new = [
            request(100 * turn + at, (int(chance.integers(5)), 8), most=int(chance.integers(1, 20))) for at in range(6)
        ]
        parts = shares.parts(new)
        assert Counter(each.key for part in parts for each in part) == Counter(each.key for each in new)
        open_keys += [each.key for each in new]
        chance.shuffle(open_keys)
        shares.done(over(*open_keys[20:]))
        del open_keys[20:]
        loads = [team.tokens for team in shares.teams]
        assert min(loads) >= 0
    shares.done(over(*open_keys))
    assert [team.tokens for team in shares.teams] == [0] * 4
    assert not any(team.contexts for team in shares.teams)
    assert not shares.asked


def test_a_request_that_is_asked_again_before_it_is_over_counts_twice():
    shares = TeamShares(2)
    shares.parts([request(1, (1, 4))])
    shares.parts([request(1, (1, 4))])
    shares.done(over(1))
    assert sum(team.tokens for team in shares.teams) == 10
    shares.done(over(1, 1, 7))
    assert [team.tokens for team in shares.teams] == [0, 0]


def test_nothing_is_left_of_what_was_asked_of_a_lane_that_failed():
    shares = TeamShares(2)
    shares.parts([request(key, (key, 4)) for key in range(5)])
    shares.clear()
    assert keys(shares.parts([request(9, (9, 4))])) == [[9], []]
