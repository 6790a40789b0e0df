"""From a part of the recipe to a verdict, and what is wrong with a part, without running anything of the user's.

Patterns, scorers and Python functions run in the pool, under the part's deadline. A user's function is called as
`reward(answer: str, prompt: {"id", "messages", "reference", "tags"}, signals: dict) -> float | None`, or as the names
of its parameters ask for (`stretto.sandbox.reward_forms`). Parts that see a whole group are built in `group_parts`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from stretto import plugins
from stretto.errors import Problem, VerdictError
from stretto.extras import missing_extra
from stretto.recipe.schema import (
    ArcReward,
    CodeReward,
    ExactReward,
    FunctionReward,
    GymReward,
    LengthReward,
    MathReward,
    NumericReward,
    OverlongReward,
    ProgramReward,
    RegexReward,
    RewardPart,
    SignalReward,
)
from stretto.rewards import answer
from stretto.rewards.base import Verdict, sampled_tokens
from stretto.rewards.grids import grid_score
from stretto.rewards.program import ProgramTests, passed
from stretto.rewards.scorers import Scorer
from stretto.sandbox.isolated.programs import Sandbox
from stretto.sandbox.isolated.records import ProgramLimits
from stretto.sandbox.pool import Pool
from stretto.types import Outcome, Prompt, Trajectory

PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
"""The kinds that another package judges."""
LACKS_A_VERDICT = "depends on whether the answer is right, and no other part judges each answer by itself"
ADD_A_VERDICT = "add a part that does, such as {kind: numeric} or a function of yours of one answer"


def problems(
    parts: Sequence[RewardPart], paths: Sequence[str] = (), functions: Collection[str] = ()
) -> Iterator[Problem]:
    """What is wrong with a recipe's `rewards`; `paths` is where module:name is looked for first, and `functions` are
    kinds that were given as objects."""
    names = [part.name for part in parts]
    for index, part in enumerate(parts):
        if isinstance(part, LengthReward) and not any(each.judges for each in parts):
            yield Problem(field=f"rewards.{index}.kind", reason=f"{part.kind} {LACKS_A_VERDICT}", fix=ADD_A_VERDICT)
        if part.kind not in functions:
            yield from _kind(part, f"rewards.{index}", paths)
        yield from _settings(part, f"rewards.{index}")
        if part.name in names[:index]:
            reason = f"a part before it is called {part.name!r} too"
            yield Problem(field=f"rewards.{index}.name", reason=reason, fix="give every part its own name")


def _kind(part: RewardPart, field: str, paths: Sequence[str]) -> Iterator[Problem]:
    if plugins.is_plugin(part.kind):
        yield from plugins.problems("reward", part.kind, paths, field=f"{field}.kind")
    elif plugins.is_given(part.kind):
        yield from plugins.lost("reward", part.kind, f"{field}.kind")
    elif part.kind in PACKAGES and (lacking := missing_extra(PACKAGES[part.kind], f"{field}.kind")):
        yield lacking


def _settings(part: RewardPart, field: str) -> Iterator[Problem]:
    """Keys that are wrong together, and patterns that are none."""
    if isinstance(part, OverlongReward) and part.buffer and part.longest and part.buffer > part.longest:
        reason = f"{part.buffer} is more than longest ({part.longest})"
        yield Problem(field=f"{field}.buffer", reason=reason, fix=f"use {part.longest} or less")
    if isinstance(part, ArcReward) and part.valid + part.cells >= 1:
        reason = f"valid and cells are {part.valid + part.cells:g} together, which leaves nothing for right grids"
        yield Problem(field=f"{field}.cells", reason=reason, fix="let them be less than 1 together")
    if isinstance(part, GymReward) and part.pattern is None and part.pick != "last":
        yield Problem(field=f"{field}.pick", reason="has no effect without a pattern", fix="remove it")
    if isinstance(part, RegexReward | GymReward) and part.pattern is not None:
        try:
            re.compile(part.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            reason = f"the pattern is no regular expression: {error}"
            yield Problem(field=f"{field}.pattern", reason=reason, fix="correct it; Python's re is the syntax")


def build(part: RewardPart, pool: Pool) -> Verdict:
    """The verdict that a part without problems describes; a model's score comes from elsewhere."""
    match part:
        case ExactReward():
            return _exact
        case NumericReward():
            return _numeric(part)
        case RegexReward():
            return _regex(part, pool)
        case SignalReward():
            return _signal(part)
        case OverlongReward():
            return _overlong(part)
        case MathReward():
            return _math(part, pool)
        case GymReward():
            return _gym(part, pool)
        case CodeReward():
            return _code(part, pool.programs)
        case ArcReward():
            return _arc(part, pool.programs)
        case FunctionReward():
            return _function(part, pool)
    raise TypeError(f"{type(part).__name__} is in no case above")


def observed(trajectory: Trajectory) -> Outcome:
    """The outcome to judge; a trajectory without one cannot be judged."""
    if trajectory.outcome is None:
        raise VerdictError("the environment reported no outcome")
    return trajectory.outcome


def _reference(trajectory: Trajectory) -> str:
    if trajectory.prompt.reference is None:
        raise VerdictError(f"prompt {trajectory.prompt.id} has no reference answer to compare with")
    return trajectory.prompt.reference


async def _exact(trajectory: Trajectory) -> float:
    return answer.exact(observed(trajectory).answer, _reference(trajectory))


def _numeric(part: NumericReward) -> Verdict:
    async def verdict(trajectory: Trajectory) -> float:
        return answer.numeric(observed(trajectory).answer, _reference(trajectory), part.pick)

    return verdict


def _signal(part: SignalReward) -> Verdict:
    async def verdict(trajectory: Trajectory) -> float:
        signals = observed(trajectory).signals
        if part.signal not in signals:
            raise VerdictError(
                f"the environment gave no signal {part.signal!r}; it gave {', '.join(signals) or 'none'}"
            )
        return float(signals[part.signal])

    return verdict


def _overlong(part: OverlongReward) -> Verdict:
    """Needs a resolved recipe; `longest` and `buffer` are filled in there."""
    longest, buffer = part.longest or 1, part.buffer or 1

    async def verdict(trajectory: Trajectory) -> float:
        return answer.overlong(sampled_tokens(trajectory), longest=longest, buffer=buffer)

    return verdict


def _regex(part: RegexReward, pool: Pool) -> Verdict:
    scorer = Scorer(pool=pool, target="stretto.rewards.answer:regex", seconds=part.deadline)

    async def verdict(trajectory: Trajectory) -> float:
        reference = _reference(trajectory)
        rest = (reference, part.pattern, part.pick, part.compare)
        return await scorer.score(observed(trajectory).answer, reference, *rest)

    return verdict


def _math(part: MathReward, pool: Pool) -> Verdict:
    scorer = Scorer(pool=pool, target="stretto.rewards.expression:verdict", seconds=part.deadline)

    async def verdict(trajectory: Trajectory) -> float:
        reference = _reference(trajectory)
        prepare = ("stretto.rewards.expression:prepare",)
        return await scorer.score(observed(trajectory).answer, reference, reference, prepare=prepare)

    return verdict


def _gym(part: GymReward, pool: Pool) -> Verdict:
    scorer = Scorer(pool=pool, target="stretto.rewards.gym:verdict", seconds=part.deadline)

    async def verdict(trajectory: Trajectory) -> float:
        prompt, tags = trajectory.prompt, trajectory.prompt.tags
        if not {"task", "config", "question", "metadata"} <= tags.keys():
            raise VerdictError(f"prompt {prompt.id} is not of a reasoning_gym source, so it has no scorer")
        entry = {"question": tags["question"], "answer": prompt.reference, "metadata": tags["metadata"]}
        rest = (tags["task"], tags["config"], entry, part.pattern, part.pick)
        prepare = ("stretto.rewards.gym:prepare", tags["task"], tags["config"])
        return await scorer.score(observed(trajectory).answer, prompt.reference or "", *rest, prepare=prepare)

    return verdict


def unreadable_tests(prompt: Prompt, column: str) -> str | None:
    """Why a prompt has no tests for a program in this column, or none."""
    if column not in prompt.tags:
        return f"there is no column {column!r}"
    try:
        ProgramTests.read(prompt.tags[column])
    except ValueError as error:
        return f"the tests in column {column!r} make no sense: {error}"
    return None


def _limits(part: ProgramReward) -> ProgramLimits:
    return ProgramLimits(seconds=part.deadline, total_seconds=part.total_deadline, memory_mb=part.memory_mb)


def _code(part: CodeReward, sandbox: Sandbox) -> Verdict:
    async def verdict(trajectory: Trajectory) -> float:
        if reason := unreadable_tests(trajectory.prompt, part.tests):
            raise VerdictError(f"prompt {trajectory.prompt.id}: {reason}")
        tests = ProgramTests.read(trajectory.prompt.tags[part.tests])
        said = observed(trajectory).answer
        return await passed(said, tests, sandbox, _limits(part), all_or_nothing=part.score == "all")

    return verdict


def _arc(part: ArcReward, sandbox: Sandbox) -> Verdict:
    async def verdict(trajectory: Trajectory) -> float:
        tags = trajectory.prompt.tags
        if not {"train", "test", "family"} <= tags.keys():
            raise VerdictError(f"prompt {trajectory.prompt.id} is not of an arc source, so it has no grids")
        if not tags["test"]:
            raise VerdictError(f"prompt {trajectory.prompt.id} has no test pair, so there is nothing to find")
        pairs = [*(tags["train"] if part.pairs == "all" else ()), *tags["test"]]
        score = await grid_score(observed(trajectory).answer, pairs, sandbox, _limits(part))
        return score.reward(valid=part.valid, cells=part.cells)

    return verdict


def _function(part: FunctionReward, pool: Pool) -> Verdict:
    async def verdict(trajectory: Trajectory) -> float | None:
        asked = {**called_with([trajectory]), "group": False}
        return number(part, await pool.call(part.kind, asked, deadline=part.deadline, reward=True))

    return verdict


def called_with(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """What a user's function gets of trajectories at one prompt, as plain values."""
    prompt, outcomes = trajectories[0].prompt, [observed(each) for each in trajectories]
    return {
        "answers": [outcome.answer for outcome in outcomes],
        "prompt": {
            "id": prompt.id,
            "messages": [dict(message) for message in prompt.messages],
            "reference": prompt.reference,
            "tags": dict(prompt.tags),
        },
        "signals": [{name: float(value) for name, value in outcome.signals.items()} for outcome in outcomes],
    }


def number(part: FunctionReward, value: Any) -> float | None:
    """A verdict that a user's function returned; None where it does not apply."""
    if value is not None and not isinstance(value, int | float):
        raise VerdictError(f"{part.kind} returned {repr(value)[:80]}, which is not a number")
    return value
