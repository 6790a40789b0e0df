"""Whether a program in an answer passes its tests: it runs in the sandbox, and what comes out is compared here.

The program gets the inputs of the tests and never what is expected of it. The tests are in a column of the row, in the
forms that datasets have: `[{"input": text, "output": text}]` for programs that read and print, and
`[{"call": name, "args": [...], "expected": value}]` for functions; also `{"inputs": [...], "outputs": [...]}`, with
`fn_name` for functions, as APPS and TACO have it: there the arguments may be a text with the JSON of one on each line,
and what is expected may stand in a list of one, as their own evaluators take it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from stretto.errors import VerdictError
from stretto.readings import program_block
from stretto.sandbox.isolated.programs import Sandbox
from stretto.sandbox.isolated.records import CallResult, Calls, ProgramLimits

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""How far a fraction may be from what is expected; whole numbers have to be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTests:
    """What a program is given, and what is expected of it; as many of one as of the other."""

    function: str | None
    """The function that is called, or none for a program that reads and prints."""
    inputs: tuple[Any, ...]
    """Texts to read, or arguments: a list, or a mapping of names."""
    outputs: tuple[Any, ...]
    """Texts that should be printed, or values that should be returned."""
    wrapped: bool = False
    """True if a value that should be returned may also be the one that a list of one holds."""

    @classmethod
    def read(cls, value: Any) -> ProgramTests:
        """The tests of a row. ValueError with what is wrong with them."""
        value = _loaded(value)
        if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
            inputs, outputs, function = value["inputs"], value["outputs"], value.get("fn_name")
            if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
                raise ValueError("inputs and outputs are not lists of the same length")
            if function:
                outputs = [_stated(*each) for each in zip(inputs, outputs, strict=True)]
                inputs = [_arguments(each) for each in inputs]
            found = cls(function=function, inputs=tuple(inputs), outputs=tuple(outputs), wrapped=bool(function))
        elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
            found = cls._of_list(value)
        else:
            raise ValueError('they are no list such as [{"input": "1 2", "output": "3"}]')
        if not found.inputs:
            raise ValueError("there is none")
        kind, wanted = ((list, dict), "arguments") if found.function else ((str,), "texts")
        if not all(isinstance(each, kind) for each in found.inputs):
            raise ValueError(f"an input is no {wanted}")
        if not found.function and not all(isinstance(each, str) for each in found.outputs):
            raise ValueError("an output is no text")
        return found

    @classmethod
    def _of_list(cls, rows: list[dict[str, Any]]) -> ProgramTests:
        keys = ("args", "expected") if any("call" in row for row in rows) else ("input", "output")
        names = {row.get("call") for row in rows}
        if len(names) > 1:
            raise ValueError("they call several functions; give each function a row of its own")
        if missing := next((key for row in rows for key in keys if key not in row), None):
            raise ValueError(f"one has no {missing!r}")
        inputs, outputs = (tuple(row[key] for row in rows) for key in keys)
        return cls(function=next(iter(names), None), inputs=inputs, outputs=outputs)


def _loaded(value: Any) -> Any:
    """The column as it is, or what its text says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"they are no JSON: {error}") from None


def _arguments(given: Any) -> Any:
    """Arguments as they are, or those that a text has, one on each line."""
    if not isinstance(given, str):
        return given
    found = []
    for number, line in enumerate(given.split("\n"), 1):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} of an input is no JSON") from None
    return found


def _stated(given: Any, expected: Any) -> Any:
    """What is expected; beside arguments that are a text it is JSON too, if it can be."""
    if isinstance(given, str) and isinstance(expected, str):
        with suppress(ValueError, RecursionError):
            return json.loads(expected)
    return expected


def program_in(answer: str) -> str | None:
    """The program of an answer (`readings.program_block`), or `None`. Text outside of blocks is no program."""
    block = program_block(answer)
    return None if block is None else block.code.strip("\n")


async def passed(
    answer: str, tests: ProgramTests, sandbox: Sandbox, limits: ProgramLimits, *, all_or_nothing: bool
) -> float:
    """The share of tests that the program in an answer passes; with `all_or_nothing`, 1 only where that is all."""
    program = program_in(answer)
    if program is None:
        return 0.0
    expected = sum(len(str(each)) for each in tests.outputs)
    limits = replace(limits, output_kb=max(limits.output_kb, 4 * expected // 1024))
    if tests.function is None:
        right = await _printed(program, tests, sandbox, limits, stop=all_or_nothing)
    else:
        calls = Calls(function=tests.function, arguments=tests.inputs)
        result = await sandbox.run_program(program, calls=calls, limits=limits)
        right = [_judge(call) and _returned(call.value, wanted, tests) for call, wanted in _pairs(result.calls, tests)]
    share = sum(right) / len(tests.inputs)
    return float(share == 1.0) if all_or_nothing else share


async def _printed(
    program: str, tests: ProgramTests, sandbox: Sandbox, limits: ProgramLimits, *, stop: bool
) -> list[bool]:
    """Which tests a program passes that reads and prints, each in a process of its own; all share the total time."""
    right: list[bool] = []
    left = limits.total_seconds
    for text, wanted in zip(tests.inputs, tests.outputs, strict=True):
        if left <= 0 or (stop and False in right):
            break
        result = await sandbox.run_program(program, stdin=text, limits=limits)
        left -= result.seconds
        call = CallResult(verdict=result.verdict, detail=result.detail)
        right.append(_judge(call) and same_text(result.stdout, wanted))
    return right


def _judge(call: CallResult) -> bool:
    """True if there is something to compare. VerdictError where the sandbox broke, which says nothing of a program."""
    if call.verdict == "infra":
        raise VerdictError(f"the sandbox broke: {call.detail}")
    return call.verdict == "ok"


def _pairs(calls: tuple[CallResult, ...], tests: ProgramTests) -> list[tuple[CallResult, Any]]:
    return list(zip(calls, tests.outputs, strict=True))


def _returned(value: Any, expected: Any, tests: ProgramTests) -> bool:
    """True if a function has returned what it should."""
    unwrapped = tests.wrapped and isinstance(expected, list) and len(expected) == 1
    return same(value, expected) or (unwrapped and same(value, expected[0]))


def same(value: Any, expected: Any) -> bool:
    """True if a returned value is the expected one, both as JSON: fractions nearly, everything else exactly."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or (isinstance(expected, float) and _near(value, expected))
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    return type(value) is type(expected) and bool(value == expected)


def same_text(printed: str, expected: str) -> bool:
    """True if the same words stand on the same lines; numbers with a fraction need only be near."""
    mine, theirs = (text.strip().splitlines() for text in (printed, expected))
    return len(mine) == len(theirs) and all(_same_line(*lines) for lines in zip(mine, theirs, strict=True))


def _same_line(printed: str, expected: str) -> bool:
    mine, theirs = printed.split(), expected.split()
    return len(mine) == len(theirs) and all(
        one == other or _same_number(one, other) for one, other in zip(mine, theirs, strict=True)
    )


def _same_number(printed: str, expected: str) -> bool:
    """True for two spellings of nearly the same number, if a fraction is expected."""
    if not re.fullmatch(r"[-+]?\d{1,30}\.\d{0,30}(?:[eE][-+]?\d{1,3})?", expected):
        return False
    try:
        return _near(float(printed), float(expected))
    except (ValueError, OverflowError):
        return False


def _near(value: int | float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:
        return False
