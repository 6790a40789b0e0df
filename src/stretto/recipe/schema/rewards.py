"""The section `rewards`: the verdict on an answer, as a weighted sum of named parts, each of one of these kinds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, Seconds, Share

Pick = Literal["last", "first", "only"]


class RewardPart(Choice):
    """One named part of the reward."""

    judges: ClassVar[bool] = True
    """False for a part that shapes what is learned and says of no answer that it is right."""
    compares: ClassVar[bool] = False
    """True for a part that needs a reference answer."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_]+$")] = "accuracy"
    """Name in reports."""
    kind: str
    """How an answer is judged."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor in the sum."""


class NumericReward(RewardPart):
    """1 where a number in the answer is the reference answer's."""

    compares = True

    kind: Literal["numeric"] = "numeric"
    pick: Pick = "last"
    """Which number in the answer counts; `only` gives nothing when there are several."""


class ExactReward(RewardPart):
    """1 where the answer is the reference answer, but for space around it."""

    compares = True

    kind: Literal["exact"] = "exact"


class RegexReward(RewardPart):
    """1 where what a pattern extracts from the answer is the reference answer."""

    compares = True

    kind: Literal["regex"] = "regex"
    pattern: str
    """What of the answer is judged, in the syntax of Python's re; the first group, or the whole match."""
    pick: Pick = "last"
    """Which match in the answer counts; `only` gives nothing when there are several."""
    compare: Literal["exact", "numeric"] = "exact"
    """How the extract is compared with the reference answer."""
    deadline: Seconds = 5.0
    """Seconds of processor time for one verdict."""


class MathReward(RewardPart):
    """1 where math-verify finds the answer equal to the reference answer (the extra tasks)."""

    compares = True

    kind: Literal["math"] = "math"
    deadline: Seconds = 5.0
    """Seconds of processor time for one verdict."""


class GymReward(RewardPart):
    """What the scorer of a reasoning-gym task gives, partial credit included; only for prompts of reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    pattern: str | None = None
    """What of the answer is judged; the first group, or the whole match. Default: all of it."""
    pick: Pick = "last"
    """Which match of the pattern counts; `only` gives nothing when there are several."""
    deadline: Seconds = 25.0
    """Seconds of processor time for one verdict; whether two integrals are the same takes sympy long."""


class SignalReward(RewardPart):
    """A number that the environment noticed, such as `reward` of a class of tools with `get_reward`."""

    kind: Literal["signal"] = "signal"
    signal: Annotated[str, Field(min_length=1)] = "reward"
    """Which number."""


class OverlongReward(RewardPart):
    """0, falling to -1 where an answer becomes too long."""

    judges = False

    kind: Literal["overlong"] = "overlong"
    longest: Count | None = None
    """Answers of this many tokens or more get -1; default: engine.max_new_tokens."""
    buffer: Count | None = None
    """Over how many tokens before that the penalty grows from 0; default: a fifth of `longest`."""


class ModelReward(RewardPart):
    """The score of the model in roles.reward_model, which has the deadlines of its stage."""

    judges = False

    kind: Literal["model"] = "model"


class FunctionReward(RewardPart):
    """What a Python function of yours returns, called in a worker process as f(answer, prompt, signals)."""

    kind: Given
    deadline: Seconds = 5.0
    """Seconds one verdict may take."""


class ProgramReward(RewardPart):
    """What kinds share that run a program out of the answer in the sandbox: its last block of Python."""

    deadline: Seconds = 5.0
    """Seconds one test may take, by the clock."""
    total_deadline: Seconds = 30.0
    """Seconds all tests of one answer may take together."""
    memory_mb: Count = 512
    """Memory that the program may have, in all its processes together."""


class CodeReward(ProgramReward):
    """Tests that a program in the answer passes: what it prints, or what its function returns."""

    kind: Literal["code"] = "code"
    tests: Annotated[str, Field(min_length=1)] = "tests"
    """The column of the tests: `[{"input", "output"}]`, `[{"call", "args", "expected"}]`, or lists of each apart."""
    score: Literal["share", "all"] = "share"
    """The share of tests that it passes, or 1 only where it passes all."""


class ArcReward(ProgramReward):
    """Grids that a function transform(grid) in the answer gets right; only for prompts of arc."""

    kind: Literal["arc"] = "arc"
    pairs: Literal["all", "test"] = "all"
    """Which pairs count: those of the prompt too, or only those whose outputs it does not show."""
    valid: Share = 0.1
    """What a program gets that makes any grid at all."""
    cells: Share = 0.1
    """What it gets for the share of right cells; what is left to 1 is for the share of grids that are all right."""
