"""What metrics.jsonl counts over all trajectories of a step, the failed ones included."""

from dataclasses import replace

import numpy as np
import pytest

from stretto.algorithms.base import build
from stretto.algorithms.catalog import CATALOG
from stretto.recipe.load import parse_recipe
from stretto.recipe.resolve import resolve
from stretto.recipe.schema import AlgorithmSection
from stretto.recipe.schema import BatchSection as BatchSection
from stretto.rewards.score import Scored
from stretto.runtime.batch import StepBatch
from stretto.runtime.metrics import step_metrics
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Trajectory

PROMPT = Prompt(id="p", messages=())


def trajectory(attempt, rewritten, failure=None):
    talk = Conversation(
        tokens=np.array([1, 2, 3]),
        trained=np.array([False, True, True]),
        logprobs=np.zeros(3),
        stop="stop",
        version=0,
    )
    return Trajectory(
        prompt=PROMPT,
        visit=0,
        attempt=attempt,
        conversations=(talk,) * (1 + rewritten),
        outcome=Outcome(answer=""),
        failure=failure,
        rewritten=rewritten,
    )


def test_rewritten_conversations_are_summed_over_judged_and_failed_trajectories():
    rewards = tuple(Reward(value=value, outcome=value, parts={"accuracy": value}) for value in (0.0, 1.0))
    group = Group(prompt=PROMPT, trajectories=(trajectory(0, 0), trajectory(1, 2)), rewards=rewards)
    scored = Scored(groups=(group,), failed=(trajectory(2, 3, "environment: broke"),))
    batch = StepBatch(scored=scored, accepted=(group,), samples=(), launched=2, rounds=1)
    metrics = step_metrics(batch, BatchSection(prompts=2, samples=3), build(AlgorithmSection()), contrasts=True)
    assert metrics["conversations/rewritten"] == 5
    assert metrics["tokens/generated"] == 2 * (1 + 3 + 4)
    assert (metrics["groups/infra"], metrics["trajectories/failed"], metrics["reward/mean"]) == (1, 1, 0.5)


def test_a_trajectory_that_found_no_room_counts_as_truncated():
    rewards = tuple(Reward(value=value, outcome=value, parts={"accuracy": value}) for value in (0.0, 1.0))
    group = Group(prompt=PROMPT, trajectories=(trajectory(0, 0), replace(trajectory(1, 0), full=3)), rewards=rewards)
    batch = StepBatch(scored=Scored(groups=(group,), failed=()), accepted=(group,), samples=(), launched=1, rounds=1)
    metrics = step_metrics(batch, BatchSection(prompts=1, samples=2), build(AlgorithmSection()), contrasts=True)
    assert (metrics["length/truncated"], metrics["conversations/full"], metrics["trajectories/failed"]) == (0.5, 3, 0)


@pytest.mark.parametrize("name", [name for name, facts in CATALOG.items() if facts.rows == "prompts"])
def test_equal_rewards_make_a_group_dead_only_where_nothing_but_their_differences_teaches(name):
    facts, compared = CATALOG[name], {"rloo", "grpo", "dr_grpo", "multi_conv", "dapo", "gspo", "cispo"}
    assert facts.learns_by_contrast == (name in compared)
    rewards = tuple(Reward(value=1.0, outcome=1.0, parts={"accuracy": 1.0}) for _ in range(2))
    group = Group(prompt=PROMPT, trajectories=(trajectory(0, 0), trajectory(1, 0)), rewards=rewards)
    batch = StepBatch(scored=Scored(groups=(group,), failed=()), accepted=(group,), samples=(), launched=1, rounds=1)
    section = BatchSection(prompts=1, samples=2)
    algorithm = build(resolve(parse_recipe({"algorithm": {"name": name}})).algorithm)
    metrics = step_metrics(batch, section, algorithm, contrasts=facts.learns_by_contrast)
    assert metrics["groups/dead"] == (name in compared)
