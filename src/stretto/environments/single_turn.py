"""One question, one answer: the environment of every task that a single reply settles.

It judges nothing. It notes how long the answer was and whether the token limit cut it off, since a truncated answer is
often wrong for that reason alone.
"""

from __future__ import annotations

from stretto.environments.base import Model
from stretto.types import Outcome, Prompt


async def run(prompt: Prompt, model: Model) -> Outcome:
    """Asks once and reports the reply's text."""
    reply = await model.chat(prompt.messages)
    signals = {"tokens": float(len(reply.tokens)), "truncated": float(reply.stop == "length")}
    return Outcome(answer=reply.text, signals=signals)
