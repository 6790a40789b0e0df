"""Credit per turn and per trajectory of many conversations, against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from stretto.algorithms.base import build
from stretto.errors import RecipeError
from stretto.recipe.schema import AlgorithmSection
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Trajectory
from tiny import finished, naive_rows

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "?"},))


def conversation(*turns):
    """A token of context before each (call, tokens)."""
    trained = [flag for _, tokens in turns for flag in (False, *[True] * tokens)]
    return Conversation(
        tokens=np.arange(len(trained)),
        trained=np.array(trained),
        logprobs=np.where(trained, -1.0, 0.0),
        stop="stop",
        version=0,
        turns=turns,
    )


def group(*attempts):
    """One per (reward, turn rewards or none, conversations)."""
    trajectories = tuple(
        Trajectory(
            prompt=PROMPT,
            visit=0,
            attempt=attempt,
            conversations=tuple(talks),
            outcome=Outcome(answer="", turn_rewards=worth),
        )
        for attempt, (_, worth, talks) in enumerate(attempts)
    )
    rewards = tuple(Reward(value=reward, outcome=reward, parts={}) for reward, _, _ in attempts)
    return Group(prompt=PROMPT, trajectories=trajectories, rewards=rewards)


def advantages(group, **section):
    return [sample.advantage.tolist() for sample in build(AlgorithmSection(**section)).advantage([group], {})]


TWO = group(
    (1.0, (0.5, 0.0), [conversation((0, 2), (1, 1))]),
    (0.0, (0.0, 0.0, 1.0), [conversation((0, 1), (1, 2), (2, 1))]),
)
"""Returns by turn: 1.5, 1 and 1, 1, 1."""


def test_a_turn_is_credited_with_what_came_from_then_on_less_the_mean_of_those_who_came_as_far():
    found = advantages(TWO, name="dr_grpo", credit="turn")
    assert found == [[0.25, 0.25, 0.0], [-0.25, 0.0, 0.0, 0.0]]


def test_every_algorithm_compares_turns_in_its_own_way():
    assert advantages(TWO, name="rloo", credit="turn") == [[0.5, 0.5, 0.0], [-0.5, 0.0, 0.0, 0.0]]
    assert advantages(TWO, name="reinforce", credit="turn") == [[1.5, 1.5, 1.0], [1.0, 1.0, 1.0, 1.0]]
    deviation = np.std([1.5, 1.0], ddof=1) + 1e-4
    expected = [[0.25 / deviation] * 2 + [0.0], [-0.25 / deviation, 0.0, 0.0, 0.0]]
    for name in ("grpo", "dapo", "cispo", "gspo"):
        found = advantages(TWO, name=name, credit="turn")
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=1e-12)


def test_the_turns_of_several_conversations_are_told_apart_by_the_call_that_sampled_them():
    one = (1.0, (0.0, 1.0, 2.0), [conversation((0, 1), (2, 2)), conversation((1, 1))])
    other = (0.0, (0.0, 0.0, 0.0), [conversation((0, 1)), conversation((1, 1)), conversation((2, 1))])
    found = advantages(group(one, other), name="dr_grpo", credit="turn")
    assert found == [[2.0, 1.5, 1.5], [2.0], [-2.0], [-2.0], [-1.5]]


def test_without_credit_per_turn_what_turns_were_worth_does_not_count():
    assert advantages(TWO, name="dr_grpo") == [[0.5] * 3, [-0.5] * 4]


def test_an_environment_that_says_nothing_of_turns_cannot_be_credited_by_them():
    silent = group((1.0, None, [conversation((0, 1))]), (0.0, None, [conversation((0, 1))]))
    with pytest.raises(RecipeError, match="turn_rewards"):
        advantages(silent, name="grpo", credit="turn")


@pytest.mark.parametrize(("average", "loss"), [("token", -0.125), ("trajectory", 0.0)])
def test_many_conversations_share_one_verdict_and_weigh_by_tokens_or_alike(average, loss):
    """R = 1 over conversations of 2 and 3 tokens, R = 0 over one of 3: A = 1/2 and -1/2, at a ratio of 1."""
    made = group(
        (1.0, None, [conversation((0, 2)), conversation((1, 3))]),
        (0.0, None, [conversation((0, 3))]),
    )
    algorithm = build(AlgorithmSection(name="multi_conv", average=average))
    samples = algorithm.advantage([made], {})
    assert [sample.advantage.tolist() for sample in samples] == [[0.5] * 2, [0.5] * 3, [-0.5] * 3]
    logprobs = torch.full((8,), -1.0, dtype=torch.float64, requires_grad=True)
    found, gradients = finished(logprobs, {"logprobs": logprobs}, algorithm, samples)
    assert found == pytest.approx(loss)
    weights = [1 / 8] * 8 if average == "token" else [1 / 10] * 5 + [1 / 6] * 3
    signed = [-0.5 * w for w in weights[:5]] + [0.5 * w for w in weights[5:]]
    np.testing.assert_allclose(gradients["logprobs"].numpy(), signed, atol=1e-12)
    assert naive_rows(samples, torch.float64).family_tokens.tolist() == [5, 5, 3]
