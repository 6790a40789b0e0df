"""A class whose public methods are tools, as TRL users write it, as an environment.

    class Shop:
        def reset(self, **columns) -> str | None: ...     # what it returns is added to the last user message
        def search(self, query: str) -> str: ...          # a tool: type hints and a docstring with Args
        def get_reward(self) -> float: ...                # optional: the signal `reward`

One object per trajectory, made without arguments. Methods may block: plain ones run in threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.environments.base import Model, Tool, is_number
from stretto.environments.episode import converse
from stretto.environments.toolset import Toolset, called, fitting, schema_of
from stretto.errors import Problem, RecipeError, RolloutError
from stretto.plugin_kinds import tool_methods
from stretto.types import Message, Outcome, Prompt

FIELD = "environment.kind"


class ToolClassEnvironment:
    """An environment made of such a class."""

    def __init__(self, cls: type, *, turns: int) -> None:
        """RecipeError with every method of which the model cannot be told."""
        self.cls, self.turns = cls, turns
        self.schemas: list[Tool] = []
        problems = []
        for name in tool_methods(cls):
            try:
                self.schemas.append(schema_of(_without_self(cls, name)))
            except ValueError as error:
                fix = "give every parameter a type hint, and a line under Args: in the docstring; or call it _" + name
                problems.append(Problem(field=FIELD, reason=f"{cls.__name__}.{name} is no tool: {error}", fix=fix))
        if problems:
            raise RecipeError(*problems)

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """One trajectory with an object of its own."""
        episode = self.cls()
        messages = list(prompt.messages)
        if hasattr(episode, "reset"):
            opening = await called(episode.reset, **fitting(episode.reset, columns_of(prompt)))
            messages = opened(messages, opening)
        tools = Toolset([getattr(episode, name) for name in tool_methods(self.cls)], schemas=self.schemas)
        talk = await converse(model, messages, tools, turns=self.turns)
        signals = dict(talk.signals)
        if hasattr(episode, "get_reward"):
            reward = await called(episode.get_reward)
            if not is_number(reward):
                told = f"{self.cls.__name__}.get_reward returned {type(reward).__name__} ({reward!r:.80})"
                raise RolloutError(
                    f"{told}, which is no number\n    fix: return one number, for the episode of this object alone"
                )
            signals["reward"] = float(reward)
        return Outcome(answer=talk.reply.text, signals=signals)


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """What `reset` may ask for: the columns of the prompt, `prompt` (its messages) and `answer` (the reference)."""
    own: Mapping[str, Any] = {"prompt": [dict(message) for message in prompt.messages], "answer": prompt.reference}
    return {**own, **prompt.tags}


def opened(messages: Sequence[Message], opening: object) -> list[Message]:
    """The chat with what `reset` returned at the end of the last message."""
    if opening is None or opening == "":
        return list(messages)
    if not isinstance(opening, str):
        raise RolloutError(f"reset returned {type(opening).__name__}; return a text for the model, or None")
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{opening}"}]


def _without_self(cls: type, name: str) -> Any:
    """A method as one of its objects has it, of an object that was never made."""
    return getattr(object.__new__(cls), name)
