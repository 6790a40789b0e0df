"""From scored groups to credited samples."""

from math import exp

import numpy as np
import pytest

from stretto.algorithms.base import build, keep
from stretto.algorithms.catalog import CATALOG
from stretto.recipe.schema import AlgorithmSection, Kl
from stretto.types import Group, Outcome, Prompt, Reward, Trajectory
from tiny import SAMPLING, conversation

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "?"},))


def trajectory(attempt, *talks):
    return Trajectory(prompt=PROMPT, visit=2, attempt=attempt, conversations=talks, outcome=Outcome(answer=""))


def talk(*logprobs):
    return conversation([7, 8, *range(len(logprobs))], list(range(2, 2 + len(logprobs))), logprobs=logprobs)


def group(values, trajectories):
    rewards = tuple(Reward(value=value, outcome=value, parts={}) for value in values)
    return Group(prompt=PROMPT, trajectories=trajectories, rewards=rewards)


PAIR = group([1.0, 0.0], (trajectory(0, talk(-0.5, -1.0), talk(-0.2)), trajectory(1, talk(-0.3, -0.4, -0.6))))
"""Two attempts: the first held two conversations of 2 and 1 tokens, the second one of 3."""

REFERENCE = {
    ("p", 2, 0, 0): np.array([-0.7, -1.0]),
    ("p", 2, 0, 1): np.array([-0.1]),
    ("p", 2, 1, 0): np.array([-0.3, -0.9, -0.6]),
}


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_the_facts_in_the_catalog_are_those_of_the_algorithm(name):
    algorithm, facts = build(AlgorithmSection(name=name)), CATALOG[name]
    assert algorithm.name == facts.name == name
    assert (algorithm.scope, algorithm.min_samples, algorithm.needs) == (facts.scope, facts.min_samples, facts.needs)
    assert facts.drops or algorithm.drop is keep


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_a_kl_coefficient_makes_an_algorithm_need_the_reference(name, where):
    assert "reference" in build(AlgorithmSection(name=name, kl=Kl(coef=0.1, where=where))).needs
    assert (
        "reference" not in build(AlgorithmSection(name=name, kl=Kl(coef=0.0, where=where))).needs - CATALOG[name].needs
    )


def test_every_trained_token_of_every_conversation_gets_its_trajectorys_advantage():
    samples = build(AlgorithmSection(name="rloo")).advantage([PAIR], {})
    assert [sample.key for sample in samples] == [("p", 2, 0, 0), ("p", 2, 0, 1), ("p", 2, 1, 0)]
    assert [sample.advantage.tolist() for sample in samples] == [[1.0, 1.0], [1.0], [-1.0, -1.0, -1.0]]
    assert [sample.leads for sample in samples] == [True, False, True]
    assert all(sample.reference is None and sample.values is None for sample in samples)


def test_groups_are_credited_each_by_its_own_rewards():
    other = group([5.0, 7.0], PAIR.trajectories)
    algorithm = build(AlgorithmSection(name="rloo"))
    both = algorithm.advantage([PAIR, other], {})
    apart = algorithm.advantage([PAIR], {}) + algorithm.advantage([other], {})
    assert [sample.advantage.tolist() for sample in both] == [sample.advantage.tolist() for sample in apart]
    assert both[3].advantage.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize(
    ("estimator", "penalties"),
    [
        ("k1", (0.2 + 0.0 - 0.1, 0.0 + 0.5 + 0.0)),
        ("k2", (0.2**2 / 2 + 0.1**2 / 2, 0.5**2 / 2)),
        ("k3", (exp(-0.2) - 1 + 0.2 + exp(0.1) - 1 - 0.1, exp(-0.5) - 1 + 0.5)),
    ],
)
def test_kl_in_the_reward_is_summed_over_all_conversations_before_the_baseline(estimator, penalties):
    section = AlgorithmSection(name="rloo", kl=Kl(coef=0.5, estimator=estimator, where="reward"))
    samples = build(section).advantage([PAIR], {"reference": REFERENCE})
    difference = (1.0 - 0.5 * penalties[0]) - (0.0 - 0.5 * penalties[1])
    assert samples[0].advantage.tolist() == pytest.approx([difference] * 2, rel=1e-12)
    assert samples[1].advantage.tolist() == pytest.approx([difference], rel=1e-12)
    assert samples[2].advantage.tolist() == pytest.approx([-difference] * 3, rel=1e-12)


def test_kl_in_the_loss_leaves_the_rewards_alone_and_hands_the_reference_on():
    section = AlgorithmSection(name="rloo", kl=Kl(coef=0.5, where="loss"))
    samples = build(section).advantage([PAIR], {"reference": REFERENCE})
    assert samples[0].advantage.tolist() == [1.0, 1.0]
    for sample in samples:
        assert sample.reference is REFERENCE[sample.key]


def test_a_conversation_without_trained_tokens_has_an_empty_stream():
    quiet = conversation([1, 2, 3], [])
    one = group([1.0, 0.0], (trajectory(0, talk(-0.5)), trajectory(1, quiet)))
    samples = build(AlgorithmSection(name="grpo")).advantage([one], {})
    assert samples[1].advantage.shape == (0,)
