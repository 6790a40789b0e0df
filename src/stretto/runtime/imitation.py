"""Demonstrations as training data: whoever knows the answers talks to the environment in the model's place.

An answer of the data is said by `DemonstratedModel`, so what is imitated has the very tokens that the model will see
and say, end of turn included. Of a chat, every turn of the assistant is; where the model's template would rewrite
earlier turns, a new conversation begins, as in a rollout. Turns of `task.examples` are context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stretto.environments.base import Model
from stretto.runtime.demonstrations import Player, played, player_of
from stretto.runtime.evaluate import Evaluation, evaluate_answers
from stretto.runtime.runtime import Runtime
from stretto.runtime.training_data import numbers_of
from stretto.types import Conversation, Message, Outcome, Prompt

Z = 1.96
"""Standard errors to each side of a 95 % interval."""


class Imitated:
    """Learns what the answers of the data say."""

    imitates = True

    async def conversations(self, parts: Runtime, prompt: Prompt) -> Sequence[Conversation]:
        """The row as the model would have had it."""
        player, environment = self._player(parts), parts.environment
        if player is None:
            turns = _Turns(prompt, examples=len(parts.recipe.task.examples))
            player, environment = turns.player, turns.environment
        found = await played(prompt, environment, player, parts.renderer, parts.context)
        return [replace(each, version=parts.version) for each in found]

    def _player(self, parts: Runtime) -> Player | None:
        """Who plays the environment; none where the rows themselves are all there is to say."""
        scratch = parts.recipe.model.scratch
        return player_of(parts.environment, scratch.ways if scratch else ())

    def worth(self, prompt: Prompt) -> float:
        """Every row counts the same."""
        return 1.0

    async def evaluate(self, parts: Runtime, prompts: Sequence[Prompt]) -> Evaluation:
        """The loss on held-out rows, and how well they are answered if anybody judges that."""
        talks = [talk for prompt in prompts for talk in await self.conversations(parts, prompt)]
        found = await numbers_of(parts, talks)
        losses, tokens = np.array([-each.sum() for each in found]), np.array([len(each) for each in found])
        mean = losses.sum() / max(1, tokens.sum())
        # Of a ratio of sums; rows of a few tokens weigh less.
        error = np.sqrt(np.square(losses - mean * tokens).sum() * len(found) / max(1, len(found) - 1))
        spread = Z * error / max(1, tokens.sum())
        measures = {"eval/loss": mean, "eval/loss_low": max(0.0, mean - spread), "eval/loss_high": mean + spread}
        numbers = {name: float(number) for name, number in measures.items()} | {"eval/tokens": float(tokens.sum())}
        if not parts.recipe.rewards:
            return Evaluation(measures=numbers, n=len(prompts), asked=len(prompts), unit="rows")
        answered = await evaluate_answers(parts, prompts, pass_k=parts.recipe.evaluate.pass_k)
        return replace(answered, measures=numbers)


class _Turns:
    """A row's chat as an environment and who plays it: each turn of the assistant is a call of the model."""

    def __init__(self, prompt: Prompt, *, examples: int) -> None:
        answer: Message = {"role": "assistant", "content": prompt.reference or ""}
        self.chat = [*prompt.messages, answer]
        said = [place for place, message in enumerate(self.chat) if message["role"] == "assistant"]
        self.places = said[examples:]

    async def environment(self, prompt: Prompt, model: Model) -> Outcome:
        """Asks for every turn."""
        for place in self.places:
            await model.chat(self.chat[:place])
        return Outcome(answer=prompt.reference or "")

    def player(self, prompt: Prompt, turn: int, messages: Sequence[Message]) -> str:
        """Says what the data says."""
        return str(self.chat[self.places[turn]]["content"])
