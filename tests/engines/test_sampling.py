"""Keyed noise draws exactly from the softmax, and depends on nothing but key, position and token."""

import math

import pytest
import torch

from rounding import rounding
from stretto.engines.native.sampling import BLOCK, draw, gumbel, signed

CLOSE = rounding(torch.float32, 1, 1, 700)
"""Of log-probabilities in fp32: a logit, a temperature, and a sum of exponentials."""


def logits_of(vocabulary, *, seed=0, rows=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 2


def drawn(logits, keys, positions=0, temperature=1.0):
    rows = len(keys)
    many = logits.expand(rows, -1) if len(logits) == 1 else logits
    return draw(
        many,
        keys=keys,
        positions=torch.as_tensor(positions).expand(rows),
        temperatures=torch.full((rows,), temperature, dtype=torch.float64),
    )


def deviations(counts, expected):
    """How many standard deviations the chi-square statistic lies above its mean; rare cells are put together."""
    rare = expected < 8
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [5, BLOCK, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_softmax(vocabulary, temperature):
    logits, count = logits_of(vocabulary), 4000
    tokens, _ = drawn(logits, torch.arange(count) * 7919 + 3, temperature=temperature)
    expected = (logits[0].double() / temperature).softmax(-1) * count
    assert deviations(torch.bincount(tokens, minlength=vocabulary), expected) < 4
    wrong = (logits[0].double() / (temperature + 0.2)).softmax(-1) * count
    assert deviations(torch.bincount(tokens, minlength=vocabulary), wrong) > 8, "the statistic notices nothing"


def test_draws_of_one_key_at_many_positions_follow_the_softmax():
    logits, count = logits_of(300), 4000
    tokens, _ = drawn(logits, torch.zeros(count, dtype=torch.long), positions=torch.arange(count))
    assert deviations(torch.bincount(tokens, minlength=300), logits[0].double().softmax(-1) * count) < 4


@pytest.mark.parametrize("neighbor", ["next position", "next key", "the key in the highest bit"])
def test_neighboring_draws_are_independent(neighbor):
    logits, count = logits_of(4), 3000
    keys, positions = torch.arange(count) * 2, torch.full((count,), 3)
    first, _ = drawn(logits, keys, positions)
    match neighbor:
        case "next position":
            second, _ = drawn(logits, keys, positions + 1)
        case "next key":
            second, _ = drawn(logits, keys + 1, positions)
        case _:
            second, _ = drawn(logits, keys ^ signed(1 << 63), positions)
    chances = logits[0].double().softmax(-1)
    pairs = torch.bincount(first * 4 + second, minlength=16)
    assert deviations(pairs, (chances[:, None] * chances).flatten() * count) < 4


def test_a_row_draws_the_same_whatever_else_is_in_the_batch():
    logits, keys = logits_of(700, rows=32), torch.arange(32) * 1001
    positions, temperatures = torch.arange(32) % 5, torch.tensor([1.0, 0.7, 0.0, 2.0], dtype=torch.float64).repeat(8)
    tokens, logprobs = draw(logits, keys=keys, positions=positions, temperatures=temperatures)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    for rows in (order, order[:5], *order[:8].split(1)):
        some, scores = draw(logits[rows], keys=keys[rows], positions=positions[rows], temperatures=temperatures[rows])
        assert some.tolist() == tokens[rows].tolist()
        torch.testing.assert_close(scores, logprobs[rows], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("more", [1, 68, 1000])
def test_tokens_that_cannot_be_drawn_change_nothing(more):
    logits, keys = logits_of(700), torch.arange(500)
    padded = torch.cat([logits, torch.full((1, more), -math.inf)], dim=1)
    tokens, logprobs = drawn(logits, keys)
    same, scores = drawn(padded, keys)
    assert same.tolist() == tokens.tolist()
    torch.testing.assert_close(scores, logprobs, rtol=0, atol=CLOSE)


def test_other_keys_and_other_positions_draw_other_tokens():
    logits, keys = logits_of(700), torch.arange(400)
    tokens, _ = drawn(logits, keys)
    for other, _ in (drawn(logits, keys + 1000), drawn(logits, keys, positions=1)):
        assert (other == tokens).float().mean() < 0.2


def test_the_noise_of_blocks_is_not_the_noise_of_tokens():
    keys, positions, lanes = torch.arange(3), torch.zeros(3, dtype=torch.long), torch.arange(BLOCK)[None]
    assert not (gumbel(keys, positions, lanes, level=0) == gumbel(keys, positions, lanes, level=1)).any()


def test_temperature_0_takes_the_likeliest_token_whatever_the_key():
    logits = logits_of(700, rows=50)
    for key in (0, 12345):
        tokens, logprobs = drawn(logits, torch.full((50,), key), temperature=0.0)
        assert tokens.tolist() == logits.argmax(-1).tolist()
        torch.testing.assert_close(logprobs.float(), logits.log_softmax(-1).amax(-1), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("vocabulary", [7, 700])
def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(vocabulary, temperature):
    logits = logits_of(vocabulary, rows=200)
    tokens, logprobs = drawn(logits, torch.arange(200), temperature=temperature)
    expected = (logits.double() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=CLOSE)


def test_rounding_moves_a_token_only_at_a_near_tie():
    logits = logits_of(700, rows=800)
    tokens, _ = drawn(logits, torch.arange(800))
    nudged, _ = drawn(logits + logits_of(700, seed=1, rows=800) * 1e-6, torch.arange(800))
    assert (nudged != tokens).sum() <= 1


@pytest.mark.parametrize("key", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_key_of_64_bits_fits_into_a_signed_number_and_keeps_its_bits(key):
    assert torch.tensor(signed(key)).item() % (1 << 64) == key
