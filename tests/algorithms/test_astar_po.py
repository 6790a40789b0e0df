"""A*PO by hand: V*, the regression's loss, its goals over several conversations, and the course's variant."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from four_answers import LENGTHS, NEW, REFERENCE, UNCORRECTED, numbers, rows
from stretto.algorithms.astar_po import regression_targets, squared_error
from stretto.algorithms.astar_po_course import weighted_likelihood
from stretto.algorithms.base import build
from stretto.algorithms.optimal import optimal_value
from stretto.recipe.schema import AlgorithmSection, Kl, Vstar
from stretto.training.loss_counters import LossCounters
from stretto.training.packing import pack
from stretto.types import Group, Prompt, Reward, Trajectory
from tiny import conversation

PROMPT = Prompt(id="p", messages=())


def of_eight(right):
    return [1.0] * right + [0.0] * (8 - right)


@pytest.mark.parametrize(
    ("right", "beta1", "by_hand"),
    [
        (0, 0.5, 0.0),
        (1, 0.5, 0.5 * math.log((math.exp(2) + 7) / 8)),
        (4, 0.5, 0.5 * math.log((math.exp(2) + 1) / 2)),
        (8, 0.5, 1.0),
        (1, 0.1, 0.1 * math.log((math.exp(10) + 7) / 8)),
        (1, 10.0, 10.0 * math.log((math.exp(0.1) + 7) / 8)),
    ],
)
def test_vstar_is_a_soft_maximum(right, beta1, by_hand):
    assert optimal_value(of_eight(right), beta1) == pytest.approx(by_hand, abs=1e-12)


def test_the_published_values_come_out():
    found = [optimal_value(of_eight(right), 0.5) for right in (0, 1, 4, 8)]
    assert found == pytest.approx([0, 0.293513, 0.716890, 1], abs=1e-6)
    assert [optimal_value(of_eight(1), beta) for beta in (0.1, 10)] == pytest.approx([0.792088, 0.130607], abs=1e-6)


def test_vstar_goes_from_the_largest_reward_to_the_mean():
    rewards = [3.0, -1.0, 0.25]
    assert optimal_value(rewards, 0.0) == 3.0
    assert optimal_value(rewards, 1e-3) == pytest.approx(3.0, abs=2e-3)
    assert optimal_value(rewards, 1e6) == pytest.approx(0.75, abs=1e-5)
    assert optimal_value([1e5, 0.0], 0.5) == pytest.approx(1e5 - 0.5 * math.log(2))  # nothing overflows
    with pytest.raises(ValueError, match="at least one"):
        optimal_value([], 0.5)


def test_the_loss_is_the_squared_error_of_the_sum_over_the_answer():
    """D of the four answers is 0.35, -0.6, -0.1, 0.4; V* is 0.293513, that of one right answer in eight."""
    vstar, rewards = optimal_value(of_eight(1), 0.5), [1.0, 0.0, 0.5, 0.0]
    advantage = numbers([r - vstar for r, n in zip(rewards, LENGTHS, strict=True) for _ in range(n)])
    found = squared_error(numbers(NEW), rows(advantage=advantage), beta2=1e-3)
    by_hand = [(1e-3 * d + vstar - r) ** 2 for d, r in zip([0.35, -0.6, -0.1, 0.4], rewards, strict=True)]
    assert found.tolist() == pytest.approx(by_hand, abs=1e-12)
    assert float(found.mean()) == pytest.approx(0.178373, abs=1e-6)


def test_the_loss_is_least_where_the_policy_is_the_optimal_one():
    """lp - lp_ref = (r - V*) / beta2, spread over the answer, solves every equation at once."""
    goal = numbers([0.3] * 3 + [-0.2] * 2 + [0.1] * 4 + [-0.4])
    lengths = numbers([float(n) for n in LENGTHS for _ in range(n)])
    best = (numbers(REFERENCE) + goal / 0.01 / lengths).requires_grad_()
    squared_error(best, rows(advantage=goal), beta2=0.01).sum().backward()
    assert best.grad.abs().max() < 1e-12


def talks(*lengths):
    made = [conversation([7, *range(n)], list(range(1, 1 + n)), logprobs=np.linspace(-1, -0.2, n)) for n in lengths]
    return Trajectory(prompt=PROMPT, visit=0, attempt=0, conversations=tuple(made), outcome=None)


def streams_of(trajectory, vstar):
    keyed = {("p", 0, 0, index): talk for index, talk in enumerate(trajectory.conversations)}
    reference = {key: np.linspace(-2, -0.5, int(talk.trained.sum())) for key, talk in keyed.items()}
    return {"reference": reference, "vstar": {("p", 0, 0, 0): np.array([vstar])}}


def test_conversations_of_one_trajectory_share_one_equation():
    """The gradient of the parts, each with the others as a constant, is that of the square of the whole sum."""
    beta2, vstar, reward, trajectory = 0.05, 0.4, 1.0, talks(3, 2, 4)
    streams = streams_of(trajectory, vstar)
    group = Group(prompt=PROMPT, trajectories=(trajectory,), rewards=(Reward(value=reward, outcome=1.0, parts={}),))
    samples = regression_targets([group], streams, beta2=beta2)
    lengths = [3, 2, 4]
    logprobs = numbers(np.concatenate([talk.logprobs[talk.trained] for talk in trajectory.conversations]))
    reference = numbers(np.concatenate([streams["reference"][sample.key] for sample in samples]))
    parts, whole = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    given = rows(
        advantage=numbers(np.concatenate([sample.advantage for sample in samples])),
        engine=logprobs,
        conversation=torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)),
        lengths=torch.tensor(lengths),
        old=None,
        reference=reference,
    )
    squared_error(parts, given, beta2=beta2).sum().backward()
    ((beta2 * (whole - reference).sum() + vstar - reward) ** 2).backward()
    assert torch.allclose(parts.grad, whole.grad, atol=1e-12)
    assert whole.grad.abs().min() > 1e-3


@pytest.mark.parametrize(
    "shapes",
    [[(3,)], [(3, 2, 4)], [(3,), (2, 4)], [(1, 1, 1, 1), (5,), (2, 2)], [(2, 0, 3)]],
    ids=["one", "three of one", "one and two", "four, one and two", "one in which nothing was said"],
)
def test_a_trajectory_is_one_equation_in_the_reported_numbers_too(shapes):
    """Loss, residual and gap by hand, on policy; D of a trajectory is that of all of its conversations."""
    beta2, vstar = 0.05, 0.4
    algorithm = build(AlgorithmSection(name="astar_po", vstar=Vstar(beta2=beta2)))
    samples, errors, residuals, gaps = [], [], [], []
    for attempt, lengths in enumerate(shapes):
        trajectory, reward = replace(talks(*lengths), attempt=attempt), 1.0 - 0.3 * attempt
        keys = [("p", 0, attempt, index) for index in range(len(lengths))]
        streams = {"reference": {key: np.linspace(-2, -0.5, n) for key, n in zip(keys, lengths, strict=True)}}
        streams["vstar"] = {keys[0]: np.array([vstar])}
        verdict = Reward(value=reward, outcome=reward, parts={})
        samples += algorithm.advantage([Group(prompt=PROMPT, trajectories=(trajectory,), rewards=(verdict,))], streams)
        spoken = [talk for talk in trajectory.conversations if talk.trained.any()]
        d = sum(float((t.logprobs[t.trained] - np.linspace(-2, -0.5, int(t.trained.sum()))).sum()) for t in spoken)
        errors.append((beta2 * d - (reward - vstar)) ** 2)
        residuals += [beta2 * d] * len(spoken)
        gaps += [reward - vstar] * len(spoken)
    useful = [sample for sample in samples if sample.conversation.trained.any()]
    batch = pack(useful, device=torch.device("cpu"), dtype=torch.float64)
    logprobs = numbers(np.concatenate([s.conversation.logprobs[s.conversation.trained] for s in useful]))
    (term,) = algorithm.terms
    meter = LossCounters(algorithm.terms)
    meter.count(batch, logprobs, torch.zeros(1), {"trajectories": term.loss(logprobs, batch.rows).sum()})
    found = meter.metrics()
    assert found["loss"] == pytest.approx(sum(errors) / len(shapes), rel=1e-12)
    assert found["astar/residual"] == pytest.approx(np.mean(residuals), rel=1e-12)
    assert found["astar/gap"] == pytest.approx(np.mean(gaps), rel=1e-12)


def test_residual_and_gap_are_means_over_conversations():
    algorithm = build(AlgorithmSection(name="astar_po", vstar=Vstar(beta2=0.5)))
    (term,) = algorithm.terms
    given = rows(advantage=numbers([0.6] * 3 + [-0.2] * 2 + [0.1] * 4 + [-0.1]))
    sums = {name: float(watch.numbers(numbers(NEW), given).sum()) for name, watch in term.watch.items()}
    assert sums == pytest.approx({"astar/residual": 0.5 * (0.35 - 0.6 - 0.1 + 0.4), "astar/gap": 0.4})
    meter = LossCounters(algorithm.terms)
    meter.sums.update({"conversations": 4, "tokens": 10, **sums})
    assert meter.metrics()["astar/gap"] == pytest.approx(0.1)


def test_the_course_never_reinforces_a_prompt_that_the_reference_solved():
    """V* is 1, so a right answer has weight 0 and a wrong one is pushed away, whatever else it says."""
    algorithm = build(AlgorithmSection(name="astar_po_course"))
    trajectory = talks(2)
    for reward, advantage in ((1.0, 0.0), (0.0, -1.0)):
        group = Group(prompt=PROMPT, trajectories=(trajectory,), rewards=(Reward(value=reward, outcome=0, parts={}),))
        (sample,) = algorithm.advantage([group], streams_of(trajectory, optimal_value(of_eight(1), 0.0)))
        assert sample.advantage.tolist() == [advantage] * 2


def test_the_course_weighs_log_likelihoods():
    loss = weighted_likelihood(numbers(NEW), rows(), clip=(0.2, 0.2), correction=UNCORRECTED)
    assert loss.tolist() == pytest.approx((-rows().advantage * numbers(NEW)).tolist())


def test_the_course_takes_its_kl_and_the_paper_needs_none():
    assert [t.name for t in build(AlgorithmSection(name="astar_po_course", kl=Kl(coef=0.1))).terms] == ["policy", "kl"]
    assert [t.name for t in build(AlgorithmSection(name="astar_po")).terms] == ["regression"]
