"""Isolation for code that a model wrote: a fresh process per program, in namespaces where the kernel permits.

`records` holds what goes in and comes out. `programs` is the pool that callers use: `await run_program(code)`. It talks
to warm servers (`server`), one per program at a time. For each program `keeper` forks a process, locks it in with
`kernel` and `filters`, watches the clock and its memory, kills it with all that it started, and reports what it wrote.
`child` is the little that runs beside the program, inside; `report` reads what comes out, and `protection` says what
a machine lacks. Nothing in there is trusted: a program is given inputs and
gives back outputs, and whoever asked compares them with what was expected, which never enters the process.
"""

from stretto.sandbox.isolated.programs import Sandbox, run_program
from stretto.sandbox.isolated.records import CallResult, Calls, ProgramLimits, ProgramResult, ProgramVerdict

__all__ = ["CallResult", "Calls", "ProgramLimits", "ProgramResult", "ProgramVerdict", "Sandbox", "run_program"]
