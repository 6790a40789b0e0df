"""Answers that keep a built-in scorer busy, fill its memory or kill it are wrong and counted; a user's own function
that is too slow is a failure; many answers wait as long as they need; slow imports are said to be slow imports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import DeadlineError, SandboxDeadlineError, SandboxDiedError, SandboxLimitError, VerdictError
from stretto.recipe.schema import RewardPart
from stretto.rewards.base import Costly
from stretto.rewards.combine import Rewards
from stretto.rewards.score import Scored, score
from stretto.rewards.scorers import Scorer
from stretto.sandbox.pool import Pool
from stretto.types import Outcome, Prompt, Trajectory

USER = """
import os, time

def naps(answer, prompt, signals): time.sleep(0.05); return 1.0
def hangs(answer, prompt, signals):
    if answer == "hang": time.sleep(60)
    return 1.0
"""


@pytest.fixture
def user(tmp_path: Path) -> str:
    (tmp_path / "user_rewards.py").write_text(USER)
    return str(tmp_path)


def trajectory(answer: str, attempt: int = 0, reference: str = "7") -> Trajectory:
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), reference=reference)
    return Trajectory(prompt=prompt, visit=0, attempt=attempt, conversations=(), outcome=Outcome(answer=answer))


def scored(answers: list[str], part: RewardPart, *, paths: tuple[str, ...] = (), **options: Any) -> Scored:
    async def main() -> Scored:
        pooled = {key: options.pop(key) for key in ("workers", "start_deadline") if key in options}
        async with Pool(paths=paths, **pooled) as pool:
            launched = [trajectory(answer, attempt) for attempt, answer in enumerate(answers)]
            return await score(launched, Rewards([part], pool), min_samples=1, **options)

    return asyncio.run(main())


class Script(Pool):
    """A pool whose calls end as written down, in this order."""

    def __init__(self, *ends: Any) -> None:
        super().__init__()
        self.ends = list(ends)
        self.asked: list[Any] = []

    async def call(self, target: str, *args: Any, **options: Any) -> Any:
        self.asked.append(args[0])
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


def outcome_of(*ends: Any) -> tuple[Any, list[Any]]:
    pool = Script(*ends)
    scorer = Scorer(pool=pool, target="m:f", seconds=1.0)
    try:
        return asyncio.run(scorer.score("answer", "own")), pool.asked
    except Exception as error:
        return type(error), pool.asked


LIMIT, DIED, LATE = SandboxLimitError("full"), SandboxDiedError("died"), SandboxDeadlineError("late")


@pytest.mark.parametrize(
    ("ends", "result", "asked"),
    [
        ([1.0], 1.0, ["answer"]),
        ([[0.0, True]], Costly(0.0), ["answer"]),
        ([[0.5, False]], 0.5, ["answer"]),
        ([LIMIT, 1.0], Costly(0.0), ["answer", "own"]),
        ([LIMIT, LIMIT], VerdictError, ["answer", "own"]),
        ([LIMIT, DIED], VerdictError, ["answer", "own"]),
        ([DIED, 0.5], 0.5, ["answer", "answer"]),
        ([DIED, DIED, 1.0], Costly(0.0), ["answer", "answer", "own"]),
        ([DIED, DIED, DIED], VerdictError, ["answer", "answer", "own"]),
        ([DIED, LIMIT, 1.0], Costly(0.0), ["answer", "answer", "own"]),
        ([LATE, 1.0], 1.0, ["answer", "answer"]),
        ([LATE, LATE], SandboxDeadlineError, ["answer", "answer"]),
    ],
)
def test_an_answer_is_blamed_where_the_scorer_can_judge_another(ends: list[Any], result: Any, asked: list[str]) -> None:
    found, calls = outcome_of(*ends)
    assert found == result
    assert type(found) is type(result)
    assert calls == asked


def test_a_pattern_that_backtracks_for_ever_on_an_answer_makes_it_wrong_and_is_counted() -> None:
    part = RewardPart(kind="regex", pattern=r"^(a|aa)+$", deadline=0.1)
    (group,) = scored(["a" * 100 + "!", "7"], part).groups
    assert [(reward.value, reward.costly) for reward in group.rewards] == [(0.0, ("accuracy",)), (0.0, ())]


def test_a_scorer_killed_for_memory_is_the_answer_s_fault(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(user, "bombs.py").write_text(
        "def eats(answer): return [0.0 * len(bytearray(8 * 2**30)) if answer == 'bomb' else 1.0, False]\n"
        "def dies(answer):\n    import os\n    if answer == 'bomb': os.abort()\n    return 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", user)

    async def main() -> None:
        async with Pool(workers=1) as pool:
            for name in ("eats", "dies"):
                scorer = Scorer(pool=pool, target=f"bombs:{name}", seconds=20.0)
                assert type(await scorer.score("bomb", "own")) is Costly
                assert await scorer.score("fine", "own") == 1.0
                with pytest.raises(VerdictError, match="nor could the task's own answer"):
                    await scorer.score("bomb", "bomb")

    asyncio.run(main())


def test_no_answer_to_a_sum_is_a_failure() -> None:
    slow = r"$\gcd(10^{10^8}, 6)$"  # is computed while it is parsed, so that only the processor time ends it
    (group,) = scored(["9^9^9^9", "$10!!!$", slow, "7"], RewardPart(kind="math", deadline=0.1)).groups
    assert [reward.value for reward in group.rewards] == [0.0, 0.0, 0.0, 1.0]
    assert [reward.costly for reward in group.rewards] == [("accuracy",)] * 3 + [()]


def test_a_user_s_function_that_is_too_slow_stays_a_failure(user: str) -> None:
    part = RewardPart(kind="user_rewards:hangs", deadline=0.2)
    result = scored(["hang", "7"], part, paths=(user,))
    assert [each.attempt for each in result.failed] == [0]
    assert "user_rewards:hangs did not answer within 0.2 s" in str(result.failed[0].failure)
    assert [reward.costly for reward in result.groups[0].rewards] == [()]


def test_many_answers_may_wait_longer_than_the_deadline_for_few_workers(user: str) -> None:
    part = RewardPart(kind="user_rewards:naps")
    result = scored(["7"] * 30, part, paths=(user,), workers=1, deadline=0.8)
    assert len(result.groups[0].rewards) == 30
    assert result.failed == ()


def test_several_rounds_that_share_the_workers_do_not_end_each_other(user: str) -> None:
    async def main() -> None:
        async with Pool(workers=1, paths=[user]) as pool:
            rewards = Rewards([RewardPart(kind="user_rewards:naps")], pool)
            rounds = [score([trajectory("7")], rewards, min_samples=1, deadline=0.8) for _ in range(30)]
            assert all(len(result.groups) == 1 for result in await asyncio.gather(*rounds))

    asyncio.run(main())


def test_an_import_counts_in_no_deadline_of_a_reward(user: str) -> None:
    Path(user, "slow.py").write_text("import time\ntime.sleep(2.2)\ndef f(answer, prompt, signals): return 1\n")
    part = RewardPart(kind="slow:f", deadline=1.5)
    result = scored(["7"] * 3, part, paths=(user,), workers=1, deadline=2.0)
    assert result.failed == ()


def test_an_import_that_is_too_slow_ends_scoring_and_says_so(user: str) -> None:
    Path(user, "slow.py").write_text("import time\ntime.sleep(60)\ndef f(answer, prompt, signals): return 1\n")
    part = RewardPart(name="style", kind="slow:f", deadline=30.0)
    with pytest.raises(DeadlineError) as caught:
        scored(["7"] * 5, part, paths=(user,), workers=2, start_deadline=0.5, deadline=60.0)
    assert str(caught.value).startswith("reward style: importing slow took longer than 0.5 s")
    assert "raise deadlines.start" in str(caught.value)
