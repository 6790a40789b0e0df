"""What a run learns from where nothing is sampled: rows of its task, made into what a step would have sampled.

The seam between data and a step: groups of finished trajectories, of the weights that are about to be trained, which
the step carries as it carries answers that the step before has made. Scheduler, workers and everything behind them
cannot tell the difference. How well a model does on held-out rows is asked here, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.catalog import facts_of
from stretto.errors import RecipeError
from stretto.models.memory import peak_gb
from stretto.rewards.score import Scored
from stretto.runtime.batch import StepBatch
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Trajectory
from stretto.workers.scatter_gather import scatter_gather

if TYPE_CHECKING:
    from stretto.runtime.evaluate import Evaluation
    from stretto.runtime.runtime import Runtime


class TrainingData(Protocol):
    """How rows of a task are learned from."""

    imitates: bool
    """True if what is trained are tokens, which have a distribution."""

    async def conversations(self, parts: Runtime, prompt: Prompt) -> Sequence[Conversation]:
        """A row as conversations with trained tokens."""
        ...

    async def evaluate(self, parts: Runtime, prompts: Sequence[Prompt]) -> Evaluation:
        """How well the model does on rows that it was not trained on."""
        ...

    def worth(self, prompt: Prompt) -> float:
        """What stands in the place of a row's reward."""
        ...


def training_data(algorithm: str) -> TrainingData | None:
    """How an algorithm reads the rows of a task; none where they are prompts, to which answers are sampled."""
    rows = facts_of(algorithm).rows
    if rows == "demonstrations":
        from stretto.runtime.imitation import Imitated

        return Imitated()
    if rows == "pairs":
        from stretto.runtime.preferences import ComparedPairs

        return ComparedPairs()
    return None


async def batch_of(parts: Runtime, data: TrainingData) -> StepBatch:
    """The next rows as a batch that the step carries."""
    groups = []
    for prompt, visit in parts.prompts.take(parts.recipe.batch.prompts):
        trajectory = Trajectory(
            prompt=prompt,
            visit=visit,
            attempt=0,
            conversations=tuple(await data.conversations(parts, prompt)),
            outcome=Outcome(answer=prompt.reference or ""),
        )
        worth = data.worth(prompt)
        groups.append(
            Group(prompt=prompt, trajectories=(trajectory,), rewards=(Reward(value=worth, outcome=worth, parts={}),))
        )
    scored = Scored(groups=tuple(groups), failed=())
    return StepBatch(scored=scored, accepted=scored.groups, samples=(), launched=len(groups), rounds=1)


def shown(tokens: NDArray[np.int64], trained: NDArray[np.bool_], *, version: int) -> Conversation:
    """A conversation of the data, as if the weights of this version had had it."""
    return Conversation(tokens=tokens, trained=trained, logprobs=np.zeros(len(tokens)), stop="stop", version=version)


def refuse_long(prompt: Prompt, tokens: int, context: int) -> None:
    """RecipeError for a row that checks have let through and that the model cannot read."""
    if tokens > context:
        reason = f"the row {prompt.id} has {tokens} tokens, more than the context of {context}"
        raise RecipeError.of("task.source", reason, "shorten it, or set task.drop_longer_than: auto")


async def numbers_of(parts: Runtime, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
    """What the model that is trained says of conversations: a number for each trained token."""
    cells = [cell.name for cell in parts.plan.cells if cell.role == "train"]
    return await scatter_gather(conversations, cells, parts.worker_group.score)


SAMPLED = ("kl/engine_trainer", "engine_trainer/largest", "engine_trainer/outside", "ess", "correction/share")
"""Metrics that compare with who sampled."""


def learning_metrics(batch: StepBatch, report: Mapping[str, float], *, entropy: bool) -> dict[str, float]:
    """A step's numbers without those that only make sense of what was sampled."""
    left = {name: number for name, number in report.items() if name not in SAMPLED}
    if not entropy:
        left.pop("entropy", None)
    tokens = [sum(len(talk.tokens) for t in group.trajectories for talk in t.conversations) for group in batch.accepted]
    sizes = {"rows/used": float(len(batch.accepted)), "rows/tokens": float(sum(tokens))}
    return {**left, **sizes, "memory/peak_gb": peak_gb()}
