"""What runs beside the program, inside its process: compiles it, runs it, and writes what its function returned.

The program can read and change everything here. That gains it nothing: this process holds the inputs, which it is
given anyway, and may say what came out, which is what it is asked. Results go to a descriptor of their own, in lines
that begin with a number drawn for this run, so that nothing printed anywhere is taken for one by accident.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import linecache
import os
import random
import site
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

FILE = "program.py"
"""The program's name in its tracebacks."""
MAX_TEXT = 300
"""Characters kept of what an exception says."""


def run(request: Mapping[str, Any], results: int, nonce: str) -> NoReturn:
    """The program from beginning to end; the process ends with it. `request` has the code and perhaps calls."""
    _fresh_streams()
    random.seed(0)  # the same program says the same, in every run and on every machine
    gc.enable()
    out = Results(results, nonce)
    calls = request.get("calls")
    code = 0
    try:
        module = _module(request["code"], "__main__" if calls is None else "program")
        if calls is not None:
            _call(module, calls, out)
    except SystemExit as error:
        code = _exit_code(error, out)
    except BaseException as error:
        _explain(error)
        out.write("error", 0, _described(error))
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with suppress(BaseException):
        sys.stdout.flush()
    os._exit(code)


class Results:
    """The private line on which results go out. Its functions are kept, whatever the program replaces later."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor, self._nonce, self._write, self._encode = descriptor, nonce, os.write, json.JSONEncoder
        self._owner, self._process, self._exit = os.getpid(), os.getpid, os._exit

    def write(self, kind: str, call: int, value: Any) -> None:
        """One line: the nonce, the kind, which call it is of, and a JSON value in ASCII."""
        if self._process() != self._owner:  # a process that the program forked came back from it, too
            self._exit(1)
        text = self._encode(default=_plain).encode(value)
        line = memoryview(f"{self._nonce} {kind} {call} {text}\n".encode("ascii"))
        while line:
            line = line[self._write(self._descriptor, line) :]


def _fresh_streams() -> None:
    """Standard streams on this process's own descriptors, in UTF-8; half a surrogate pair is no reason to fail."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8", "surrogateescape")  # type: ignore
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=descriptor == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _module(code: str, name: str) -> ModuleType:
    """The program, executed as a module; a script is `__main__`, a program that is called is not."""
    module = sys.modules[name] = ModuleType(name)
    site.setquit()
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)
    return module


def _call(module: ModuleType, calls: Mapping[str, Any], out: Results) -> None:
    """Every call, each with arguments of its own, and a line for each that says what came of it."""
    function = _function(module, calls["function"])
    out.write("loaded", 0, None)
    for index, text in enumerate(calls["arguments"]):
        arguments = json.loads(text)
        try:
            value = function(**arguments) if isinstance(arguments, dict) else function(*arguments)
            out.write("value", index, value)
        except Exception as error:
            _explain(error)
            out.write("raised", index, _described(error))


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    """The function of this name, or a method of a new `Solution` for every call."""
    found: Callable[..., Any] | None = getattr(module, name, None)
    if callable(found):
        return found
    solution = getattr(module, "Solution", None)
    if callable(solution) and callable(getattr(solution, name, None)):
        return lambda *args, **named: getattr(solution(), name)(*args, **named)
    raise NameError(f"the program defines no function {name!r}")


def _plain(value: Any) -> Any:
    """Arrays and their numbers become plain ones; anything else is no JSON value."""
    convert = getattr(value, "tolist", None)
    if callable(convert):
        return convert()
    raise TypeError(f"a {type(value).__name__} is not a JSON value")


def _exit_code(error: SystemExit, out: Results) -> int:
    """What `sys.exit` was given: nothing and 0 are a good end, a text goes to standard error."""
    if error.code is None or error.code == 0:
        return 0
    if not isinstance(error.code, int):
        with suppress(BaseException):
            print(error.code, file=sys.stderr)
    out.write("error", 0, _described(error))
    return 1


def _described(error: BaseException) -> dict[str, str]:
    """The exception's name and text, even if saying it fails."""
    try:
        text = str(error)[:MAX_TEXT]
    except BaseException:
        text = "(its message could not be made)"
    return {"type": type(error).__name__[:MAX_TEXT], "text": text}


def _explain(error: BaseException) -> None:
    """The traceback as the program's author would see it, without the frames of this file."""
    with suppress(BaseException):
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames, limit=-8, file=sys.stderr)
