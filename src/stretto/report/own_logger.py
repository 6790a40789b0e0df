"""Metrics to something of the user's: a class by module:name with `metrics(step, values)` and `close()`.

It is a sink of the journal. What it raises costs its own numbers, not the run, and is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto import plugins
from stretto.errors import RecipeError

FIELD = "log"


class OwnLogger:
    """Passes numbers on."""

    def __init__(self, sink: Any, name: str, folders: Sequence[str], note: Callable[[str], None]) -> None:
        self.sink, self.name, self.folders, self.note = sink, name, folders, note
        self.failed = False

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of a step."""
        self._try("metrics", step, dict(values))

    def close(self) -> None:
        """The end of the run."""
        self._try("close")

    def _try(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.sink, method)(*arguments)
        except Exception as error:
            if not self.failed:
                what = plugins.describe_error(error, self.folders)
                self.note(f"{self.name} raised {what} in {method}; the run goes on, and more of it is not told")
            self.failed = True


def own_logger(name: str, folder: Path, folders: Sequence[str], note: Callable[[str], None]) -> OwnLogger:
    """The logger of a run's folder. RecipeError if it cannot be made or is none."""
    made = plugins.resolve("logger", name, folders, field=FIELD)
    try:
        sink = made(folder)
    except Exception as error:
        reason = f"{name} raised {plugins.describe_error(error, folders)}"
        raise RecipeError.of(FIELD, reason, "mend it; it is called with the run's folder") from error
    if lacking := [method for method in ("metrics", "close") if not callable(getattr(sink, method, None))]:
        reason = f"{name} made {type(sink).__name__}, which has no {' and no '.join(lacking)}"
        raise RecipeError.of(FIELD, reason, f"write {plugins.KINDS['logger'].wanted}")
    return OwnLogger(sink, name, folders, note)
