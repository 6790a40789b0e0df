"""The largest row that a rehearsal tries, as far as that is known before anything was sampled.

One question and one answer, tools, games and conversations with a memory have a longest conversation. What a program or
a function of the user's makes of one nobody knows, up to the context: there rows of conversations as long as may be are
tried, and that so long a one does not fit is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from stretto.environments.memory import MemoryEnvironment
from stretto.environments.project import ProjectEnvironment
from stretto.environments.rows import row_tokens
from stretto.environments.tool_class import ToolClassEnvironment
from stretto.errors import RolloutError
from stretto.recipe.schema import GameSection, ToolsSection, VerifiersSection
from stretto.runtime.runtime import Runtime
from stretto.runtime.training_data import TrainingData
from stretto.tasks.examples import chats_of
from stretto.types import Message, Prompt

TOLD = 256
"""Tokens that tools, with what the model is told of them, or a game are expected to say for each of its replies."""

OPENINGS = 64
"""Chats that are rendered to find the longest: those with the most characters."""

Talks = Sequence[NDArray[np.bool_]]
"""Of each conversation of a trajectory that must lie in one row: which of its tokens are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestRow:
    """What rows are made of."""

    talks: Talks
    """The longest trajectory; where nobody knows that, the longest with one reply."""
    context: int | None = None
    """Tokens that a conversation may grow to; none where `talks` is the longest."""

    @property
    def tokens(self) -> int:
        """What is counted in: tokens of one trajectory."""
        return sum(map(len, self.talks))

    def wanted(self, budget: int, trajectories: int) -> int:
        """How often that is to fit one row."""
        if self.context is None:
            return min(max(1, budget // self.tokens), trajectories)
        longest = max(1, self.context // self.tokens)
        return min(max(longest, budget // self.tokens), trajectories * longest)

    def trajectories(self, count: int) -> list[Talks]:
        """A row of so many, in conversations as long as they may be."""
        if self.context is None:
            return [self.talks] * count
        longest = max(1, self.context // self.tokens)
        sizes = [longest] * (count // longest) + [count % longest] * (count % longest > 0)
        return [[np.arange(size * self.tokens) >= 1] for size in sizes]


async def largest_row(parts: Runtime) -> LargestRow:
    """The longest that the recipe can train on."""
    section, context, said = parts.recipe.environment, parts.context, parts.recipe.engine.max_new_tokens
    if parts.data is not None and section.kind == "single_turn":
        return LargestRow(talks=await _longest_of_data(parts, parts.data))
    told, spoken, known = 0, said, parts.data is None
    match parts.environment:
        case MemoryEnvironment(section=memory):
            told = memory.memory_tokens or said
            spoken = max(said, told)
        case ProjectEnvironment():
            told = said
        case _ if turns := _turns(parts):
            told, spoken = turns * TOLD, turns * said
        case _:
            known = known and section.kind == "single_turn"
    longest = min(context, _longest_opening(parts) + told + spoken)
    talk = np.arange(longest) >= max(1, longest - spoken)
    return LargestRow(talks=[talk], context=None if known else context)


def _turns(parts: Runtime) -> int | None:
    """Most replies of a conversation, where somebody counts them."""
    match section := parts.recipe.environment:
        case ToolsSection() | GameSection() | VerifiersSection():
            return section.turns
    return parts.environment.turns if isinstance(parts.environment, ToolClassEnvironment) else None


def _longest_opening(parts: Runtime) -> int:
    """Tokens before the first reply."""
    chats = [chat for prompt in parts.prompts.prompts for chat in _openings(parts, prompt)]
    lengths = parts.renderer.lengths(nlargest(OPENINGS, chats, key=_characters))
    return max((length for length in lengths if not isinstance(length, RolloutError)), default=0)


def _openings(parts: Runtime, prompt: Prompt) -> Iterator[Sequence[Message]]:
    """What is said before a reply, without what the model has said before; nothing for a prompt that cannot be read."""
    if not isinstance(parts.environment, MemoryEnvironment | ProjectEnvironment):
        yield prompt.messages
        return
    try:
        yield from parts.environment.openings(prompt)
    except RolloutError:
        return


def _characters(chat: Sequence[Message]) -> int:
    return sum(len(str(message.get("content", ""))) for message in chat)


async def _longest_of_data(parts: Runtime, data: TrainingData) -> Talks:
    """That of the rows of the task."""
    prompts = parts.prompts.prompts
    lengths = list(row_tokens(parts.renderer, [chats_of(prompt) for prompt in prompts], most=0))
    told = [0 if isinstance(length, RolloutError) else length for length in lengths]
    talks = [talk.trained for talk in await data.conversations(parts, prompts[int(np.argmax(told))])]
    return talks if parts.algorithm.whole else [max(talks, key=len)]
