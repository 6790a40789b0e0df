"""Each guard stops exactly where the recipe says."""

import math

import pytest

from stretto.errors import GuardError, RewardError
from stretto.recipe.schema import Guards
from stretto.rewards.score import TOO_SMALL, Scored
from stretto.runtime import guards
from stretto.types import Group, Outcome, Prompt, Reward, Trajectory

PROMPT = Prompt(id="p7", messages=())


def trajectory(attempt, failure=None):
    return Trajectory(
        prompt=PROMPT, visit=0, attempt=attempt, conversations=(), outcome=Outcome(answer=""), failure=failure
    )


def scored(judged, *failures):
    reward = Reward(value=0.0, outcome=0.0, parts={})
    group = Group(prompt=PROMPT, trajectories=tuple(map(trajectory, range(judged))), rewards=(reward,) * judged)
    failed = tuple(trajectory(judged + index, failure) for index, failure in enumerate(failures))
    return Scored(groups=(group,) if judged else (), failed=failed)


@pytest.mark.parametrize(
    ("share", "judged", "failures", "stops"),
    [
        (0.25, 8, [], False),
        (0.25, 6, ["a", "b"], False),
        (0.25, 5, ["a", "b", "c"], True),
        (0.0, 7, ["a"], True),
        (1.0, 1, ["a"] * 7, False),
        (1.0, 0, ["a"] * 8, True),
        (0.25, 4, ["a", TOO_SMALL, TOO_SMALL, TOO_SMALL], False),
    ],
)
def test_rewards_may_fail_up_to_the_share_of_a_step(share, judged, failures, stops):
    section = Guards(reward_error_share=share)
    if not stops:
        return guards.reward_errors(section, scored(judged, *failures), launched=8)
    with pytest.raises(RewardError) as caught:
        guards.reward_errors(section, scored(judged, *failures), launched=8)
    assert f"{len(failures)} of 8" in str(caught.value)
    assert f"(prompt p7, attempt {judged}):\na\n    fix: correct what failed and resume" in str(caught.value)


@pytest.mark.parametrize(("k3", "stops"), [(0.0, False), (0.05, False), (0.0501, True), (math.nan, True)])
def test_engine_and_trainer_may_disagree_up_to_a_limit(k3, stops):
    if not stops:
        return guards.after_step(Guards(), {"kl/engine_trainer": k3})
    with pytest.raises(GuardError, match="disagree"):
        guards.after_step(Guards(), {"kl/engine_trainer": k3})
    for outside, told in ((0.004, "0.40% of the tokens .* few, and far off"), (0.3, "whole distribution is another")):
        with pytest.raises(GuardError, match=told):
            guards.after_step(Guards(), {"kl/engine_trainer": k3, "engine_trainer/outside": outside})
    guards.after_step(Guards(max_k3=None), {"kl/engine_trainer": k3})


@pytest.mark.parametrize(("entropy", "stops"), [(0.5, False), (0.3, False), (0.29, True), (math.nan, True)])
def test_entropy_may_fall_to_its_floor(entropy, stops):
    guards.after_step(Guards(), {"entropy": entropy})
    if not stops:
        return guards.after_step(Guards(min_entropy=0.3), {"entropy": entropy})
    with pytest.raises(GuardError, match="entropy"):
        guards.after_step(Guards(min_entropy=0.3), {"entropy": entropy})


def test_disk_is_measured_where_a_folder_will_be(tmp_path):
    guards.free_disk(Guards(min_disk_gb=0.0), tmp_path / "not" / "there")
    with pytest.raises(GuardError, match=f"{tmp_path}: .* less than guards.min_disk_gb"):
        guards.free_disk(Guards(min_disk_gb=1e9), tmp_path / "not" / "there")
