"""Requests on their way to an engine in another process, and answers that a text may end on their way back.

It has no tokenizer: of an answer that a text may end it tells the tokens as they come, and the text is looked for here,
in the same way as for the native engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.engines.base import Request
from stretto.engines.stop_texts import StopTexts
from stretto.errors import EngineError

SEED_BITS = 2**63 - 1
"""Seeds are numbers of 63 bits."""

Row = dict[str, Any]
"""Of an answer: key, version, tokens, logprobs and, once it has ended, stop."""


def row_of(request: Request) -> dict[str, Any]:
    """A request as the process reads it; its seed follows from its key, and from how much was sampled elsewhere."""
    return {
        "key": request.key,
        "tokens": request.tokens.tolist(),
        "max_new_tokens": request.max_new_tokens,
        "stop": sorted(request.stop),
        "temperature": request.temperature,
        "seed": (request.key ^ (request.begun * 0x9E3779B97F4A7C15)) & SEED_BITS,
        "watched": bool(request.stop_texts),
    }


def no_room_for(request: Request, context: int) -> EngineError:
    """What to say of a conversation that is longer than vLLM's cache, where vLLM ends an answer and gives no reason."""
    told = f"a conversation of {len(request.tokens)} tokens and an answer of up to {request.max_new_tokens}"
    times = (len(request.tokens) + request.max_new_tokens) / context
    return EngineError(
        f"engine.memory_share: {told} have no room in vLLM's cache, which has {context} for one of them\n"
        f"    fix: make it {times + 0.05:.1f} times as large, lower engine.max_new_tokens, or use engine.kind: native"
    )


class WatchedAnswers:
    """Answers that a text may end, as far as they are."""

    def __init__(
        self, tokenizer: Any, context: int, no_room: Callable[[Request, int], EngineError] = no_room_for
    ) -> None:
        """`context` is how many tokens of one conversation there is room for, and `no_room` what to say where it is too
        few."""
        self.texts, self.context, self.no_room = StopTexts(tokenizer), context, no_room
        self.rows: dict[int, Row] = {}

    def grown(self, request: Request, told: Row) -> Row | None:
        """An answer with the tokens that came last, if a text ends it there."""
        row = self.rows.setdefault(request.key, {**told, "tokens": [], "logprobs": []})
        before = len(row["tokens"])
        row["tokens"] += told["tokens"]
        row["logprobs"] += told["logprobs"]
        return self._cut(request, row, before)

    def ended(self, request: Request, row: Row) -> Row:
        """An answer that has ended, up to a text that has ended it before; EngineError if room was what it lacked."""
        before = len(self.rows.pop(request.key, {"tokens": ()})["tokens"])
        row = self._cut(request, row, before) or row
        if row["stop"] == "length" and len(row["tokens"]) < request.max_new_tokens:
            raise self.no_room(request, self.context)
        return row

    def forget(self) -> None:
        """All answers begin anew."""
        self.rows.clear()

    def _cut(self, request: Request, row: Row, before: int) -> Row | None:
        said: list[int] = row["tokens"]
        ends = self.texts.ends([request], {0: said[:before]}, [said[before:]])
        if not ends:
            return None
        count = before + ends[0]
        return {**row, "tokens": said[:count], "logprobs": row["logprobs"][:count], "stop": "stop"}
