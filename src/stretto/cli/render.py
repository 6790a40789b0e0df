"""How results and failures look: JSON documents on standard output, readable lines on standard error.

Text from recipes, data and models is shown as it is, never read as markup, and characters that would move a
terminal's cursor are replaced.
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

if TYPE_CHECKING:  # loaded where something is shown; a document is printed without
    from rich.console import Console
    from rich.text import Text


def screen(*, error: bool = False) -> Console:
    """A console that shows text as it is."""
    from rich.console import Console

    return Console(stderr=error, markup=False, highlight=False, emoji=False, soft_wrap=True)


def plain(text: str) -> str:
    """Text without characters that would move a terminal's cursor."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def note(text: str) -> None:
    """A line that asks for nothing, on standard error."""
    screen(error=True).print(f"note: {plain(text)}", style="yellow")


def show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """What a library or stretto warns of, without the place in its source."""
    note(str(message))


def shown(value: object) -> str:
    """A value of a recipe as YAML would have it on one line."""
    return json.dumps(value, ensure_ascii=False)


_for_documents: list[TextIO] = []
"""Where documents go, in commands that print nothing else."""


@contextmanager
def documents_alone() -> Iterator[None]:
    """Within it documents go to standard output, and to standard error what anybody else prints, a plug-in perhaps."""
    _for_documents.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _for_documents.pop()


def document(content: Mapping[str, Any]) -> None:
    """The one JSON document of a command that was asked for one; a number that is not finite is null."""
    print(to_json(content, indent=2), file=_for_documents[-1] if _for_documents else sys.stdout)


def problem_list(problems: Sequence[Problem]) -> Text:
    """Every problem: where, why, and what to do."""
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
"""What the system says of a disk that is full, broken, away or forbidden, and of too many open files."""


FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it a file that you may read and write"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (ulimit -n)"),
}
"""Code of a refusal -> what helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Shows why a command ends early, and returns its exit code."""

    as_json: bool
    """True to print a JSON document on standard output, for programs."""
    keys: tuple[str, ...]
    """What else the command's document would hold; null here."""

    def expected(self, error: StrettoError) -> int:
        """Something that stretto raised on purpose."""
        problems = error.problems if isinstance(error, RecipeError) else ()
        if self.as_json:
            self._document(problems, str(error))
        elif problems:
            screen(error=True).print(problem_list(problems), end="")
        else:
            screen(error=True).print(plain(str(error)) or type(error).__name__, style="red")
        return error.exit_code

    def usage(self) -> int:
        """A command line that was not understood; the reason is on standard error already."""
        reason, fix = "the command line was not understood; standard error says why", "run the command with --help"
        if self.as_json:
            self._document((Problem(field="arguments", reason=reason, fix=fix),), reason)
        return 2

    def lost(self, why: str) -> int:
        """Standard output did not take what the command was run for."""
        text = f"standard output: cannot be written ({why})\n    fix: make room there, or send it elsewhere"
        screen(error=True).print(text, style="red")
        return 1

    def disk(self, error: OSError) -> int:
        """The system refused to read or write, at a place that expected no such thing."""
        where = error.filename or "this machine"
        text = f"{where}: {error.strerror}\n    fix: {FIXES.get(error.errno or 0, 'mend the disk')}, then try again"
        if error.errno in (errno.EACCES, errno.EPERM):  # which no traceback explains
            return self.expected(StrettoError(text))
        return self.expected(StrettoError(f"{text}\n{_keep(error)}"))

    def bug(self, error: Exception) -> int:
        """A failure of ours; the traceback goes to a file, not to the screen."""
        first = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        text = f"this is a bug in stretto, not in your recipe: {plain(first)}\n{_keep(error)}"
        if self.as_json:
            self._document((), text)
        else:
            screen(error=True).print(text, style="red")
        return 1

    def _document(self, problems: Sequence[Problem], text: str) -> None:
        listed = [asdict(problem) for problem in problems]
        with suppress(OutputLost):  # told at the end of the command; this failure's exit code stays
            document({"ok": False, "problems": listed, "error": text} | dict.fromkeys(self.keys))


def _keep(error: Exception) -> str:
    """Writes the traceback to a file of its own and says where it is."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="stretto-bug-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"stretto {__version__}, Python {platform.python_version()}, {platform.platform()}\n\n")
            file.writelines(traceback.format_exception(error))
    except OSError as reason:
        return f"the details could not be written: {reason.strerror}"
    return f"the details are in {file.name}; please send them along when you report it"
