"""A conversation with a run's model, whose answers can be read while they are said.

It asks as an environment does: the same template, the same tokens of earlier turns, the same ends, the native engine.
Nothing of it is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from stretto.engines.base import Completion, Request
from stretto.engines.native.engine import NativeEngine
from stretto.environments.base import Reply
from stretto.environments.chat import ModelHandle, Sampling
from stretto.environments.render import Renderer
from stretto.export.saved_model import SavedModel
from stretto.recipe.schema import NativeEngineSection
from stretto.runtime.answers import VISIT
from stretto.types import Message, Prompt
from stretto.workers.models import native_engine

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a letter reads as while some of its bytes are still to come."""


class ChatSession:
    """One conversation with one model."""

    def __init__(
        self,
        model: SavedModel,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ) -> None:
        """What is not given is as the run samples."""
        recipe, section = model.recipe, model.recipe.engine
        native = section if isinstance(section, NativeEngineSection) else NativeEngineSection()
        policy = model.load(recipe.model.dtype, "cuda" if torch.cuda.is_available() else "cpu")
        self.name, self.system = f"{model.run}, step {model.step}", recipe.task.system
        self.engine: NativeEngine = native_engine(policy, native)
        self.renderer = Renderer(policy.tokenizer, stop=policy.stop_tokens, arguments=recipe.task.template)
        self.sampling = Sampling(
            seed=recipe.seed if seed is None else seed,
            temperature=section.temperature if temperature is None else temperature,
            max_new_tokens=section.max_new_tokens if max_new_tokens is None else max_new_tokens,
            context=policy.context,
            stop_texts=tuple(getattr(section, "stop", ())),
            top_p=native.top_p,
            top_k=native.top_k,
        )
        self.show: Callable[[str], object] = lambda text: None
        self.begun = -1
        self.begin()

    def begin(self) -> None:
        """Forgets what was said."""
        self.begun += 1
        self.messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        self.handle = ModelHandle(
            prompt=Prompt(id="chat", messages=()),
            visit=VISIT,
            attempt=self.begun,
            sampling=self.sampling,
            renderer=self.renderer,
            generate=self._generate,
        )

    def say(self, text: str, show: Callable[[str], object] = lambda text: None) -> Reply:
        """The model's answer; `show` is given each piece of it as soon as it is said. If it is interrupted, neither
        question nor answer have been said."""
        self.show = show
        asked = [*self.messages, {"role": "user", "content": text}]
        reply = asyncio.run(self.handle.chat(asked))
        self.messages = [*asked, reply]
        return reply

    def close(self) -> None:
        """Frees the cache."""
        self.engine.close()

    async def _generate(self, request: Request) -> Completion:
        """Decodes token by token."""
        self.engine.submit([request])
        shown = 0
        try:
            while True:
                done = self.engine.step(0.0)
                text = self.renderer.text(done[0].tokens.tolist() if done else self._sampled())
                if done or not text.endswith(UNFINISHED):
                    self.show(text[shown:])
                    shown = max(shown, len(text))
                if done:
                    return done[0]
                await asyncio.sleep(0)  # where Ctrl-C gets in
        finally:
            self.engine.abort([request.key])

    def _sampled(self) -> list[int]:
        """What the only request has so far."""
        batch = self.engine.batch
        return [] if batch is None else batch.tokens[0, : int(batch.sampled[0])].tolist()
