"""From a part of the recipe to a group verdict: length rewards, and functions of the user's that see a whole group.

Length rewards read the verdicts of the other parts, because most of them reward a right answer alone; what they compute
is in `length`. A function is called as `reward(answers, prompt, signals) -> list`, once for a group; each of `signals`
has `outcome` besides what the environment noticed: what the parts that see one answer have given it, from 0 to 1.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from stretto.errors import VerdictError
from stretto.recipe.schema import (
    AroraZanetteReward,
    CosineReward,
    FunctionReward,
    KimiReward,
    LcpoExactReward,
    LcpoMaxReward,
    LengthReward,
    RewardPart,
)
from stretto.rewards import length
from stretto.rewards.base import GroupVerdict, JudgedAnswer
from stretto.rewards.parts import called_with, number
from stretto.sandbox.pool import Pool
from stretto.sandbox.reward_forms import Form, Parameters, form_of, written
from stretto.sandbox.signatures import definition


def sees_groups(part: RewardPart, pool: Pool) -> bool:
    """True for a part that is judged by group, when the verdicts on each answer are there."""
    if isinstance(part, FunctionReward):
        return form(part.kind, pool) == "group"
    return isinstance(part, LengthReward)


def form(kind: str, pool: Pool) -> Form:
    """How a user's function is written, as far as it can be told without importing it."""
    if kind in pool.functions:
        return form_of(Parameters.of(pool.functions[kind]))
    node = definition(kind, pool.paths)
    return form_of(written(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None)


def build_group(part: RewardPart, pool: Pool) -> GroupVerdict:
    """The group verdict that a part without problems describes."""
    if isinstance(part, FunctionReward):
        return _function(part, pool)

    async def verdict(answers: Sequence[JudgedAnswer]) -> list[float]:
        return _lengths(part, answers)

    return verdict


def _lengths(part: RewardPart, answers: Sequence[JudgedAnswer]) -> list[float]:
    """What a length reward gives each answer of a group."""
    tokens, right = [each.tokens for each in answers], [each.right for each in answers]
    match part:
        case KimiReward():
            return length.kimi(tokens, right)
        case AroraZanetteReward(alpha=alpha):
            return length.arora_zanette(tokens, right, alpha=alpha)
        case LcpoExactReward(alpha=alpha):
            targets = [_target(part.target, each) for each in answers]
            return [length.lcpo_exact(n, target=t, alpha=alpha) for n, t in zip(tokens, targets, strict=True)]
        case LcpoMaxReward(alpha=alpha, delta=delta):
            targets = [_target(part.target, each) for each in answers]
            rows = zip(tokens, right, targets, strict=True)
            return [length.lcpo_max(n, good, target=t, alpha=alpha, delta=delta) for n, good, t in rows]
        case CosineReward(longest=int(longest)):
            ranges = {"right_range": part.right, "wrong_range": part.wrong}
            return [length.cosine(n, good, longest=longest, **ranges) for n, good in zip(tokens, right, strict=True)]
    raise TypeError(f"{type(part).__name__} is no length reward of a resolved recipe")


def _target(target: int | str, answer: JudgedAnswer) -> int:
    """The budget: a number of the recipe, or a column of the data that has one for each prompt."""
    if isinstance(target, int):
        return target
    prompt = answer.trajectory.prompt
    found = length.budget(prompt, target)
    if found is None:
        raise VerdictError(f"prompt {prompt.id} has no number of tokens in the column {target!r}")
    return found


def _function(part: FunctionReward, pool: Pool) -> GroupVerdict:
    async def verdict(answers: Sequence[JudgedAnswer]) -> list[float | None]:
        asked = called_with([each.trajectory for each in answers])
        for signals, each in zip(asked["signals"], answers, strict=True):
            signals["outcome"] = each.outcome
        values = await pool.call(part.kind, {**asked, "group": True}, deadline=part.deadline, reward=True)
        return [number(part, value) for value in values]

    return verdict
