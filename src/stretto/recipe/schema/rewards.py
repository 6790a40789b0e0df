"""Section `rewards`: named parts of the reward, summed with their weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, Positive, Seconds, Share

Finite = Annotated[float, Field(allow_inf_nan=False)]
Pick = Literal["last", "first", "only"]


class RewardPart(Choice):
    """One named part of the reward."""

    judges: ClassVar[bool] = True
    """False for a part that shapes the reward but does not decide whether an answer is correct."""
    compares: ClassVar[bool] = False
    """True for a part that needs a reference answer."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_]+$")] = "accuracy"
    """Name in metrics and reports."""
    kind: str
    """Reward type."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Weight in the sum."""


class NumericReward(RewardPart):
    """1 if a number in the answer equals the reference answer's number."""

    compares = True

    kind: Literal["numeric"] = "numeric"
    pick: Pick = "last"
    """Number to compare: last, first, or only (0 if there are several)."""


class ExactReward(RewardPart):
    """1 if the answer equals the reference answer, surrounding whitespace ignored."""

    compares = True

    kind: Literal["exact"] = "exact"


class RegexReward(RewardPart):
    """1 if a pattern's match in the answer equals the reference answer."""

    compares = True

    kind: Literal["regex"] = "regex"
    pattern: str
    """Python regular expression; its first group, or else the whole match, is compared."""
    pick: Pick = "last"
    """Match to compare: last, first, or only (0 if there are several)."""
    compare: Literal["exact", "numeric"] = "exact"
    """Comparison with the reference answer: exact or numeric."""
    deadline: Seconds = 5.0
    """Max CPU seconds per score."""


class MathReward(RewardPart):
    """1 if math-verify finds answer and reference answer equal (extra `tasks`)."""

    compares = True

    kind: Literal["math"] = "math"
    deadline: Seconds = 5.0
    """Max CPU seconds per score."""


class GymReward(RewardPart):
    """Score of the reasoning-gym task's own scorer, with partial credit; for prompts of reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    pattern: str | None = None
    """Python regular expression that extracts the scored text. Unset: the whole answer."""
    pick: Pick = "last"
    """Match to score: last, first, or only (0 if there are several)."""
    deadline: Seconds = 25.0
    """Max CPU seconds per score. Symbolic integrals take sympy long."""


class SignalReward(RewardPart):
    """Number reported by the environment, e.g. `reward` of a tool class with `get_reward`."""

    kind: Literal["signal"] = "signal"
    signal: Annotated[str, Field(min_length=1)] = "reward"
    """Name of the signal."""


class OverlongReward(RewardPart):
    """Length penalty: 0 for short completions, falling linearly to -1."""

    judges = False

    kind: Literal["overlong"] = "overlong"
    longest: Count | None = None
    """Length in tokens from which the penalty is -1. Unset: engine.max_new_tokens."""
    buffer: Count | None = None
    """Number of tokens before `longest` over which the penalty grows. Unset: a fifth of `longest`."""


class LengthReward(RewardPart):
    """Length-dependent reward for correct and wrong answers; see docs/guides/shorter-answers.md."""

    judges = False


class LcpoExactReward(LengthReward):
    """LCPO-Exact (L1): a penalty per token of distance from the target length."""

    kind: Literal["lcpo_exact"] = "lcpo_exact"
    target: Count | Annotated[str, Field(min_length=1)]
    """Target length in tokens, or the column that holds it."""
    alpha: Positive = 3.0e-4
    """Penalty per token."""


class LcpoMaxReward(LengthReward):
    """LCPO-Max (L1): a correct answer keeps clip(alpha * (target - tokens) + delta, 0, 1) of its reward."""

    kind: Literal["lcpo_max"] = "lcpo_max"
    target: Count | Annotated[str, Field(min_length=1)]
    """Max length in tokens, or the column that holds it."""
    alpha: Positive = 3.0e-4
    """Change per token."""
    delta: Share = 0.5
    """Share that a correct answer of exactly `target` tokens keeps."""


class KimiReward(LengthReward):
    """Length reward of Kimi k1.5: 0.5 for the shortest completion of a group to -0.5 for the longest; wrong answers
    gain nothing."""

    kind: Literal["kimi"] = "kimi"


class AroraZanetteReward(LengthReward):
    """Length reward of Arora and Zanette: a correct answer loses by its length relative to the group's correct
    answers."""

    kind: Literal["arora_zanette"] = "arora_zanette"
    alpha: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.4
    """Max loss of a correct answer."""


class CosineReward(LengthReward):
    """Cosine over length, with separate values for correct and wrong answers."""

    kind: Literal["cosine"] = "cosine"
    longest: Count | None = None
    """Length in tokens at which the curve ends. Unset: engine.max_new_tokens."""
    right: tuple[Finite, Finite] = (1.0, 0.5)
    """Reward of a correct answer at length 0 and at `longest`, correctness included."""
    wrong: tuple[Finite, Finite] = (-1.0, -0.5)
    """Reward of a wrong answer at length 0 and at `longest`."""


class ModelReward(RewardPart):
    """Score of `roles.reward_model`."""

    judges = False

    kind: Literal["model"] = "model"


class FunctionReward(RewardPart):
    """Python function of your own, run in a worker process: f(answer, prompt, signals), or f(answers, prompt, signals)
    per group."""

    kind: Given
    deadline: Seconds = 5.0
    """Max seconds per score."""


class ProgramReward(RewardPart):
    """Keys of rewards that run the answer's last Python block in the sandbox."""

    deadline: Seconds = 5.0
    """Max wall-clock seconds per test."""
    total_deadline: Seconds = 30.0
    """Max wall-clock seconds for all tests of one answer."""
    memory_mb: Count = 512
    """Max memory of the program and its child processes in MB."""


class CodeReward(ProgramReward):
    """Unit tests for a program in the answer: its output or a function's return value."""

    kind: Literal["code"] = "code"
    tests: Annotated[str, Field(min_length=1)] = "tests"
    """Column with the tests: `[{"input", "output"}]`, `[{"call", "args", "expected"}]`, or one list of each."""
    score: Literal["share", "all"] = "share"
    """Share of passed tests, or 1 if all pass."""


class ArcReward(ProgramReward):
    """ARC: correctness of the grids that transform(grid) in the answer returns; for prompts of arc."""

    kind: Literal["arc"] = "arc"
    pairs: Literal["all", "test"] = "all"
    """Pairs to score: all, or the test pairs alone."""
    valid: Share = 0.1
    """Reward for a program that returns any valid grid."""
    cells: Share = 0.1
    """Weight of the share of correct cells. The rest up to 1 weighs the share of fully correct grids."""
