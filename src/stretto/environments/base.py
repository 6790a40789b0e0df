"""The seam between an environment and the model: plain Python that talks, and an outcome.

An environment is `async def run(prompt, model) -> Outcome`. It calls `model.chat(messages)` as often as it likes.
Reply messages carry their token ids, so passing a reply back extends the conversation it came from without encoding
text again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stretto.types import Message, Outcome, Prompt, StopReason


class Reply(dict[str, Any]):
    """An assistant message (`role`, `content`) that remembers the token ids it came from."""

    def __init__(self, *, text: str, tokens: tuple[int, ...], stop: StopReason) -> None:
        super().__init__(role="assistant", content=text)
        self.text = text
        self.tokens = tokens
        self.stop = stop
        self.tool_calls: tuple[Mapping[str, Any], ...] = ()


class Model(Protocol):
    """The model as an environment sees it."""

    async def chat(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Reply:
        """The next assistant message. A list that starts with an earlier conversation's messages continues it.

        A reply with stop "length" was cut off. It is empty where the conversation has filled the context: end the
        episode then, with what there is, and it is judged as it stands.
        """
        ...


class Environment(Protocol):
    """Runs one attempt at one prompt; called once per trajectory, many at a time."""

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """Talks to the model and says what came of it."""
        ...
