"""What an algorithm is: a frozen record of pure functions, and the streams those functions read.

The trainer accumulates, reduces, clips and steps; it never tests a name. An algorithm turns finished groups into
credited samples and a vector of log-probabilities into sums. Losses are *sums*: the global denominator is applied
once, at the end of the step, so packing, micro-batching and the number of devices cannot change the gradient.

N is the number of trained tokens in a micro-batch, C the number of conversations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto import plugins
from stretto.algorithms.catalog import OWN, facts_of
from stretto.algorithms.own_facts import FIELD, announce, compare
from stretto.errors import RecipeError, StrettoError
from stretto.recipe.schema import AlgorithmSection
from stretto.types import Group, Sample

Denominator = Literal["tokens", "conversations", "trajectories", "constant"]
"""What a term's sum over the whole step is divided by; `constant` is 1."""

Streams = Mapping[str, Mapping[tuple[str, int, int, int], NDArray[np.float64]]]
"""Extra numbers that credit may need: name -> sample key -> stream, a number per trained token ("reference", "values").
"vstar" is one number per trajectory, under the key of its first conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStreams:
    """Streams over the trained tokens of one micro-batch, conversation after conversation."""

    advantage: Tensor
    """(N) credit per token."""
    engine: Tensor
    """(N) the engine's log-probabilities when it sampled."""
    conversation: Tensor
    """(N) which conversation of the micro-batch a token belongs to, 0 to C-1."""
    lengths: Tensor
    """(C) trained tokens per conversation."""
    old: Tensor | None = None
    """(N) the trainer's log-probabilities at the sampling weights; none while the weights have not moved since."""
    reference: Tensor | None = None
    """(N) reference log-probabilities, if needed."""
    values: Tensor | None = None
    """(N) the critic's values at the weights that sampled, if needed."""
    returns: Tensor | None = None
    """(N) what the critic should have said, if a critic is trained."""
    teacher: Tensor | None = None
    """(N, K + 1) a teacher's log-probabilities of its likeliest tokens and of the rest together, if it was asked for
    them; (N, V) where that is the whole vocabulary."""
    likeliest: Tensor | None = None
    """(N, K) the ids of these."""
    chosen: Tensor | None = None
    """The policy's own log-probabilities of the same; the trainer computes them with those of the tokens."""
    siblings: Tensor | None = None
    """(C) how many conversations each one's trajectory has; none where each is a trajectory of its own."""
    family_tokens: Tensor | None = None
    """(C) trained tokens of all conversations of each one's trajectory; none where each is a trajectory of its own."""


TermFunction = Callable[[Tensor, TokenStreams], Tensor]
"""(log-probabilities (N), rows) -> numbers that may be summed in any order: one per token or per conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTerm:
    """A number that is reported beside the loss."""

    numbers: TermFunction
    """What is summed over the step."""
    per: Denominator = "tokens"
    """What the sum is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of the objective."""

    name: str
    """Name in reports."""
    denominator: Denominator
    """What the step's sum is divided by."""
    loss: TermFunction
    """The numbers to sum."""
    watch: Mapping[str, LoggedTerm]
    """Metric name -> what is reported under it."""
    credited: bool = False
    """True for a loss that is linear in the advantage while the weights have not moved since they sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How rewards become a gradient."""

    name: str
    """Name in the catalog."""
    scope: Literal["sample", "group", "batch"]
    """What `advantage` must see at once."""
    needs: frozenset[str]
    """Streams that somebody must provide: old, reference, values, vstar."""
    min_samples: int
    """Fewest samples per prompt."""
    terms: tuple[Term, ...]
    """The objective."""
    advantage: Callable[[Sequence[Group], Streams], tuple[Sample, ...]]
    """Groups with verdicts -> credited samples; one group at a time unless scope is "batch"."""
    drop: Callable[[Group], bool]
    """True for a group that is not worth training on; other prompts are asked in its place."""
    unwhitened: Callable[[Sequence[Group], Streams], tuple[Sample, ...]] | None = None
    """Where `advantage` is credit that was whitened over all trained tokens: the credit before that, which needs one
    group alone. A trainer can whiten its gradient instead, while the weights have not moved."""
    critic: tuple[Term, ...] = ()
    """What a critic minimizes, if a run trains one: the same kind of sums, over its values instead of
    log-probabilities."""
    whole: bool = False
    """True if a term compares the conversations of a trajectory, so that they must be in one micro-batch."""

    @property
    def drops(self) -> bool:
        """True if it ever drops a group."""
        return self.drop is not keep


def keep(group: Group) -> bool:
    """The `drop` of an algorithm that drops nothing."""
    return False


def build(
    section: AlgorithmSection, folders: Sequence[str] = (), *, where: str = "", seconds: float = plugins.PATIENCE
) -> Algorithm:
    """The algorithm a recipe names, with its numbers; one by module:name is looked for in these folders.

    `where` names the process, if that is not the one of the command; `seconds` are those in which it is imported.
    """
    if not plugins.is_plugin(section.name) and not plugins.is_given(section.name):
        built_in: Algorithm = importlib.import_module(facts_of(section.name).module).build(section)
        return built_in
    if section.name not in OWN:  # in a worker's process; elsewhere the recipe was checked
        announce(section.name, folders)
    function = plugins.resolve("algorithm", section.name, folders, field=FIELD, where=where, seconds=seconds)
    try:
        algorithm = function(section)
    except StrettoError:
        raise
    except Exception as error:
        reason = f"{section.name} raised {plugins.describe_error(error, folders)}"
        raise RecipeError.of(FIELD, reason, "mend it; it is called with the recipe's section `algorithm`") from error
    if not isinstance(algorithm, Algorithm):
        reason = f"{section.name} returned {type(algorithm).__name__}, which is no Algorithm"
        raise RecipeError.of(FIELD, reason, "return a stretto.algorithms.base.Algorithm")
    compare(algorithm, section, folders)
    return algorithm
