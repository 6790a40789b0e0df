"""What goes into the sandbox for model-written code, and what comes out of it.

There is no record for an expected output: a program is given inputs only, and the caller compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ProgramVerdict = Literal["ok", "wrong", "error", "timeout", "memory", "infra"]
"""How a program ended. The sandbox says all of these but "wrong", which only whoever knows the expected output can say.

"infra" is a failure of ours, which was tried again: it says nothing about the program, and is never a reward of 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """What one program may use; more than that ends it."""

    seconds: float = 5.0
    """By the clock, for a script, or for each call of a function."""
    total_seconds: float = 30.0
    """By the clock and of processor time, for all calls of a function together."""
    memory_mb: int = 512
    """Memory beyond the interpreter's own, of all its processes together."""
    output_kb: int = 1024
    """What it may print, what it may return, and what any file that it writes may hold: as much each."""
    scratch_mb: int = 64
    """What all its files may hold together, where its scratch folder lies in memory."""
    processes: int = 16
    """Processes and threads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A function of the program, and what it is called with."""

    function: str
    """Its name: at the top of the program, or else a method of a class `Solution` there, as LeetCode has it."""
    arguments: Sequence[Sequence[Any] | Mapping[str, Any]]
    """One entry per call: JSON values, positional in a list or named in a mapping. Every call gets its own copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What came of one call."""

    verdict: ProgramVerdict
    """How the call ended."""
    value: Any = None
    """What it returned, as a JSON value: tuples and arrays are lists."""
    detail: str = ""
    """What went wrong, in a line; it may hold text that the program made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What came of one program. All texts are the program's own: hostile, but no longer than the limits."""

    verdict: ProgramVerdict
    """How it ended; with calls, the first verdict of a call that is not "ok"."""
    stdout: str = ""
    """What it printed."""
    stderr: str = ""
    """What it printed there, and the traceback of an exception that ended it."""
    calls: tuple[CallResult, ...] = ()
    """One per call, in order; empty for a script."""
    detail: str = ""
    """What went wrong, in a line."""
    seconds: float = 0.0
    """How long it ran, by the clock."""
