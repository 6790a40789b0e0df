"""What a step is credited with, and how it is divided into updates and they into one line of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.base import Algorithm, Streams
from stretto.recipe.schema import Recipe
from stretto.runtime.runtime import Runtime
from stretto.scheduler.batch_rules import shuffled_parts
from stretto.types import Conversation, Group, Sample, Trajectory, trajectory_key

ConversationKey = tuple[str, int, int, int]


def keyed_conversations(trajectories: Iterable[Trajectory]) -> list[tuple[ConversationKey, Conversation]]:
    """Every conversation of some trajectories, under the key by which streams know it."""
    return [
        ((*trajectory_key(trajectory), index), conversation)
        for trajectory in trajectories
        for index, conversation in enumerate(trajectory.conversations)
    ]


def value_streams(parts: Runtime, groups: Sequence[Group]) -> Streams:
    """V* of every trajectory's prompt, from the table that was made before training, if the algorithm needs it."""
    if "vstar" not in parts.algorithm.needs:
        return {}
    found = {(*trajectory_key(t), 0): np.array([parts.values[t.prompt.id]]) for g in groups for t in g.trajectories}
    return {"vstar": found}


def credit(
    algorithm: Algorithm, groups: Sequence[Group], streams: Streams, *, whitened: bool = True
) -> tuple[Sample, ...]:
    """Credited samples, a group at a time unless the algorithm must see the whole batch; where whitening is left for
    later, it need not."""
    if algorithm.unwhitened is not None and not whitened:
        return algorithm.unwhitened(groups, streams)
    if algorithm.scope == "batch":
        return algorithm.advantage(groups, streams)
    return tuple(sample for group in groups for sample in algorithm.advantage([group], streams))


def minibatches(samples: Sequence[Sample], recipe: Recipe, *, step: int) -> list[list[Sample]]:
    """A step's samples in `batch.updates` parts, once in each epoch; who is in which follows from keys, never from who
    finished first.

    The conversations of one trajectory stay together. Fewer trajectories than updates make fewer parts.
    """
    batch = recipe.batch
    if batch.updates_a_step == 1:
        return [list(samples)]
    keys = (sample.key[:3] for sample in samples)
    chosen = shuffled_parts(keys, batch.updates, epochs=batch.epochs, seed=recipe.seed, step=step)
    # In the order given: siblings stand side by side, and share their prompt in a row.
    return [[sample for sample in samples if sample.key[:3] in keys] for keys in chosen]


def merged(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Several updates as one line: counts add up, of extremes the largest counts, the rest is averaged over the trained
    tokens. An update that was skipped is only counted; its numbers, which need not be any, tell where none was applied.
    """
    if len(reports) == 1:
        return dict(reports[0])
    applied = [report for report in reports if not report["updates/skipped"]] or reports
    line: dict[str, float] = {}
    for name in dict.fromkeys(name for report in applied for name in report):
        told, counted = [report for report in applied if name in report], _counted(name)
        total = max(1.0, sum(report[counted] for report in told))
        if name.startswith(("tokens/", "updates/")) or name == counted:
            line[name] = sum(report[name] for report in reports)
        elif name.endswith("/largest"):
            line[name] = max(report[name] for report in told)
        elif name.endswith("learning_rate"):
            line[name] = told[-1][name]
        else:
            line[name] = sum(report[name] * report[counted] for report in told) / total
    return line


def _counted(name: str) -> str:
    """The tokens that a metric is about: a critic may be trained where the policy is not."""
    return "critic/tokens" if name.startswith("critic/") else "tokens/trained"


def note_stream(
    streams: dict[str, dict[ConversationKey, NDArray[np.float64]]],
    name: str,
    told: Mapping[ConversationKey, NDArray[np.float64]],
) -> None:
    """Keeps what a model said of conversations; what a teacher says beside the tokens is a stream of its own."""
    for key, numbers in told.items():
        wide = numbers.ndim > 1
        streams.setdefault(name, {})[key] = numbers[:, 0] if wide else numbers
        if wide:
            streams.setdefault("candidates", {})[key] = numbers[:, 1:]
