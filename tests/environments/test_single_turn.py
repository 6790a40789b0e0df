"""One question, one answer; and which environments there are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from stretto.environments import resolve
from stretto.environments.base import Reply, Tool
from stretto.errors import RecipeError
from stretto.recipe.schema import EnvironmentSection
from stretto.types import Message, Outcome, Prompt, StopReason


class Scripted:
    """A model that says one thing and remembers what it was asked."""

    def __init__(self, stop: StopReason) -> None:
        self.asked: list[Sequence[Message]] = []
        self._stop = stop

    async def chat(
        self, messages: Sequence[Message], *, max_new_tokens: int | None = None, tools: Sequence[Tool] = ()
    ) -> Reply:
        self.asked.append(messages)
        return Reply(text="19", tokens=(4, 5, 6), stop=self._stop)


@pytest.mark.parametrize(("stop", "truncated"), [("stop", 0.0), ("length", 1.0)])
def test_single_turn_asks_once_and_reports_the_reply(stop: StopReason, truncated: float) -> None:
    model = Scripted(stop)
    prompt = Prompt(id="p", messages=({"role": "user", "content": "7+12?"},))
    outcome = asyncio.run(resolve(EnvironmentSection())(prompt, model))
    assert outcome == Outcome(answer="19", signals={"tokens": 3.0, "truncated": truncated})
    assert model.asked == [prompt.messages]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("mine:play", "there is no module 'mine'"),
        ("<function play>", "give it again"),
    ],
)
def test_other_environments_are_refused_in_words(kind: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(EnvironmentSection(kind=kind))
    assert caught.value.problems[0].field == "environment.kind"
    assert says in str(caught.value)
