"""A task with optional scratch tokens, for scripts/evidence/lengths: digits are reversed after as many dots as liked.

Its warm-up imitates `........:2413`: none to sixteen dots, then the answer. How many follows from the digits in a way
that nobody could guess, so that the model learns a distribution of lengths that has nothing to do with being right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

DOTS = (0, 2, 4, 8, 12, 12, 16, 16)


def rows(config: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Strings of three or four digits, each with a worked answer to imitate and the result alone."""
    for index in range(config["count"]):
        number = int.from_bytes(hashlib.blake2b(f"{index}".encode(), digest_size=8).digest(), "big")
        text = f"{number % 10**6:06d}"[: 3 + number // 10**6 % 2]
        worked = "." * DOTS[number // 10**8 % len(DOTS)] + ":" + text[::-1]
        yield {"id": str(index), "prompt": f"{text}=", "answer": worked, "result": text[::-1]}


def right(answer: str, prompt: dict[str, Any], signals: dict[str, float]) -> float:
    """1 for the result after the last colon; what stands before it does not matter."""
    return float(":" in answer and answer.rpartition(":")[2] == prompt["tags"]["result"])
