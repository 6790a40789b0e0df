"""Distillation: the gradient of both forms against autograd on the exact KL over a small vocabulary."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stretto.algorithms.base import build
from stretto.models.candidates import candidate_logprobs, likeliest
from stretto.models.logprob_head import Head
from stretto.recipe.schema import AlgorithmSection, Correction
from stretto.training.teacher import Teacher
from stretto.types import trajectory_key
from tiny import VOCABULARY, distance, random_groups, scratch_policy, step

STUDENT, MASTER = scratch_policy(), scratch_policy()
with torch.no_grad():
    for weight in MASTER.network.parameters():
        weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4), dtype=weight.dtype))

TEMPERATURE = 0.7
UNCORRECTED = Correction(kind="none")


def distributions(policy, talk):
    """(N, V) log-probabilities before every trained token, as plain transformers has them."""
    ours = policy.network.config._attn_implementation
    policy.network.set_attn_implementation("sdpa")
    logits = policy.network(input_ids=torch.as_tensor(talk.tokens)[None], use_cache=False).logits[0]
    policy.network.set_attn_implementation(ours)
    return (logits[torch.as_tensor(np.flatnonzero(talk.trained)) - 1] / TEMPERATURE).log_softmax(-1)


def exact(talks, ids=None):
    """The mean reverse KL over all trained tokens, of all tokens or of `ids` and the rest as one, and its gradient."""
    kls = []
    for index, talk in enumerate(talks):
        p = distributions(STUDENT, talk)
        with torch.no_grad():
            q = distributions(MASTER, talk)
        if ids is not None:
            p, q = (merged(each, torch.as_tensor(ids[index]).long()) for each in (p, q))
        kls.append((p.exp() * (p - q)).sum(-1))
    loss, names = torch.cat(kls).mean(), STUDENT.trained()
    return float(loss.detach()), dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def merged(logprobs, ids):
    """Of some tokens, and of the sum of all others."""
    chosen = logprobs.gather(-1, ids)
    rest = torch.ones_like(logprobs, dtype=torch.bool).scatter(-1, ids, False)
    others = (logprobs.exp() * rest).sum(-1, keepdim=True).log()
    return torch.cat([chosen, others], -1)


def taught(top_k, groups, weight=0.0):
    """The algorithm and its samples, with what the teacher says of them."""
    section = AlgorithmSection(name="distill", top_k=top_k, reward_weight=weight, correction=UNCORRECTED)
    algorithm = build(section)
    keyed = {
        (*trajectory_key(trajectory), index): talk
        for group in groups
        for trajectory in group.trajectories
        for index, talk in enumerate(trajectory.conversations)
    }
    teacher = Teacher(MASTER, temperature=TEMPERATURE, token_budget=90, candidates=top_k, vocabulary=VOCABULARY)
    told = dict(zip(keyed, teacher.score(list(keyed.values())), strict=True))
    if top_k is None:
        streams = {"reference": told}
    else:
        streams = {
            "reference": {k: n[:, 0] for k, n in told.items()},
            "candidates": {k: n[:, 1:] for k, n in told.items()},
        }
    return algorithm, algorithm.advantage(groups, streams), told


@pytest.mark.parametrize("top_k", [VOCABULARY, 10_000, 3, 1])
@pytest.mark.parametrize("budget", [10_000, 60])
def test_the_exact_forms_gradient_is_autograds_on_the_kl(top_k, budget):
    algorithm, samples, told = taught(top_k, random_groups(3))
    whole = top_k >= VOCABULARY
    ids = None if whole else [told[sample.key][:, -top_k:] for sample in samples]
    loss, expected = exact([sample.conversation for sample in samples], ids)
    found = step(STUDENT, algorithm, samples, temperature=TEMPERATURE, token_budget=budget)
    assert distance(expected, found.gradients) < 1e-9
    assert found.metrics["loss"] == pytest.approx(loss, rel=1e-10) == found.metrics["distill/kl"]


def test_a_teacher_names_its_likeliest_tokens_and_what_they_leave():
    _, samples, told = taught(4, random_groups(5))
    for sample in samples:
        numbers, q = told[sample.key], distributions(MASTER, sample.conversation).detach().numpy()
        best = np.argsort(-q, axis=-1)[:, :4]
        assert (np.sort(numbers[:, -4:]) == np.sort(best)).all()
        np.testing.assert_allclose(numbers[:, 1:5], np.take_along_axis(q, numbers[:, -4:].astype(int), -1), rtol=1e-9)
        np.testing.assert_allclose(np.exp(numbers[:, 1:6]).sum(-1), 1, rtol=1e-12)
        targets = sample.conversation.tokens[sample.conversation.trained]
        np.testing.assert_allclose(numbers[:, 0], q[np.arange(len(q)), targets], rtol=1e-9)
        assert sample.reference.tolist() == numbers[:, 0].tolist()


def test_the_policy_gradient_form_has_the_kls_gradient_in_expectation():
    """One state, every token sampled as often as it is likely: the mean of the gradients is that of the exact KL."""
    (group, *_) = random_groups(2, groups=1, samples=1)
    talk = group.trajectories[0].conversations[0]
    at = int(np.flatnonzero(talk.trained)[0])
    p = distributions(STUDENT, talk)[0].detach()
    total, names = None, STUDENT.trained()
    for token in range(VOCABULARY):
        trained = np.zeros(at + 1, dtype=bool)
        trained[at] = True
        said = replace(
            talk, tokens=np.append(talk.tokens[:at], token), trained=trained,
            logprobs=np.append(np.zeros(at), float(p[token])), turns=(),
        )  # fmt: skip
        alone = replace(group, trajectories=(replace(group.trajectories[0], conversations=(said,)),))
        algorithm, samples, _ = taught(None, (alone,))
        gradients = step(STUDENT, algorithm, samples, temperature=TEMPERATURE).gradients
        share = {name: float(p[token].exp()) * gradients[name] for name in names}
        total = share if total is None else {name: total[name] + share[name] for name in names}
    first = replace(
        talk, tokens=talk.tokens[: at + 1], trained=np.arange(at + 1) == at, logprobs=talk.logprobs[: at + 1]
    )
    _, expected = exact([first])
    assert distance(expected, total) < 1e-9


def test_rewards_are_added_where_they_have_a_weight():
    groups = random_groups(6)
    _, alone, _ = taught(None, groups)
    algorithm, mixed, _ = taught(None, groups, weight=0.5)
    assert (algorithm.scope, algorithm.min_samples) == ("group", 2)
    centered = {
        trajectory_key(trajectory): reward.value - np.mean([r.value for r in group.rewards])
        for group in groups
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
    }
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_allclose(other.advantage, one.advantage + 0.5 * centered[one.key[:3]], rtol=1e-12)
    both = build(AlgorithmSection(name="distill", top_k=2, reward_weight=0.5))
    assert [term.name for term in both.terms] == ["policy", "distill"]


def test_candidates_in_single_precision_have_a_rest_that_is_no_rounding():
    """What a teacher leaves over is far below the rounding of what it names."""
    hidden = torch.tensor([[1.0, 0.0]])
    head = Head(weight=torch.tensor([[40.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))
    numbers, ids = likeliest(hidden, head, count=1, temperature=1.0, vocabulary=3)
    assert ids.tolist() == [[0]]
    assert numbers[0, 1].item() == pytest.approx(np.log(np.exp(-40) + np.exp(-39)), rel=1e-6)
    again = candidate_logprobs(hidden, head, ids, temperature=1.0)
    assert torch.equal(again, numbers)
