"""What an environment shows the model beside the prompt: whether it fits into the context, and can be spelt.

The second tier's, like `checks.deep`: prompts themselves are looked at there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import Any

from stretto.environments.memory import MemoryEnvironment
from stretto.environments.project import ProjectEnvironment
from stretto.environments.render import Renderer
from stretto.errors import Problem, RolloutError
from stretto.recipe.schema import (
    CodeGame,
    EnvironmentSection,
    MemorySection,
    NumberGame,
    ProjectSection,
    Recipe,
    Scratch,
)
from stretto.types import Message, Prompt

OPENINGS = 16
"""Chats that are rendered to find one that is too long: those with the most characters."""


def environment_problems(recipe: Recipe, prompts: Sequence[Prompt], context: int, tokenizer: Any) -> list[Problem]:
    """Conversations of an environment that no context could hold, and words that a scratch model cannot spell."""
    section = recipe.environment
    chats = list(_openings(section, prompts))
    problems = list(
        _too_long(section, chats, context, Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template))
    )
    if recipe.model.name == "scratch":
        texts = [str(message["content"]) for _, chat in chats for message in chat]
        missing = set().union(*texts, *_words(section, prompts)) - set((recipe.model.scratch or Scratch()).characters)
        if missing:
            reason = f"does not have {''.join(sorted(missing))!r}, which environment {section.kind} shows the model"
            fix = "add them to the characters, or give the environment other words"
            problems.append(Problem(field="model.scratch.characters", reason=reason, fix=fix))
    return problems


def _openings(section: EnvironmentSection, prompts: Sequence[Prompt]) -> Iterator[tuple[str, Sequence[Message]]]:
    """(prompt, how a conversation opens) of environments that put a prompt in their own words; nothing for a prompt
    that lacks what they read, which costs its own trajectory."""
    match section:
        case MemorySection():
            environment: MemoryEnvironment | ProjectEnvironment = MemoryEnvironment(section)
        case ProjectSection():
            environment = ProjectEnvironment(section)
        case _:
            return
    for prompt in prompts:
        try:
            yield from ((prompt.id, chat) for chat in environment.openings(prompt))
        except RolloutError:
            continue


def _too_long(
    section: EnvironmentSection, chats: Sequence[tuple[str, Sequence[Message]]], context: int, renderer: Renderer
) -> Iterator[Problem]:
    """The first of the longest that leaves no room for a single token."""
    longest = nlargest(OPENINGS, chats, key=lambda each: sum(len(str(message["content"])) for message in each[1]))
    for (prompt, _), tokens in zip(longest, renderer.lengths([chat for _, chat in longest]), strict=True):
        if not isinstance(tokens, RolloutError) and tokens >= context:
            memory = isinstance(section, MemorySection)
            what = "a piece of its text" if memory else "one of its files"
            reason = f"prompt {prompt} opens a conversation of {tokens} tokens for {what}, in a context of {context}"
            fix = "lower it, or use a model with a longer context" if memory else "shorten it, or use a longer context"
            yield Problem(field="environment.chunk" if memory else "environment.files", reason=reason, fix=fix)
            return


def _words(section: EnvironmentSection, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Texts that the model is shown later."""
    match section:
        case NumberGame():
            yield from (section.higher, section.lower, section.invalid)
        case CodeGame():
            yield from (section.matched.replace("{placed}", "").replace("{misplaced}", ""), section.invalid)
        case MemorySection():
            yield section.empty
            yield from (str(prompt.tags.get(section.document, "")) for prompt in prompts)
