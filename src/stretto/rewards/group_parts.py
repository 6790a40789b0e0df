"""From a part of the recipe to a group verdict: length rewards, and functions of the user's that see a whole group.

Length rewards read the verdicts of the other parts, because most of them reward a right answer alone; what they compute
is in `length`. A function is called as `reward(answers, prompt, signals) -> list`, once for a group; each of `signals`
has `outcome` besides what the environment noticed: what the parts that see one answer have given it, from 0 to 1.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from stretto import plugins
from stretto.errors import VerdictError
from stretto.recipe.schema import RewardPart
from stretto.rewards import length
from stretto.rewards.base import GroupVerdict, JudgedAnswer
from stretto.rewards.parts import called_with, number
from stretto.sandbox.pool import Pool
from stretto.sandbox.reward_forms import Form, Parameters, form_of, written
from stretto.sandbox.signatures import definition

LENGTHS = frozenset({"lcpo_exact", "lcpo_max", "kimi", "arora_zanette", "cosine"})
"""The kinds that are a function of length and of right or wrong."""


def sees_groups(part: RewardPart, pool: Pool) -> bool:
    """True for a part that is judged by group, when the verdicts on each answer are there."""
    own = plugins.is_plugin(part.kind) or part.kind in pool.functions
    return part.kind in LENGTHS or (own and form(part.kind, pool) == "group")


def form(kind: str, pool: Pool) -> Form:
    """How a user's function is written, as far as it can be told without importing it."""
    if kind in pool.functions:
        return form_of(Parameters.of(pool.functions[kind]))
    node = definition(kind, pool.paths)
    return form_of(written(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None)


def build_group(part: RewardPart, pool: Pool) -> GroupVerdict:
    """The group verdict that a part without problems describes."""
    return _lengths(LENGTH_RULES[part.kind], part) if part.kind in LENGTHS else _function(part, pool)


Rule = Callable[[RewardPart, Sequence[JudgedAnswer]], list[float]]


def _lengths(rule: Rule, part: RewardPart) -> GroupVerdict:
    async def verdict(answers: Sequence[JudgedAnswer]) -> list[float]:
        return rule(part, answers)

    return verdict


def _lcpo_exact(part: RewardPart, answers: Sequence[JudgedAnswer]) -> list[float]:
    return [length.lcpo_exact(each.tokens, target=_target(part, each), alpha=part.alpha) for each in answers]


def _lcpo_max(part: RewardPart, answers: Sequence[JudgedAnswer]) -> list[float]:
    return [
        length.lcpo_max(each.tokens, each.right, target=_target(part, each), alpha=part.alpha, delta=part.delta)
        for each in answers
    ]


def _kimi(part: RewardPart, answers: Sequence[JudgedAnswer]) -> list[float]:
    return length.kimi([each.tokens for each in answers], [each.right for each in answers])


def _arora_zanette(part: RewardPart, answers: Sequence[JudgedAnswer]) -> list[float]:
    tokens, right = [each.tokens for each in answers], [each.right for each in answers]
    return length.arora_zanette(tokens, right, alpha=part.alpha)


def _cosine(part: RewardPart, answers: Sequence[JudgedAnswer]) -> list[float]:
    return [
        length.cosine(each.tokens, each.right, longest=part.longest, right_range=part.right, wrong_range=part.wrong)
        for each in answers
    ]


LENGTH_RULES: dict[str, Rule] = {
    "lcpo_exact": _lcpo_exact,
    "lcpo_max": _lcpo_max,
    "kimi": _kimi,
    "arora_zanette": _arora_zanette,
    "cosine": _cosine,
}
"""Kind -> what it gives for each answer of a group."""


def _target(part: RewardPart, answer: JudgedAnswer) -> int:
    """The budget: a number of the recipe, or a column of the data that has one for each prompt."""
    if isinstance(part.target, int):
        return part.target
    prompt = answer.trajectory.prompt
    found = prompt.tags.get(part.target)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e9:
        raise VerdictError(f"prompt {prompt.id} has no number of tokens in the column {part.target!r}")
    return int(found)


def _function(part: RewardPart, pool: Pool) -> GroupVerdict:
    async def verdict(answers: Sequence[JudgedAnswer]) -> list[float | None]:
        asked = called_with([each.trajectory for each in answers])
        for signals, each in zip(asked["signals"], answers, strict=True):
            signals["outcome"] = each.outcome
        values = await pool.call(part.kind, {**asked, "group": True}, deadline=part.deadline, reward=True)
        return [number(part, value) for value in values]

    return verdict
