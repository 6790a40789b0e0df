"""What KL "in the reward" and "in the loss" do in expectation, by enumerating every answer of a tiny policy.

The policy has a table of logits for each context, so that the probability of every answer, the exact KL to the
reference and its gradient are sums that can be written down. The gradients compared are those of the real objects: the
algorithm's `advantage` and its terms, on a sample of every answer weighted by its probability.
"""

import itertools

import numpy as np
import pytest
import torch

from stretto.algorithms.base import TokenStreams, build
from stretto.recipe.schema import AlgorithmSection, Correction, Kl
from stretto.types import Conversation, Group, Prompt, Reward, Trajectory

LETTERS, LENGTH, COEF = 3, 2, 0.7
PROMPT = Prompt(id="p", messages=())
ANSWERS = list(itertools.product(range(LETTERS), repeat=LENGTH))


def logits(seed):
    """A row for the empty context, then one for each first letter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + LETTERS, LETTERS, generator=generator, dtype=torch.float64)


def logprobs_of(table, answer):
    """Of each of the answer's letters, the second after the first."""
    rows = table.log_softmax(-1)
    return torch.stack([rows[0, answer[0]], rows[1 + answer[0], answer[1]]])


def gradient_of_kl(table, reference):
    """Of KL(policy || reference) over whole answers, written down as the sum that it is."""
    table = table.clone().requires_grad_()
    kl = sum(
        logprobs_of(table, answer).sum().exp() * (logprobs_of(table, answer) - logprobs_of(reference, answer)).sum()
        for answer in ANSWERS
    )
    return torch.autograd.grad(kl, table)[0]


def expected_gradient(table, reference, *, reward, name="reinforce", **kl):
    """Of the whole loss, with the reward that a function gives to each answer."""
    algorithm = build(AlgorithmSection(name=name, kl=Kl(coef=COEF, **kl), correction=Correction(kind="none")))
    table = table.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for answer in ANSWERS:
        logprobs, wanted = logprobs_of(table, answer), logprobs_of(reference, answer)
        talk = Conversation(
            tokens=np.array([0, *answer]),
            trained=np.array([False] + [True] * LENGTH),
            logprobs=np.array([0.0, *logprobs.tolist()]),
            stop="stop",
            version=0,
        )
        made = Trajectory(prompt=PROMPT, visit=0, attempt=0, conversations=(talk,), outcome=None)
        value = reward(answer)
        group = Group(prompt=PROMPT, trajectories=(made,), rewards=(Reward(value=value, outcome=value, parts={}),))
        (sample,) = algorithm.advantage([group], {"reference": {("p", 0, 0, 0): np.array(wanted.tolist())}})
        rows = TokenStreams(
            advantage=torch.tensor(sample.advantage, dtype=torch.float64),
            engine=logprobs.detach(),
            conversation=torch.zeros(LENGTH, dtype=torch.long),
            lengths=torch.tensor([LENGTH]),
            reference=wanted,
        )
        loss = sum(term.loss(logprobs, rows).sum() for term in algorithm.terms)
        total = total + logprobs.sum().exp().detach() * loss
    return torch.autograd.grad(total, table)[0]


def nothing(answer):
    return 0.0


def first_letter(answer):
    return float(answer[0] == 0)


PAIRS = [(logits(seed), logits(seed + 100)) for seed in range(4)]


def off(found, exact):
    """How far a gradient is from another, relative to that."""
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(("policy", "reference"), PAIRS)
@pytest.mark.parametrize("estimator", ["auto", "k1"])
def test_in_the_reward_k1_pulls_exactly_to_the_reference(estimator, policy, reference):
    found = expected_gradient(policy, reference, reward=nothing, estimator=estimator, where="reward")
    assert off(found, COEF * gradient_of_kl(policy, reference)) < 1e-14


@pytest.mark.parametrize(("policy", "reference"), PAIRS)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_in_the_reward_k2_and_k3_do_not(estimator, policy, reference):
    found = expected_gradient(policy, reference, reward=nothing, estimator=estimator, where="reward")
    assert off(found, COEF * gradient_of_kl(policy, reference)) > 0.1


def test_in_the_reward_k2_moves_the_very_reference_away_and_k1_leaves_it():
    """Where the policy is likelier and where it is less likely than the reference, k2 punishes both alike."""
    reference = logits(5)
    policy = reference.clone()
    policy[0] += torch.tensor([0.0, 0.0, -1.5], dtype=torch.float64)  # the last letter has become too rare
    for estimator, pulls_back in (("k1", True), ("k2", False)):
        found = expected_gradient(policy, reference, reward=nothing, estimator=estimator, where="reward")
        assert (found[0, 2] < 0) == pulls_back, "a step against the gradient makes the rare letter likelier again"


@pytest.mark.parametrize(("policy", "reference"), PAIRS)
def test_in_the_reward_k3_is_the_kl_less_the_kl_the_other_way_round_per_choice(policy, reference):
    """For answers of one token: the two cancel near the reference, where the pull should begin."""
    table = policy.clone().requires_grad_()
    lp, ref = table.log_softmax(-1)[0], reference.log_softmax(-1)[0]
    one_way, other_way = (lp.exp() * (lp - ref)).sum(), (ref.exp() * (ref - lp)).sum()
    weighted = (lp.exp().detach() * ((ref - lp).detach().expm1() - (ref - lp).detach()) * lp).sum()
    (found,) = torch.autograd.grad(weighted, table, retain_graph=True)
    assert off(found, torch.autograd.grad(one_way - other_way, table)[0]) < 1e-13


def test_a_reward_beside_it_adds_its_own_gradient_and_nothing_else():
    policy, reference = PAIRS[0]
    both = expected_gradient(policy, reference, reward=first_letter, estimator="auto", where="reward")
    table = policy.clone().requires_grad_()
    chance = sum(logprobs_of(table, answer).sum().exp() * first_letter(answer) for answer in ANSWERS)
    (of_reward,) = torch.autograd.grad(-chance, table)
    assert off(both, of_reward + COEF * gradient_of_kl(policy, reference)) < 1e-14


@pytest.mark.parametrize(("policy", "reference"), PAIRS)
@pytest.mark.parametrize("estimator", ["auto", "k2"])
def test_in_the_loss_k2_has_the_gradient_of_each_tokens_own_kl(estimator, policy, reference):
    """What a later token's KL says of an earlier choice is not in it: that is in the reward alone."""
    table = policy.clone().requires_grad_()
    rows, wanted = table.log_softmax(-1), reference.log_softmax(-1)
    each = (rows.exp() * (rows - wanted)).sum(-1)
    reached = torch.cat([torch.ones(1, dtype=torch.float64), rows[0].exp().detach()])
    (exact,) = torch.autograd.grad(COEF * (reached * each).sum(), table)
    found = expected_gradient(policy, reference, reward=nothing, estimator=estimator, where="loss")
    assert off(found, exact) < 1e-14


@pytest.mark.parametrize(("policy", "reference"), PAIRS[:2])
def test_in_the_loss_k1_does_not_pull_at_all(policy, reference):
    found = expected_gradient(policy, reference, reward=nothing, estimator="k1", where="loss")
    assert float(found.norm()) < 1e-14
