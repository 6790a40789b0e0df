"""What is imitated where that is more than a reference answer: prompts as a player plays them who knows the answers.

The environment runs as in training, with the player in the model's place, so what is imitated has the very tokens that
the model will see and say. The player is the environment's own, or the recipe's templates,
one per turn, perhaps in several ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from stretto.engines.base import Completion, Request
from stretto.environments.base import Address, Demonstrator, Environment, Reply, Tool, messages_of
from stretto.environments.chat import ModelHandle, Sampling
from stretto.environments.render import Renderer
from stretto.errors import RecipeError, StrettoError
from stretto.tasks.source import PromptSource
from stretto.tasks.template import fill
from stretto.types import Conversation, Message, Prompt, Sample

Player = Callable[[Prompt, int, Sequence[Message]], str]
"""(prompt, call of the model, messages) -> what to say."""
FIELD = "model.scratch.demonstration"


def player_of(environment: Environment, ways: Sequence[Sequence[str]]) -> Player | None:
    """Who shows how it is done: in the recipe's ways, each a template per turn, or in the environment's own; none where
    the reference answer is all there is to imitate."""
    if ways:
        return partial(_shown, ways)
    return environment.demonstrate if isinstance(environment, Demonstrator) else None


def _shown(ways: Sequence[Sequence[str]], prompt: Prompt, turn: int, messages: Sequence[Message]) -> str:
    """One way for each prompt, the same everywhere."""
    templates = ways[crc32(prompt.id.encode()) % len(ways)]
    return _filled(templates[min(turn, len(templates) - 1)], prompt)


def _filled(template: str, prompt: Prompt) -> str:
    try:
        return fill(template, {**prompt.tags, "answer": prompt.reference or ""})
    except (KeyError, ValueError) as error:
        reason = f"{template!r} cannot be filled in for prompt {prompt.id}: {error}"
        raise RecipeError.of(FIELD, reason, "name columns of the task, or {answer}") from None


class DemonstratedModel:
    """A model that says what the player says."""

    def __init__(self, prompt: Prompt, player: Player, renderer: Renderer, context: int) -> None:
        sampling = Sampling(seed=0, temperature=1.0, max_new_tokens=context, context=context)
        self.prompt, self.player, self.renderer = prompt, player, renderer
        self.handle = ModelHandle(
            prompt=prompt, visit=0, attempt=0, sampling=sampling, renderer=renderer, generate=self._say
        )
        self.turn = 0
        self.tokens: NDArray[np.int64] = np.array([], dtype=np.int64)

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Tool] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """The next message of the player, in the tokens with which the model would say it."""
        messages = messages_of(messages)
        self.tokens = self.renderer.answer(messages, self.player(self.prompt, self.turn, messages))
        self.turn += 1
        return await self.handle.chat(messages, max_new_tokens=max_new_tokens, tools=tools, stop=stop)

    async def address(self) -> Address:
        """Programs cannot be shown how it is played."""
        return await self.handle.address()

    async def _say(self, request: Request) -> Completion:
        said = self.tokens[: request.max_new_tokens]
        whole = len(said) == len(self.tokens)
        return Completion(
            key=request.key, tokens=said, logprobs=np.zeros(len(said)), stop="stop" if whole else "length", version=0
        )


def demonstrations(
    source: PromptSource,
    environment: Environment,
    player: Player,
    renderer: Renderer,
    *,
    context: int,
    prompts: int,
) -> list[Sample]:
    """The conversations of so many next prompts as samples. RecipeError where one is not played."""

    async def play() -> list[Sample]:
        samples: list[Sample] = []
        for prompt, visit in source.take(prompts):
            for index, conversation in enumerate(await played(prompt, environment, player, renderer, context)):
                advantage, key = np.ones(conversation.sampled), (prompt.id, visit, 0, index)
                samples.append(Sample(key=key, conversation=conversation, advantage=advantage, leads=index == 0))
        return samples

    with ThreadPoolExecutor(1) as beside:  # whoever prepares a run may be in a loop of its own
        return beside.submit(asyncio.run, play()).result()


async def played(
    prompt: Prompt, environment: Environment, player: Player, renderer: Renderer, context: int
) -> Sequence[Conversation]:
    """The conversations of one prompt, as its player has them."""
    model = DemonstratedModel(prompt, player, renderer, context)
    try:
        await environment(prompt, model)
    except RecipeError:
        raise
    except Exception as error:
        named = str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
        reason = f"prompt {prompt.id} cannot be played, to be imitated: {named}"
        raise RecipeError.of("task", reason, "correct the task or the environment, or imitate nothing") from error
    if model.handle.full:
        reason = f"prompt {prompt.id} is played in more tokens than the context of {context}"
        fix = "use a longer context, take it out, or ask less at a time"
        raise RecipeError.of("task", reason, fix)
    return model.handle.conversations()
