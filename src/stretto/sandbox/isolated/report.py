"""What a keeper reported of a program, read in the process that asked: the program's own lines are hostile text.

A line holds JSON of limited size. What cannot be read is a fault of the program. Nothing in a line is a verdict: how a
process ended comes from its keeper, and whether a value is right is decided by whoever knows what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stretto.sandbox.isolated.records import CallResult, ProgramResult, ProgramVerdict


def read_report(found: Mapping[str, Any], calls: int) -> ProgramResult:
    """What a keeper reported, with the program's own lines read as the hostile text that they are."""
    verdict, detail = found["verdict"], ""
    results: dict[int, CallResult] = {}
    loaded = False
    for line in found["lines"]:
        kind, number, value = _parsed(line)
        said = f"{value.get('type')}: {value.get('text')}" if isinstance(value, dict) else ""
        fault: ProgramVerdict = "memory" if said.startswith("MemoryError:") else "error"
        loaded = loaded or kind == "loaded"
        if kind == "error" and verdict == "error":
            verdict, detail = fault, said
        elif kind in ("value", "raised") and number == len(results) < calls:
            passed = kind == "value"
            results[number] = (
                CallResult(verdict="ok", value=value) if passed else CallResult(verdict=fault, detail=said)
            )
    if len(results) < calls:
        # A process that ended early ends the call that it was in, and the calls after it get a process of their own;
        # but one that ended before its function was there would do so again.
        ended: ProgramVerdict = "error" if verdict == "ok" else verdict
        lost = CallResult(verdict=ended, detail=detail or _ending(ended, found["status"]))
        results |= dict.fromkeys(range(len(results), len(results) + 1 if loaded else calls), lost)
    elif calls:
        verdict = "ok"
    return ProgramResult(
        verdict=verdict,
        detail=detail or _ending(verdict, found["status"]),
        calls=tuple(results.values()),
        stdout=found["stdout"],
        stderr=found["stderr"],
        seconds=found["seconds"],
    )


def _parsed(line: str) -> tuple[str, int, Any]:
    """The kind of a line, the call that it is of, and its value."""
    kind, _, rest = line.partition(" ")
    number, _, text = rest.partition(" ")
    try:
        return kind, int(number), json.loads(text)
    except (ValueError, RecursionError) as error:
        said = {"type": "ValueError", "text": f"what it returned cannot be read: {type(error).__name__}"}
        return "raised", int(number) if number.isdecimal() and len(number) < 9 else -1, said


def _ending(verdict: str, status: int) -> str:
    """How a program ended, in words."""
    match verdict:
        case "timeout":
            return "its time was over"
        case "memory":
            return "its memory was used up"
        case "error":
            return f"killed by signal {-status}" if status < 0 else f"exit code {status}, or more output than allowed"
        case _:
            return ""
