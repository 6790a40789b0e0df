"""The conversation of a model that may call tools: it speaks, its calls are made, it reads what they came to.

Shared by the built-in tools and by classes of the user's. It ends with a reply that calls nothing, with one that was
cut off, or after so many turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.environments.base import Model, Reply
from stretto.environments.toolset import Toolset
from stretto.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversed:
    """A conversation that has ended."""

    reply: Reply
    """The model's last words."""
    signals: dict[str, float]
    """turns, tokens, tool_calls, tool_errors (calls that could not be made) and truncated."""
    turn_errors: tuple[int, ...]
    """Per turn, how many calls could not be made."""


async def converse(model: Model, messages: Sequence[Message], tools: Toolset, *, turns: int) -> Conversed:
    """Lets the model speak, up to `turns` times."""
    said, tokens, calls, errors = list(messages), 0, 0, list[int]()
    for _ in range(turns):
        reply = await model.chat(said, tools=tools.schemas)
        tokens += len(reply.tokens)
        errors.append(0)
        if not reply.tool_calls or reply.stop == "length":
            break
        said.append(reply)
        for call in reply.tool_calls:
            text, made = await tools.answer(call)
            calls += 1
            errors[-1] += not made
            name = call.name or "unknown"
            said.append({"role": "tool", "tool_call_id": call.id, "name": name, "content": text})
    signals = {
        "turns": float(len(errors)),
        "tokens": float(tokens),
        "tool_calls": float(calls),
        "tool_errors": float(sum(errors)),
        "truncated": float(reply.stop == "length"),
    }
    return Conversed(reply=reply, signals=signals, turn_errors=tuple(errors))
