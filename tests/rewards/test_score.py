"""From trajectories to groups: weights, failures that never become 0, retries, and groups that got too small."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.errors import DeadlineError, RecipeError, VerdictError
from stretto.recipe.schema import RewardPart
from stretto.rewards import answer
from stretto.rewards.combine import Rewards, full_marks
from stretto.rewards.parts import problems
from stretto.rewards.score import TOO_SMALL, Scored, score
from stretto.sandbox.pool import Pool
from stretto.types import Conversation, Outcome, Prompt, Reward, Trajectory

USER = """
import math, os, re, time

def length(answer, prompt, signals): return len(answer)
def echo(answer, prompt, signals):
    assert prompt == {"id": "p", "messages": [{"role": "user", "content": "?"}], "reference": "7", "tags": {"a": [1]}}
    return signals["tokens"]
def truth(answer, prompt, signals): return answer == prompt["reference"]
def fragile(answer, prompt, signals):
    if answer == "bad": raise ValueError("no verdict on " + answer)
    return 1.0
def counted(answer, prompt, signals):
    with open(prompt["tags"]["log"], "a") as log: log.write("x")
    raise KeyError("again")
def dies_once(answer, prompt, signals):
    log = prompt["tags"]["log"]
    if not os.path.exists(log):
        open(log, "w").close()
        os._exit(9)
    return 0.75
def hangs(answer, prompt, signals):
    with open(prompt["tags"]["log"], "a") as log: log.write("x")
    while True: pass
def applies(answer, prompt, signals): return None if answer == "skip" else 0.25
def share(answers, prompt, signals):
    assert prompt["id"] in ("p", "q") and len(signals) == len(answers)
    if "bad" in answers: raise ValueError("no verdict on this group")
    if "few" in answers: return [1.0]
    return [None if answer == "skip" else answers.count(answer) / len(answers) for answer in answers]
def told(answers, prompt, signals): return [each["outcome"] for each in signals]
share_again = share
def gives(answer, prompt, signals):
    return {"none": None, "text": "1", "nan": math.nan, "inf": math.inf, "huge": 10**400, "list": [1]}[answer]
"""


@pytest.fixture
def user(tmp_path: Path) -> str:
    (tmp_path / "user_rewards.py").write_text(USER)
    (tmp_path / "statistics.py").write_text("def mean(answer, prompt, signals): return 1\n")
    (tmp_path / "imported.py").write_text(
        "from builtins import exec as run\nfrom os import system\nfrom yaml import safe_load\n"
    )
    (tmp_path / "compiled.abi3.so").write_bytes(b"")
    for folder, file in (("package", "inside.py"), ("bare", "module.py")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("def f(answer, prompt, signals): return 1\n")
    (tmp_path / "package" / "__init__.py").write_text("")
    return str(tmp_path)


def trajectory(answer: str | None, *, id: str = "p", visit: int = 0, attempt: int = 0, **rest: Any) -> Trajectory:
    prompt = Prompt(
        id=id,
        messages=({"role": "user", "content": "?"},),
        reference=rest.get("reference", "7"),
        tags=rest.get("tags", {}),
    )
    outcome = None if answer is None else Outcome(answer=answer, signals={"tokens": 3})
    return Trajectory(
        prompt=prompt,
        visit=visit,
        attempt=attempt,
        conversations=(),
        outcome=outcome,
        failure=rest.get("failure"),
    )


def judge(trajectory: Trajectory, *parts: RewardPart, paths: tuple[str, ...] = ()) -> Reward:
    async def main() -> Reward:
        async with Pool(paths=paths) as pool:
            rewards = Rewards(parts, pool)
            return rewards.weigh(await rewards.judge(trajectory))

    return asyncio.run(main())


def scored(trajectories: list[Trajectory], *parts: RewardPart, paths: tuple[str, ...] = (), least: int = 1) -> Scored:
    async def main() -> Scored:
        async with Pool(paths=paths) as pool:
            return await score(trajectories, Rewards(parts or (RewardPart(),), pool), min_samples=least)

    return asyncio.run(main())


def function(called: str, **rest: Any) -> RewardPart:
    return RewardPart(kind=f"user_rewards:{called}", **{"deadline": 20.0, **rest})


def test_the_value_is_the_weighted_sum_and_the_outcome_the_share_of_full_marks(user: str) -> None:
    parts = (
        RewardPart(name="right", weight=0.1),
        RewardPart(name="tidy", kind="exact", weight=0.7),
        RewardPart(name="form", kind="regex", pattern=r"(\d+)", compare="numeric", weight=0.2, deadline=20.0),
        function("length", name="long", weight=-0.5),
        function("truth", name="seen", weight=0.0),
    )
    full = judge(trajectory("7"), *parts, paths=(user,))
    assert full.parts == {"right": 1.0, "tidy": 1.0, "form": 1.0, "long": 1.0, "seen": 1.0}
    assert full.value == pytest.approx(0.5)
    assert full.outcome == 1.0
    half = judge(trajectory("it is 7"), *parts, paths=(user,))
    assert half.parts == {"right": 1.0, "tidy": 0.0, "form": 1.0, "long": 7.0, "seen": 0.0}
    assert half.value == pytest.approx(0.3 - 3.5)
    assert half.outcome == pytest.approx(0.3)


def test_without_positive_weights_the_outcome_is_the_plain_mean() -> None:
    assert full_marks({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": -1.0}) == 0.5


def test_a_users_function_gets_answer_prompt_and_signals(user: str) -> None:
    assert judge(trajectory("7", tags={"a": [1]}), function("echo"), paths=(user,)).value == 3.0


def test_groups_stand_in_launch_order_and_attempts_in_order() -> None:
    launched = [
        trajectory("7", id="b", attempt=1),
        trajectory("8", id="a", attempt=0),
        trajectory("8", id="b", attempt=0),
        trajectory("7", id="b", attempt=0, visit=1),
        trajectory("7", id="a", attempt=1),
        trajectory("7", id="b", attempt=1, visit=1),
    ]
    result = scored(launched, least=2)
    shape = [(group.prompt.id, [each.attempt for each in group.trajectories]) for group in result.groups]
    assert shape == [("b", [0, 1]), ("a", [0, 1]), ("b", [0, 1])]
    assert [[reward.value for reward in group.rewards] for group in result.groups] == [[0, 1], [0, 1], [1, 1]]
    assert [group.trajectories[0].visit for group in result.groups] == [0, 0, 1]
    assert result.failed == ()


def test_a_reward_that_raises_marks_its_trajectory_and_no_other(user: str) -> None:
    answers = ["good", "bad", "fine"]
    launched = [trajectory(answer, attempt=attempt) for attempt, answer in enumerate(answers)]
    result = scored(launched, function("fragile", name="accuracy"), paths=(user,), least=2)
    assert [each.attempt for each in result.groups[0].trajectories] == [0, 2]
    assert len(result.failed) == 1
    failure = result.failed[0].failure
    assert failure is not None
    assert failure.startswith("reward accuracy: ValueError: no verdict on bad (in user_rewards:fragile)")
    assert "user_rewards.py" in failure


def test_a_task_of_arc_without_a_test_pair_has_no_verdict() -> None:
    grid = [[[1]], [[1]]]
    launched = [trajectory("```\n```", tags={"family": "a", "train": [grid], "test": test}) for test in ([], [grid])]
    result = scored(launched, RewardPart(name="grids", kind="arc", pairs="test", deadline=20.0))
    assert [each.failure for each in result.failed] == [
        "reward grids: prompt p has no test pair, so there is nothing to find"
    ]


def test_a_group_that_failures_made_too_small_is_dropped_whole(user: str) -> None:
    launched = [
        trajectory("good", id="a", attempt=0),
        trajectory("bad", id="a", attempt=1),
        trajectory("good", id="b", attempt=0),
        trajectory("good", id="b", attempt=1),
        trajectory("bad", id="c", attempt=0),
    ]
    result = scored(launched, function("fragile"), paths=(user,), least=2)
    assert [group.prompt.id for group in result.groups] == ["b"]
    assert [(each.prompt.id, each.attempt) for each in result.failed] == [("a", 0), ("a", 1), ("c", 0)]
    assert result.failed[0].failure == TOO_SMALL


def test_what_failed_before_scoring_keeps_its_reason() -> None:
    launched = [trajectory(None, failure="the environment broke"), trajectory("7", attempt=1)]
    result = scored(launched)
    assert [each.failure for each in result.failed] == ["the environment broke"]
    assert [each.attempt for each in result.groups[0].trajectories] == [1]


def test_nothing_to_score_gives_nothing() -> None:
    assert scored([]) == Scored(groups=(), failed=())


@pytest.mark.parametrize("answer", ["text", "nan", "inf", "huge", "list"])
def test_a_verdict_that_is_no_finite_number_is_a_failure(user: str, answer: str) -> None:
    with pytest.raises(VerdictError, match=r"reward accuracy: .*(not a number|not a finite number)"):
        judge(trajectory(answer), function("gives"), paths=(user,))


@pytest.mark.parametrize(
    ("part", "reference", "says"),
    [
        (RewardPart(kind="numeric"), None, "reward accuracy: prompt p has no reference answer"),
        (RewardPart(kind="exact"), None, "reward accuracy: prompt p has no reference answer"),
        (RewardPart(kind="numeric"), "seven", "reward accuracy: the reference answer 'seven' holds 0 numbers"),
    ],
)
def test_a_missing_reference_is_our_failure(part: RewardPart, reference: str | None, says: str) -> None:
    with pytest.raises(VerdictError, match=says):
        judge(trajectory("7", reference=reference), part)


def test_a_trajectory_without_outcome_is_a_failure() -> None:
    with pytest.raises(VerdictError, match="no outcome"):
        judge(trajectory(None), RewardPart())


def test_a_sum_that_overflows_is_a_failure() -> None:
    parts = (RewardPart(name="a", weight=1.7e308), RewardPart(name="b", weight=1.7e308))
    with pytest.raises(VerdictError, match="not a finite number"):
        judge(trajectory("7"), *parts)


def test_an_exception_is_not_tried_again(user: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(VerdictError, match="KeyError"):
        judge(trajectory("7", tags={"log": str(log)}), function("counted"), paths=(user,))
    assert log.read_text() == "x"


def test_a_worker_that_died_is_tried_once_more(user: str, tmp_path: Path) -> None:
    tags = {"log": str(tmp_path / "log")}
    assert judge(trajectory("7", tags=tags), function("dies_once"), paths=(user,)).value == 0.75


def test_a_reward_that_hangs_is_tried_twice_and_then_marked(user: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    launched = [trajectory("7", tags={"log": str(log)})]
    result = scored(launched, function("hangs", deadline=1.0), paths=(user,))
    assert result.groups == ()
    failure = "reward accuracy: user_rewards:hangs did not answer within 1 s; its process was killed"
    assert [each.failure for each in result.failed] == [failure]
    assert log.read_text() == "xx"


@pytest.mark.parametrize(
    ("part", "field", "says"),
    [
        ({"kind": "user_rewards:trutth"}, "rewards.0.kind", "did you mean 'truth'?"),
        ({"kind": "no_file:f"}, "rewards.0.kind", "there is no module 'no_file'"),
        ({"kind": "builtins:exec"}, "rewards.0.kind", "belongs to Python itself"),
        ({"kind": "os:system"}, "rewards.0.kind", "belongs to Python itself"),
        ({"kind": "subprocess:getoutput"}, "rewards.0.kind", "belongs to Python itself"),
        ({"kind": "math:sqrt"}, "rewards.0.kind", "belongs to Python itself"),
        ({"kind": "_pickle:loads"}, "rewards.0.kind", "belongs to Python itself"),
        ({"kind": "importlib.util:find_spec"}, "rewards.0.kind", "belongs to Python itself"),
        ({"kind": "numpy.linalg._umath_linalg:det"}, "rewards.0.kind", "belongs to an installed package"),
        ({"kind": "sympy:sympify"}, "rewards.0.kind", "belongs to an installed package"),
        ({"kind": "stretto.sandbox.worker:find"}, "rewards.0.kind", "belongs to an installed package"),
        ({"kind": "compiled:f"}, "rewards.0.kind", "compiled.abi3.so is not a Python file"),
        ({"kind": "statistics:mean"}, "rewards.0.kind", "give the file another name"),
        ({"kind": "imported:run"}, "rewards.0.kind", "only imported from builtins"),
        ({"kind": "imported:system"}, "rewards.0.kind", "only imported from os"),
        ({"kind": "regex", "pattern": "("}, "rewards.0.pattern", "no regular expression"),
        ({"kind": "reasoning_gym", "pick": "first"}, "rewards.0.pick", "without a pattern"),
        ({"kind": "reasoning_gym", "pattern": "("}, "rewards.0.pattern", "no regular expression"),
    ],
)
def test_parts_that_make_no_sense_are_refused(user: str, part: dict[str, Any], field: str, says: str) -> None:
    found = list(problems([RewardPart(**part)], [user]))
    assert [problem.field for problem in found] == [field]
    assert says in str(found[0])
    with pytest.raises(RecipeError):
        Rewards([RewardPart(**part)], Pool(paths=[user]))


@pytest.mark.parametrize("kind", ["math", "reasoning_gym"])
def test_a_kind_whose_package_is_missing_says_what_to_install(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.extras.find_spec", lambda name: None)
    (found,) = problems([RewardPart(kind=kind)])
    assert found.field == "rewards.0.kind"
    assert found.fix.startswith("pip install '") and "'math-verify>=" in found.fix


@pytest.mark.parametrize("kind", ["user_rewards:truth", "imported:safe_load", "package.inside:f", "bare.module:f"])
def test_a_function_of_a_python_file_of_the_user_s_is_a_reward(user: str, kind: str) -> None:
    assert list(problems([RewardPart(kind=kind)], [user])) == []


def test_two_parts_need_two_names() -> None:
    found = list(problems([RewardPart(), RewardPart(kind="exact")]))
    assert [problem.field for problem in found] == ["rewards.1.name"]


def test_names_are_those_of_the_recipe() -> None:
    parts = [RewardPart(name="b"), RewardPart(name="a")]
    assert list(problems(parts)) == []
    assert Rewards(parts, Pool()).names == ("b", "a")


def test_verdicts_that_come_too_late_are_a_deadline_that_counts_them(user: str, tmp_path: Path) -> None:
    tags = {"log": str(tmp_path / "log")}
    part = RewardPart(name="slow", kind="user_rewards:hangs", deadline=60.0)

    async def judged() -> str:
        async with Pool(workers=2, paths=[user]) as pool:
            failed = replace(trajectory("a", id="q"), failure="environment: broke")
            asked = [failed, *(trajectory("a", attempt=attempt, tags=tags) for attempt in range(3))]
            with pytest.raises(DeadlineError) as caught:
                await score(asked, Rewards([part], pool), min_samples=1, deadline=0.5)
            assert pool.pids == (), "calls that were given up leave no process"
            return str(caught.value)

    text = asyncio.run(judged())
    assert text.startswith("reward: 3 of 4 trajectories have no verdict 0.5 s after the last was generated")
    assert "the first is prompt p, attempt 0" in text
    assert "raise deadlines.reward" in text


@pytest.mark.parametrize(
    ("tokens", "longest", "buffer", "penalty"),
    [
        (10, 20480, 4096, 0.0),
        (16384, 20480, 4096, 0.0),
        (16385, 20480, 4096, -1 / 4096),
        (18432, 20480, 4096, -0.5),
        (20480, 20480, 4096, -1.0),
        (22000, 20480, 4096, -1.0),  # -1.371 on the line through the points above, which the paper ends at -1
        (220, 50, 10, -1.0),  # `longest` below `engine.max_new_tokens`: the line would be at -18
        (10**9, 1, 1, -1.0),
        (1, 1, 1, -1.0),
        (0, 1, 1, 0.0),
        (3, 4, 4, -0.75),
    ],
)
def test_the_penalty_for_overlong_answers_by_hand(tokens: int, longest: int, buffer: int, penalty: float) -> None:
    assert answer.overlong(tokens, longest=longest, buffer=buffer) == pytest.approx(penalty, abs=1e-15)


def test_shaping_moves_the_value_and_never_the_outcome() -> None:
    parts = [RewardPart(name="right", kind="exact"), RewardPart(name="long", kind="overlong", longest=4, buffer=2)]
    talk = Conversation(tokens=np.arange(5), trained=np.arange(5) > 1, logprobs=np.zeros(5), stop="stop", version=0)
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), reference="7")
    made = Trajectory(prompt=prompt, visit=0, attempt=0, conversations=(talk,), outcome=Outcome(answer="7", signals={}))

    async def judged() -> Reward:
        async with Pool() as pool:
            rewards = Rewards(parts, pool)
            return rewards.weigh(await rewards.judge(made))

    assert asyncio.run(judged()) == Reward(value=0.5, outcome=1.0, parts={"right": 1.0, "long": -0.5})


def test_a_part_that_does_not_apply_is_left_out_of_the_sum_and_of_the_mean(user: str) -> None:
    parts = (RewardPart(name="right"), function("applies", name="form", weight=2.0))
    both = judge(trajectory("7"), *parts, paths=(user,))
    assert (both.value, both.outcome, both.parts) == (1.5, pytest.approx(0.5), {"right": 1.0, "form": 0.25})
    one = judge(trajectory("skip"), RewardPart(name="right", kind="exact"), parts[1], paths=(user,))
    assert (one.value, one.outcome, one.parts) == (0.0, 0.0, {"right": 0.0})
    nothing = scored([trajectory("skip"), trajectory("7", attempt=1)], parts[1], paths=(user,))
    assert nothing.failed[0].failure == "reward form: None, so that nothing judges the answer"
    assert [reward.value for reward in nothing.groups[0].rewards] == [0.5]


def test_a_function_of_the_whole_group_gets_the_answers_that_have_a_verdict(user: str) -> None:
    many = [trajectory(text, id=id, attempt=n) for id in "pq" for n, text in enumerate(["7", "7", "8", "skip"])]
    many[1] = replace(many[1], failure="lost")
    found = scored(many, RewardPart(), function("share", name="agree", weight=0.5), paths=(user,))
    first, second = found.groups
    assert [reward.parts.get("agree") for reward in first.rewards] == [pytest.approx(1 / 3)] * 2 + [None]
    assert [reward.parts.get("agree") for reward in second.rewards] == [0.5, 0.5, 0.25, None]
    assert [reward.value for reward in second.rewards] == [1.25, 1.25, 0.125, 0.0]
    assert [reward.outcome for reward in second.rewards] == [1.0, 1.0, 0.0, 0.0]  # it shapes, and does not judge


def test_a_function_of_the_whole_group_knows_the_verdicts_of_the_other_parts(user: str) -> None:
    many = [trajectory("7"), trajectory("8", attempt=1)]
    found = scored(many, RewardPart(), function("told", name="told"), paths=(user,))
    assert [reward.parts["told"] for reward in found.groups[0].rewards] == [1.0, 0.0]


def test_alone_a_function_of_the_whole_group_judges(user: str) -> None:
    many = [trajectory(text, attempt=n) for n, text in enumerate(["7", "7", "8", "7"])]
    found = scored(many, function("share"), paths=(user,))
    assert [reward.outcome for reward in found.groups[0].rewards] == [0.75, 0.75, 0.25, 0.75]


@pytest.mark.parametrize(("text", "reason"), [("bad", "no verdict on this group"), ("few", "a number for each answer")])
def test_a_group_that_cannot_be_judged_has_no_verdicts_and_others_do(user: str, text: str, reason: str) -> None:
    many = [trajectory(text, id=id, attempt=n) for id, text in (("p", text), ("q", "7")) for n in range(2)]
    found = scored(many, RewardPart(kind="exact"), function("share", name="agree"), paths=(user,))
    assert [group.prompt.id for group in found.groups] == ["q"]
    assert all(each.prompt.id == "p" and reason in str(each.failure) for each in found.failed)


def test_a_group_function_that_its_file_does_not_show_is_named(user: str) -> None:
    found = scored([trajectory("7")], function("share_again"), paths=(user,))
    assert "judges a group, and its file does not show that" in str(found.failed[0].failure)


def said(text: str, tokens: int, attempt: int, **rest: Any) -> Trajectory:
    """An answer of so many sampled tokens."""
    trained = np.array([False] + [True] * tokens)
    conversation = Conversation(
        tokens=np.zeros(len(trained), dtype=np.int64),
        trained=trained,
        logprobs=np.zeros(len(trained)),
        stop="stop",
        version=0,
    )
    return replace(trajectory(text, attempt=attempt, **rest), conversations=(conversation,))


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ({"kind": "lcpo_exact", "target": 200, "alpha": 1e-3}, [0.9, 0.0, 0.9, -0.2]),
        ({"kind": "lcpo_max", "target": "budget", "alpha": 1e-3}, [0.7, 0.0, 0.5, 0.0]),
        ({"kind": "kimi", "weight": 0.5}, [1.25, 0.0, 1 - 0.5 / 6, -0.25]),
        ({"kind": "arora_zanette"}, [0.892423, 0.0, 0.707577, 0.0]),
        ({"kind": "cosine", "longest": 400}, [0.926777, -0.75, 0.573223, -0.5]),
    ],
)
def test_a_length_reward_stands_beside_the_verdict_and_does_not_change_the_accuracy(part, values) -> None:
    many = [
        said(text, tokens, n, tags={"budget": 300})
        for n, (text, tokens) in enumerate([("7", 100), ("8", 200), ("7", 300), ("8", 400)])
    ]
    found = scored(many, RewardPart(), RewardPart(name="short", **part)).groups[0].rewards
    assert [reward.value for reward in found] == pytest.approx(values, abs=1e-6)
    assert [reward.outcome for reward in found] == [1.0, 0.0, 1.0, 0.0]


def test_a_length_reward_without_a_verdict_or_a_budget_is_refused_or_fails() -> None:
    with pytest.raises(RecipeError, match="kimi depends on whether the answer is right"):
        scored([said("7", 3, 0)], RewardPart(kind="kimi"))
    lost = scored([said("7", 3, 0)], RewardPart(), RewardPart(name="l", kind="lcpo_max", target="budget")).failed
    assert lost[0].failure == "reward l: prompt p has no number of tokens in the column 'budget'"


@pytest.mark.parametrize(
    ("signals", "value"), [({"reward": 0.25, "turns": 2.0}, 0.25), ({"turns": 2.0}, None), ({}, None)]
)
def test_a_signal_is_a_verdict_and_one_that_is_missing_is_none(signals: dict[str, float], value: float | None) -> None:
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},))
    outcome = Outcome(answer="7", signals=signals)
    made = Trajectory(prompt=prompt, visit=0, attempt=0, conversations=(), outcome=outcome)

    async def judged() -> Reward:
        async with Pool() as pool:
            rewards = Rewards([RewardPart(name="done", kind="signal")], pool)
            return rewards.weigh(await rewards.judge(made))

    if value is None:
        with pytest.raises(VerdictError, match="gave no signal 'reward'"):
            asyncio.run(judged())
    else:
        assert asyncio.run(judged()) == Reward(value=value, outcome=value, parts={"done": value})
