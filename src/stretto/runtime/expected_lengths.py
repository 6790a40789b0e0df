"""Lengths in a run's forecast: rendered prompts, and the replies and conversations of its environment.

`stretto plan` does not use this module: it reads no prompts. The placement of a run is chosen before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stretto.environments.base import Environment, Tool
from stretto.environments.memory import MemoryEnvironment
from stretto.environments.project import ProjectEnvironment
from stretto.environments.render import Renderer
from stretto.environments.tool_class import ToolClassEnvironment
from stretto.environments.tools import ToolsEnvironment
from stretto.errors import RolloutError
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.run_lengths import recorded_answers
from stretto.planner.workload import ASSUMED_MEAN, ASSUMED_SIGMA, LENGTHS_ASSUMED, StepWorkload
from stretto.recipe.schema import (
    EnvironmentSection,
    GameSection,
    MemorySection,
    OwnEnvironmentSection,
    ProjectSection,
    Recipe,
    SingleTurnSection,
    ToolsSection,
    VerifiersSection,
)
from stretto.types import Message, Prompt

SAMPLE = 100
"""Max number of prompts to render."""
FILLED = 0.7
"""Assumed mean reply as a share of its max, where the reply is a memory, or a file with notes."""
SHORTEST = 2
"""Min assumed reply in tokens: one of text and the one that ends it."""
RECENT = 10
"""Number of logged steps whose mean length replaces an assumed one after a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLengths:
    """Lengths of one trajectory, and their origin."""

    prompt: int
    """Mean number of tokens that open a conversation."""
    completion: LengthDistribution
    """Sampled tokens per conversation."""
    conversations: float = 1.0
    """Mean number of conversations per trajectory."""
    source: str
    """Origin of the lengths, in words."""
    assumed: str = ""
    """Assumption about completions, in words; empty where they were stated or measured."""

    @property
    def trajectory(self) -> float:
        """Sampled tokens per trajectory."""
        return self.completion.mean * self.conversations

    def __str__(self) -> str:
        several = f"{self.conversations:.3g} conversations and " if self.conversations != 1 else ""
        text = f"prompts of {self.prompt:,} tokens ({self.source}), {several}{self.trajectory:,.3g} completion tokens"
        return f"{text} per trajectory" + (f" (assumed: {self.assumed})" if self.assumed else "")

    def within(self, work: StepWorkload) -> StepWorkload:
        """Return a step whose samples are conversations of these lengths."""
        others = tuple(text for text in work.assumed if not text.startswith(LENGTHS_ASSUMED))
        assumed = (f"{LENGTHS_ASSUMED}: {self.assumed}",) if self.assumed else ()
        return replace(work, prompt=self.prompt, lengths=self.completion, assumed=(*assumed, *others))

    def of_trajectories(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return the forecast of a step whose trajectories have several conversations, one after another.

        `expected` is the forecast of a step with one conversation per trajectory. All stages but the weight sync take
        the multiple.
        """
        many, seconds = self.conversations, dict(expected["seconds"])
        fixed = seconds["publish"]
        scaled = {name: value if name == "publish" else value * many for name, value in seconds.items()}
        step = fixed + max(0.0, seconds["step"] - fixed) * many
        cost = expected["cost_per_step"]
        return {
            **expected,
            "seconds": {**scaled, "step": step},
            "evaluation": expected["evaluation"] * many,
            "cost_per_step": None if cost is None else cost * step / seconds["step"],
            "prompt_tokens": self.prompt,
            "conversations": many,
            "answer_tokens": self.trajectory,
        }


def expected_lengths(
    recipe: Recipe,
    root: Path,
    *,
    prompts: Sequence[Prompt],
    renderer: Renderer,
    environment: Environment,
    context: int,
    sampled: Sequence[Mapping[str, float]] = (),
) -> ExpectedLengths:
    """Return the lengths that a run should expect: those that `batch.lengths` states, or else measured prompts.

    `sampled` are the metrics of the steps before a resume.
    """
    stated, section = recipe.batch.lengths, recipe.environment
    turns = _turns(section, environment)
    if stated is not None and stated.from_run is None:
        return ExpectedLengths(
            prompt=stated.prompt, completion=LengthDistribution.of(stated.response), source="batch.lengths"
        )
    if stated is not None and stated.from_run is not None:
        recorded = recorded_answers(stated.from_run, root, cap=recipe.engine.max_new_tokens * (turns or 1))
        return ExpectedLengths(
            prompt=recorded.prompt,
            completion=recorded.lengths,
            conversations=recorded.conversations,
            source=f"samples of {stated.from_run}",
        )
    some = prompts[:SAMPLE]
    prompt = _rendered(some, renderer, environment)
    many = _conversations(some, environment)
    longest = max(1, min(recipe.engine.max_new_tokens * (turns or 1), context - prompt))
    mean, assumed = _assumed(recipe, turns=turns, conversations=many)
    if lengths := [row["length/mean"] for row in sampled[-RECENT:] if row.get("length/mean")]:
        mean, assumed = fmean(lengths) / many, ""
    mean = min(mean, longest)
    sigma = ASSUMED_SIGMA if mean < FILLED * longest else 0.0
    return ExpectedLengths(
        prompt=prompt,
        completion=LengthDistribution(mean=mean, sigma=sigma, cap=longest),
        conversations=many,
        source=f"mean of {len(some)}",
        assumed=assumed,
    )


def _turns(section: EnvironmentSection, environment: Environment) -> int | None:
    """Max number of replies in a conversation; `None` where the environment does not limit them."""
    match section:
        case ToolsSection() | GameSection() | VerifiersSection():
            return section.turns
        case OwnEnvironmentSection() if isinstance(environment, ToolClassEnvironment):
            return environment.turns
        case SingleTurnSection() | MemorySection() | ProjectSection():
            return 1
    return None


def _rendered(prompts: Sequence[Prompt], renderer: Renderer, environment: Environment) -> int:
    """Mean number of tokens that open a conversation; 1 where no prompt can be rendered."""
    chats = [chat for prompt in prompts for chat in _openings(prompt, environment)]
    tools: Sequence[Tool] = environment.tools.schemas if isinstance(environment, ToolsEnvironment) else ()
    texts = (text for text in renderer.openings(chats, tools=tools) if not isinstance(text, RolloutError))
    lengths = [len(renderer.encode_opening(text)) for text in texts]
    return max(1, round(fmean(lengths))) if lengths else 1


def _openings(prompt: Prompt, environment: Environment) -> Iterator[Sequence[Message]]:
    """Messages before the first reply of each conversation; of a memory, before the first chunk's."""
    if not isinstance(environment, MemoryEnvironment | ProjectEnvironment):
        yield prompt.messages
        return
    try:
        yield from environment.openings(prompt)
    except RolloutError:
        return


def _conversations(prompts: Sequence[Prompt], environment: Environment) -> float:
    """Mean number of conversations per trajectory."""
    if not isinstance(environment, MemoryEnvironment | ProjectEnvironment):
        return 1.0
    counts = []
    for prompt in prompts:
        try:
            counts.append(environment.conversations(prompt))
        except RolloutError:
            continue
    return fmean(counts) if counts else 1.0


def _assumed(recipe: Recipe, *, turns: int | None, conversations: float) -> tuple[float, str]:
    """Mean number of sampled tokens per conversation before any was sampled, and the assumption in words."""
    most, section = recipe.engine.max_new_tokens, recipe.environment
    if isinstance(section, MemorySection):
        limit = section.memory_tokens or most
        update, answer = _reply(limit, FILLED), _reply(most, ASSUMED_MEAN)
        mean = (update * (conversations - 1) + answer) / conversations
        return mean, f"{update:.3g} of at most {limit} tokens per memory, {answer:.3g} of at most {most} per answer"
    reply = _reply(most, FILLED if isinstance(section, ProjectSection) else ASSUMED_MEAN)
    words = f"{reply:.3g} of at most {most} tokens per reply"
    if turns is None:
        return reply, f"one reply per trajectory, because the environment states no max; {words}"
    if turns == 1:
        return reply, words
    replies = float(turns) if isinstance(section, GameSection) else math.sqrt(turns)  # between one and the max
    return reply * replies, f"{replies:.2g} of at most {turns} turns, {words}"


def _reply(most: int, share: float) -> float:
    """Assumed mean number of tokens of a reply that may have at most `most`."""
    return min(float(most), max(float(SHORTEST), share * most))
