"""Dr. GRPO, GSPO, CISPO and REINFORCE++ over the four answers of `test_losses`, with the arithmetic written out."""

from math import exp, sqrt

import numpy as np
import pytest

from four_answers import ENGINE, LENGTHS, NEW, OLD, UNCORRECTED, A, B, C, numbers, rows
from stretto.algorithms.advantages import group_centred, whitened
from stretto.algorithms.base import build
from stretto.algorithms.correction import correction_weight, truncated_share
from stretto.algorithms.losses import clipped_surrogate, clipped_weight, sequence_surrogate
from stretto.recipe.schema import AlgorithmSection, Correction
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Trajectory

ADVANTAGES = [A, B, C, B]
GAPS = [new - old for new, old in zip(NEW, OLD, strict=True)]
"""Log-ratios per token: .3 -.1 -.05 | -.7 .1 | 0 .4 -.6 0 | 1.5."""
MEANS = [0.15 / 3, -0.6 / 2, -0.2 / 4, 1.5]
"""Their means per answer."""


def per_answer(values):
    return [part.sum() / length for part, length in zip(values.split(LENGTHS), LENGTHS, strict=True)]


def test_a_sequence_ratio_is_the_exponential_of_the_mean_log_ratio():
    loss = sequence_surrogate(numbers(NEW), rows(), clip=(10.0, 100.0), correction=UNCORRECTED)
    ratios = [-float(part) / advantage for part, advantage in zip(per_answer(loss), ADVANTAGES, strict=True)]
    assert ratios == pytest.approx([exp(mean) for mean in MEANS])
    assert ratios == pytest.approx([1.051271, 0.740818, 0.951229, 4.481689], abs=1e-6)


@pytest.mark.parametrize(("clip", "golden"), [((3e-4, 4e-4), 0.684838), ((0.2, 0.28), 0.629125)])
def test_gspo_by_hand(clip, golden):
    low, high = clip
    clipped = [
        -max(-A * exp(0.05), -A * (1 + high)),
        -max(-B * exp(-0.3), -B * (1 - low)),
        -max(-C * exp(-0.05), -C * max(1 - low, exp(-0.05))),
        -max(-B * exp(1.5), -B * (1 + high)),
    ]
    by_hand = -sum(clipped) / 4
    loss = sequence_surrogate(numbers(NEW), rows(), clip=clip, correction=UNCORRECTED)
    assert sum(per_answer(loss)).item() / 4 == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(golden, abs=2e-6)


@pytest.mark.parametrize(("clip", "golden"), [((0.2, 0.28), 0.076046), ((1.0, 0.28), 0.111282), ((1.0, 4.0), 0.090791)])
def test_cispo_by_hand_in_both_conventions_of_its_cap(clip, golden):
    low, high = clip
    advantages = [A] * 3 + [B] * 2 + [C] * 4 + [B]
    weights = [min(max(exp(gap), 1 - low), 1 + high) for gap in GAPS]
    by_hand = -sum(w * a * new for w, a, new in zip(weights, advantages, NEW, strict=True)) / 10
    loss = clipped_weight(numbers(NEW), rows(), clip=clip, correction=UNCORRECTED)
    assert loss.sum().item() / 10 == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(golden, abs=2e-6)


def test_cispo_never_cuts_a_gradient_off():
    logprobs = numbers(NEW).requires_grad_()
    clipped_weight(logprobs, rows(), clip=(0.2, 0.28), correction=UNCORRECTED).sum().backward()
    assert (logprobs.grad != 0).all()


def test_dr_grpo_divides_by_trajectories_and_the_constant():
    assert group_centred(np.array([1, 0, 0.5, 0])) == pytest.approx([0.625, -0.375, 0.125, -0.375])
    section = AlgorithmSection(name="dr_grpo", clip=(0.2, 0.28), constant=8, correction=UNCORRECTED)
    (term,) = build(section).terms
    centered = numbers([0.625] * 3 + [-0.375] * 2 + [0.125] * 4 + [-0.375])
    loss = term.loss(numbers(NEW), rows(advantage=centered)).sum().item() / 4
    assert term.denominator == "trajectories"
    plain = clipped_surrogate(numbers(NEW), rows(advantage=centered), clip=(0.2, 0.28), correction=UNCORRECTED)
    assert loss == pytest.approx(plain.sum().item() / (4 * 8))
    assert loss == pytest.approx(-0.001362, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("sequence", [exp(0), exp(0.2), exp(0), exp(1)]),
        ("geometric", [exp(0 / 3), exp(0.2 / 2), exp(0), exp(1)]),
    ],
)
def test_sequence_and_geometric_weights_by_hand(kind, weights):
    """Gaps of trainer and engine: .1 -.1 0 | 0 .2 | .1 -.1 0 0 | 1."""
    assert [old - engine for old, engine in zip(OLD[:3], ENGINE[:3], strict=True)] == pytest.approx([0.1, -0.1, 0])
    untruncated = correction_weight(numbers(NEW), rows(), correction=Correction(kind=kind, cap=100.0))
    assert [float(part[0]) for part in untruncated.split(LENGTHS)] == pytest.approx(weights)
    truncated = correction_weight(numbers(NEW), rows(), correction=Correction(kind=kind, cap=2.0))
    assert float(truncated.max()) == 2.0
    share = truncated_share(numbers(NEW), rows(), correction=Correction(kind=kind, cap=2.0))
    assert share.tolist() == [0.0] * 9 + [1.0]


def test_a_surrogate_with_a_sequence_weight_by_hand():
    advantages = numbers([A] * 3 + [B] * 2 + [C] * 4 + [B])
    loss = clipped_surrogate(
        numbers(NEW), rows(advantage=advantages), clip=(0.2, 0.28), correction=Correction(kind="sequence", cap=2.0)
    )
    assert loss.sum().item() / 10 == pytest.approx(0.375013, abs=2e-6)


def test_reinforce_pp_whitens_returns_over_every_token_of_the_batch():
    values = np.array([1.0] * 3 + [0.0] * 2)
    mean, deviation = 0.6, sqrt((3 * 0.16 + 2 * 0.36) / 4 + 1e-8)
    assert whitened(values) == pytest.approx([(v - mean) / deviation for v in values])
    assert whitened(np.array([3.0])) == pytest.approx([0.0])


def scored_group(name, lengths, values):
    prompt = Prompt(id=name, messages=({"role": "user", "content": "?"},))
    talks = [
        Conversation(
            tokens=np.arange(n + 1),
            trained=np.arange(n + 1) > 0,
            logprobs=np.array([0.0] + [-1.0] * n),
            stop="stop",
            version=0,
        )
        for n in lengths
    ]
    return Group(
        prompt=prompt,
        trajectories=tuple(
            Trajectory(prompt=prompt, visit=0, attempt=i, conversations=(talk,), outcome=Outcome(answer=""))
            for i, talk in enumerate(talks)
        ),
        rewards=tuple(Reward(value=v, outcome=v, parts={}) for v in values),
    )


def test_reinforce_pp_sums_the_penalty_from_each_token_on():
    """One answer of two tokens, reward 1, k1 of each token -1 - (-2) = 1, coefficient 0.1: returns 0.8 and 0.9."""
    section = AlgorithmSection(name="reinforce_pp", kl={"coef": 0.1, "estimator": "k1", "where": "reward"})
    algorithm = build(section)
    group = scored_group("p", [2], [1.0])
    (sample,) = algorithm.advantage([group], {"reference": {("p", 0, 0, 0): np.array([-2.0, -2.0])}})
    assert sample.advantage == pytest.approx(np.array([-0.05, 0.05]) / sqrt(0.005 + 1e-8))
    assert algorithm.scope == "batch"
    assert algorithm.advantage([], {}) == ()
