"""The credit of a step: what other models said of its conversations, and the samples that come of it, made once.

Credit is given group by group, or to all groups together where it needs them all. Where gradients are whitened at the
end of the step, groups need not wait for each other; what is reported is whitened all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.credit import whitened_samples
from stretto.runtime.minibatches import ConversationKey, credit, note_stream, value_streams
from stretto.runtime.runtime import Runtime
from stretto.types import Group, Sample, trajectory_key


class StepCredit:
    """One step's."""

    def __init__(self, parts: Runtime) -> None:
        self.parts = parts
        self.streams: dict[str, dict[ConversationKey, NDArray[np.float64]]] = {}
        self.samples: dict[int, tuple[Sample, ...]] = {}

    def note(self, stream: str, told: Mapping[ConversationKey, NDArray[np.float64]]) -> None:
        """What a model said of conversations."""
        note_stream(self.streams, stream, told)

    def of(
        self, index: int, group_of: Callable[[int], Group], everybody: Callable[[], Iterable[int]]
    ) -> tuple[Sample, ...]:
        """The samples of a group; `everybody` tells all groups that are trained on, if credit needs more than one."""
        if index not in self.samples:
            parts = self.parts
            together = everybody() if parts.algorithm.scope == "batch" and not parts.whitens else [index]
            groups = {each: group_of(each) for each in together}
            streams = {**self.streams, **value_streams(parts, list(groups.values()))}
            by_prompt: dict[tuple[str, int], list[Sample]] = defaultdict(list)
            for sample in credit(parts.crediting, list(groups.values()), streams, whitened=not parts.whitens):
                by_prompt[sample.key[:2]].append(sample)
            for i, group in groups.items():
                self.samples[i] = tuple(by_prompt[trajectory_key(group.trajectories[0])[:2]])
        return self.samples[index]

    def together(self, indices: Iterable[int]) -> tuple[Sample, ...]:
        """The samples of these groups, as they are reported."""
        found = tuple(sample for index in indices for sample in self.samples.get(index, ()))
        return whitened_samples(found) if self.parts.whitens else found
