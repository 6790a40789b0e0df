"""Losses over four answers of 3, 2, 4 and 1 tokens, with the arithmetic written out.

`OLD` are the trainer's log-probabilities when it sampled, `NEW` those of this forward, `ENGINE` those the engine gave.
"""

from math import exp

import pytest
import torch

from four_answers import ENGINE, NEW, OLD, REFERENCE, UNCORRECTED, A, B, C, numbers, rows
from stretto.algorithms.base import build
from stretto.algorithms.correction import correction_weight, truncated_share
from stretto.algorithms.losses import (
    clipped_share,
    clipped_surrogate,
    kl_penalty,
    negative_log_likelihood,
    policy_terms,
)
from stretto.recipe.schema import AlgorithmSection, Correction, Kl


def surrogate_by_hand(low, high):
    """-min(rho A, clip(rho) A) per answer; for a negative A the minimum takes the larger of the two ratios."""
    up = 1 + high
    return [
        [-A * min(exp(0.3), up), -A * exp(-0.1), -A * exp(-0.05)],
        [-B * max(exp(-0.7), 1 - low), -B * exp(0.1)],
        [-C * 1, -C * min(exp(0.4), up), -C * exp(-0.6), -C * 1],
        [-B * exp(1.5)],
    ]


def token_mean(answers):
    return sum(sum(answer) for answer in answers) / 10


def mean_of_means(answers):
    return sum(sum(answer) / len(answer) for answer in answers) / 4


def mean_of_sums(answers):
    return sum(sum(answer) for answer in answers) / 4


def term_value(*, denominator, scale, clip, count, correction=UNCORRECTED):
    section = AlgorithmSection(clip=clip, correction=correction)
    (term,) = policy_terms(section, denominator=denominator, scale=scale)
    assert term.denominator == denominator
    return float(term.loss(numbers(NEW), rows()).sum()) / count


@pytest.mark.parametrize(
    ("clip", "denominator", "scale", "count", "average", "known"),
    [
        ((0.2, 0.28), "tokens", "token", 10, token_mean, -0.009102),
        ((0.2, 0.28), "conversations", "answer", 4, mean_of_means, 0.660548),
        ((0.2, 0.28), "trajectories", "token", 4, mean_of_sums, -0.022754),
        ((0.2, 0.2), "tokens", "token", 10, token_mean, 0.003432),
        ((0.2, 0.2), "conversations", "answer", 4, mean_of_means, 0.670557),
        ((0.2, 0.2), "trajectories", "token", 4, mean_of_sums, 0.008580),
    ],
)
def test_the_clipped_surrogate_is_what_one_computes_by_hand(clip, denominator, scale, count, average, known):
    found = term_value(denominator=denominator, scale=scale, clip=clip, count=count)
    assert found == pytest.approx(average(surrogate_by_hand(*clip)), rel=1e-12)
    assert found == pytest.approx(known, abs=1e-6)


def test_truncated_token_weights_multiply_the_surrogate():
    weights = [[exp(0.1), exp(-0.1), 1], [1, exp(0.2)], [exp(0.1), exp(-0.1), 1, 1], [2.0]]  # the last: exp(1) cut at 2
    by_hand = [
        [weight * loss for weight, loss in zip(*pair, strict=True)]
        for pair in zip(weights, surrogate_by_hand(0.2, 0.28), strict=True)
    ]
    found = term_value(
        denominator="tokens", scale="token", clip=(0.2, 0.28), count=10, correction=Correction(kind="token", cap=2.0)
    )
    assert found == pytest.approx(token_mean(by_hand), rel=1e-12)
    assert found == pytest.approx(0.355239, abs=1e-6)


def test_correction_only_truncates_from_above():
    engine = numbers([-1.0, -1.0, -1.0])
    old = numbers([-1.0 + 3.0, -1.0 + 0.5, -1.0 - 9.0])
    weights = correction_weight(
        numbers([0, 0, 0]), rows(old=old, engine=engine), correction=Correction(kind="token", cap=2.0)
    )
    assert weights.tolist() == pytest.approx([2.0, exp(0.5), exp(-9.0)], rel=1e-12)


def test_without_correction_every_weight_is_one():
    assert correction_weight(numbers(NEW), rows(), correction=UNCORRECTED).tolist() == [1.0] * 10


def test_correction_compares_the_sampling_weights_with_the_engine_and_has_no_gradient():
    logprobs = numbers(NEW).requires_grad_()
    correction = Correction(kind="token", cap=100.0)
    fresh = correction_weight(logprobs, rows(old=None), correction=correction)
    assert not fresh.requires_grad
    assert fresh.tolist() == pytest.approx([exp(n - e) for n, e in zip(NEW, ENGINE, strict=True)], rel=1e-12)
    later = correction_weight(logprobs, rows(), correction=correction)
    assert later.tolist() == pytest.approx([exp(o - e) for o, e in zip(OLD, ENGINE, strict=True)], rel=1e-12)


def test_on_policy_the_ratio_is_one_and_its_gradient_is_the_plain_policy_gradient():
    logprobs = numbers(NEW).requires_grad_()
    loss = clipped_surrogate(logprobs, rows(old=None), clip=(0.2, 0.2), correction=UNCORRECTED)
    assert loss.tolist() == [-A] * 3 + [-B] * 2 + [-C] * 4 + [-B]
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-A] * 3 + [-B] * 2 + [-C] * 4 + [-B], rel=1e-12)


def test_a_clip_range_of_zero_still_learns_on_policy():
    logprobs = numbers(NEW).requires_grad_()
    clipped_surrogate(logprobs, rows(old=None), clip=(0.0, 0.0), correction=UNCORRECTED).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-A] * 3 + [-B] * 2 + [-C] * 4 + [-B], rel=1e-12)


def test_off_policy_clipping_stops_the_gradient_in_the_direction_asked_for_only():
    logprobs = numbers(NEW).requires_grad_()
    clipped_surrogate(logprobs, rows(), clip=(0.2, 0.28), correction=UNCORRECTED).sum().backward()
    moves = [
        *(0.0, -A * exp(-0.1), -A * exp(-0.05)),  # the first has risen by e^0.3 > 1.28 and was praised
        *(0.0, -B * exp(0.1)),  # the first has fallen by e^-0.7 < 0.8 and was blamed
        *(-C, 0.0, -C * exp(-0.6), -C),  # the third has fallen though it was praised: it may come back
        -B * exp(1.5),  # has risen far though it was blamed: it is pushed down with its whole ratio
    ]
    assert logprobs.grad.tolist() == pytest.approx(moves, rel=1e-12)


def test_the_clipped_share_counts_exactly_the_tokens_whose_gradient_is_stopped():
    logprobs = numbers(NEW).requires_grad_()
    clipped_surrogate(logprobs, rows(), clip=(0.2, 0.28), correction=UNCORRECTED).sum().backward()
    stopped = (logprobs.grad == 0).double()
    assert clipped_share(numbers(NEW), rows(), clip=(0.2, 0.28)).tolist() == stopped.tolist()
    assert stopped.tolist() == [1, 0, 0, 1, 0, 0, 1, 0, 0, 0]


def test_on_policy_nothing_is_clipped():
    assert clipped_share(numbers(NEW), rows(old=None), clip=(0.0, 0.0)).sum() == 0


@pytest.mark.parametrize(("kind", "share"), [("token", [0] * 9 + [1]), ("none", [0] * 10)])
def test_the_truncated_share_counts_weights_that_were_cut(kind, share):
    found = truncated_share(numbers(NEW), rows(), correction=Correction(kind=kind, cap=2.0))
    assert found.tolist() == share


def test_one_wild_token_does_not_overflow():
    wild = rows(old=numbers([-900.0] * 10), engine=numbers([-1000.0] * 10))
    logprobs = numbers(NEW).requires_grad_()
    loss = clipped_surrogate(logprobs, wild, clip=(0.2, 0.2), correction=Correction(kind="token", cap=2.0))
    loss.sum().backward()
    assert bool(torch.isfinite(loss).all()) and bool(torch.isfinite(logprobs.grad).all())


@pytest.mark.parametrize(("estimator", "known"), [("k1", 0.005), ("k2", 0.088125), ("k3", 0.101643)])
def test_the_kl_term_is_its_coefficient_times_the_estimator(estimator, known):
    found = kl_penalty(numbers(NEW), rows(), coef=0.3, estimator=estimator)
    assert float(found.sum()) / 10 == pytest.approx(0.3 * known, abs=1e-6)


def test_a_kl_term_without_reference_is_an_error_rather_than_no_term():
    with pytest.raises(ValueError, match="no reference log-probabilities"):
        kl_penalty(numbers(NEW), rows(reference=None), coef=0.1, estimator="k2")


def test_supervised_learning_is_the_negative_log_likelihood():
    assert negative_log_likelihood(numbers(NEW), rows()).tolist() == [-n for n in NEW]


@pytest.mark.parametrize(("name", "scale"), [("grpo", [3, 3, 3, 2, 2, 4, 4, 4, 4, 1]), ("rloo", [1] * 10)])
def test_the_kl_term_is_averaged_like_the_policy_term_beside_it(name, scale):
    section = AlgorithmSection(name=name, kl=Kl(coef=0.5, estimator="k2", where="loss"))
    policy, kl = build(section).terms
    assert kl.denominator == policy.denominator
    squares = [(n - r) ** 2 / 2 for n, r in zip(NEW, REFERENCE, strict=True)]
    by_hand = [0.5 * square / length for square, length in zip(squares, scale, strict=True)]
    assert kl.loss(numbers(NEW), rows()).tolist() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("kl", [Kl(coef=0.0), Kl(coef=0.5, where="reward")])
def test_without_kl_in_the_loss_there_is_one_term(kl):
    assert [term.name for term in build(AlgorithmSection(kl=kl)).terms] == ["policy"]


def test_the_clip_range_of_the_recipe_replaces_the_default():
    wide = build(AlgorithmSection(name="rloo", clip=(0.6, 0.4))).terms[0]
    default = build(AlgorithmSection(name="rloo")).terms[0]
    assert float(wide.watch["clip/share"].numbers(numbers(NEW), rows()).sum()) == 1  # e^0.4 alone is beyond 1.4
    assert float(default.watch["clip/share"].numbers(numbers(NEW), rows()).sum()) == 3
