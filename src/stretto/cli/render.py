"""Output of results and failures: JSON documents on standard output, readable lines on standard error.

Text from recipes, data and models is printed verbatim, never parsed as markup. Control characters are replaced.
"""

from __future__ import annotations

import errno
import json
import platform
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from stretto import __version__
from stretto.errors import Problem, RecipeError, StrettoError
from stretto.report.stream import OutputLost
from stretto.storage.atomic import to_json

if TYPE_CHECKING:  # Imported on first use: printing a JSON document does not need rich.
    from rich.console import Console
    from rich.text import Text


def screen(*, error: bool = False) -> Console:
    """Return a console without markup, highlighting or emoji."""
    from rich.console import Console

    return Console(stderr=error, markup=False, highlight=False, emoji=False, soft_wrap=True)


def plain(text: str) -> str:
    """Replace control characters, which could move a terminal's cursor."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def note(text: str) -> None:
    """Print an informational line on standard error."""
    screen(error=True).print(f"note: {plain(text)}", style="yellow")


def show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print a Python warning without its source location."""
    note(str(message))


def shown(value: object) -> str:
    """Format a recipe value on one line of YAML."""
    return json.dumps(value, ensure_ascii=False)


_for_documents: list[TextIO] = []
"""Output streams for JSON documents; the last one is in use."""


@contextmanager
def documents_alone() -> Iterator[None]:
    """Send JSON documents to standard output and every other print, such as a plug-in's, to standard error."""
    _for_documents.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _for_documents.pop()


def document(content: Mapping[str, Any]) -> None:
    """Print the JSON document of a command; numbers that are not finite become `null`."""
    print(to_json(content, indent=2), file=_for_documents[-1] if _for_documents else sys.stdout)


def problem_list(problems: Sequence[Problem]) -> Text:
    """Format problems: field, reason and fix of each."""
    from rich.text import Text

    count = len(problems)
    lines = Text(f"{count} problem{'' if count == 1 else 's'}; nothing was started\n", style="bold")
    for problem in problems:
        lines.append("\n").append(plain(problem.field), style="red").append(f": {plain(problem.reason)}\n")
        lines.append("    fix: ", style="green").append(f"{plain(problem.fix)}\n")
    return lines


DISK = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "ESTALE", "EACCES", "EPERM", "EMFILE", "ENFILE")
)
"""Error numbers of a full, broken, absent or read-only disk, and of too many open files."""


FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it a file that you may read and write"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (ulimit -n)"),
}
"""Code of a refusal -> what helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Reports the failure of a command and returns its exit code."""

    as_json: bool
    """`True` to print a JSON document on standard output."""
    keys: tuple[str, ...]
    """Further keys of the command's document; `null` after a failure."""

    def expected(self, error: StrettoError) -> int:
        """Report a `StrettoError`."""
        problems = error.problems if isinstance(error, RecipeError) else ()
        if self.as_json:
            self._document(problems, str(error))
        elif problems:
            screen(error=True).print(problem_list(problems), end="")
        else:
            screen(error=True).print(plain(str(error)) or type(error).__name__, style="red")
        return error.exit_code

    def usage(self) -> int:
        """Report a malformed command line; Typer has printed the reason."""
        reason, fix = "the command line is malformed; standard error has the reason", "run the command with --help"
        if self.as_json:
            self._document((Problem(field="arguments", reason=reason, fix=fix),), reason)
        return 2

    def lost(self, why: str) -> int:
        """Report output that could not be written."""
        text = f"standard output: cannot be written ({why})\n    fix: free space there, or redirect the output"
        screen(error=True).print(text, style="red")
        return 1

    def disk(self, error: OSError) -> int:
        """Report an operating system error at an unexpected place."""
        where = error.filename or "this machine"
        text = f"{where}: {error.strerror}\n    fix: {FIXES.get(error.errno or 0, 'repair the disk')}, then try again"
        if error.errno in (errno.EACCES, errno.EPERM):  # which no traceback explains
            return self.expected(StrettoError(text))
        return self.expected(StrettoError(f"{text}\n{_keep(error)}"))

    def bug(self, error: Exception) -> int:
        """Report a bug in stretto; the traceback goes to a file."""
        first = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        text = f"this is a bug in stretto, not in your recipe: {plain(first)}\n{_keep(error)}"
        if self.as_json:
            self._document((), text)
        else:
            screen(error=True).print(text, style="red")
        return 1

    def _document(self, problems: Sequence[Problem], text: str) -> None:
        listed = [asdict(problem) for problem in problems]
        with suppress(OutputLost):  # Reported at the end of the command; the exit code of this failure stays.
            document({"ok": False, "problems": listed, "error": text} | dict.fromkeys(self.keys))


def _keep(error: Exception) -> str:
    """Write the traceback to a temporary file and return a line with its path."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="stretto-bug-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"stretto {__version__}, Python {platform.python_version()}, {platform.platform()}\n\n")
            file.writelines(traceback.format_exception(error))
    except OSError as reason:
        return f"the details could not be written: {reason.strerror}"
    return f"the details are in {file.name}; please attach this file to a bug report"
