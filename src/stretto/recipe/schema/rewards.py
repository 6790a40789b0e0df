"""The section `rewards`: the verdict on an answer, as a weighted sum of named parts, each of one of these kinds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, Seconds

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


class OverlongReward(RewardPart):
    """0, falling to -1 where an answer becomes too long."""

    judges = False

    kind: Literal["overlong"] = "overlong"
    longest: Count | None = None
    """Answers of this many tokens or more get -1; default: engine.max_new_tokens."""
    buffer: Count | None = None
    """Over how many tokens before that the penalty grows from 0; default: a fifth of `longest`."""


class SignalReward(RewardPart):
    """A number that the environment noticed, such as a game's score."""

    kind: Literal["signal"] = "signal"
    signal: Annotated[str, Field(min_length=1)] = "reward"
    """Which one, by the name in the outcome's signals."""


class ModelReward(RewardPart):
    """The score of the model in roles.reward_model, which has the deadlines of its stage."""

    judges = False

    kind: Literal["model"] = "model"


class FunctionReward(RewardPart):
    """What a Python function of yours returns, called in a worker process as f(answer, prompt, signals)."""

    kind: Given
    deadline: Seconds = 5.0
    """Seconds one verdict may take."""


class CodeReward(RewardPart):
    """The share of a program's tests that the answer passes."""

    available = False

    kind: Literal["code"] = "code"
    deadline: Seconds = 5.0
    """Seconds one verdict may take."""
