"""The engine of a cell as its queue calls it: what fails in there is the engine's failure, by the name of the cell.

Trajectories wait for their answers through the queue, and would otherwise take it for a failure of their environment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from stretto.engines.base import Completion, Request
from stretto.errors import MODEL_FAILURES, EngineError

EngineCall = Callable[[Sequence[Request], Sequence[int], float], Awaitable[list[Completion]]]
"""New requests, unwanted ones and seconds -> what is complete."""


def engine_of_cell(generate: EngineCall, cell: str) -> EngineCall:
    """What calls a cell's engine. Deaths, deadlines and wrong weights keep their names."""

    async def call(new: Sequence[Request], unwanted: Sequence[int], seconds: float) -> list[Completion]:
        try:
            return await generate(new, unwanted, seconds)
        except MODEL_FAILURES:
            raise
        except Exception as error:
            raise EngineError(f"{cell}: {error or repr(error)}") from error

    return call
