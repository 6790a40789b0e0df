"""Metrics to something of the user's: a class by module:name with `metrics(step, values)` and `close()`.

If it has `recipe(keys)` and `samples(step, rows)` too, it gets these. It is a sink of the journal. What it raises costs
its own numbers, not the run, and is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stretto import plugins
from stretto.errors import RecipeError
from stretto.plugin_kinds import KINDS
from stretto.report.loggers import TolerantSink

FIELD = "log"


def own_logger(name: str, folder: Path, folders: Sequence[str], note: Callable[[str], None]) -> TolerantSink:
    """The logger of a run's folder. RecipeError if it cannot be made or is none."""
    made = plugins.resolve("logger", name, folders, field=FIELD)
    try:
        sink = made(folder)
    except Exception as error:
        reason = f"{name} raised {plugins.describe_error(error, folders)}"
        raise RecipeError.of(FIELD, reason, "mend it; it is called with the run's folder") from error
    if lacking := [method for method in ("metrics", "close") if not callable(getattr(sink, method, None))]:
        reason = f"{name} made {type(sink).__name__}, which has no {' and no '.join(lacking)}"
        raise RecipeError.of(FIELD, reason, f"write {KINDS['logger'].wanted}")
    return TolerantSink(sink, name, note, partial(plugins.describe_error, folders=folders))
