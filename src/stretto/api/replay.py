"""`stretto.api.replay.replay`: the training half of a recorded step once more, and the file for a report of a bug."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stretto import threads
from stretto.api.run import Run
from stretto.api.targets import place_of
from stretto.errors import RecipeError

if TYPE_CHECKING:
    from stretto.runtime.replay import Replay


def replay(
    folder: str | os.PathLike[str] | Run,
    step: int,
    *,
    bundle: Path | None = None,
    text: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> Replay:
    """What becomes of a recorded step on one process; with `bundle` packed into that file, with or without text."""
    if bundle is not None and bundle.exists():
        raise RecipeError.of("--bundle", f"{bundle} exists already", "name another file")
    from stretto.engines.scripted import ScriptedEngine
    from stretto.runtime.bundle import pack
    from stretto.runtime.replay import replay as replayed

    place = place_of(folder)
    silent = lambda policy: ScriptedEngine(lambda request: ())  # noqa: E731  # nothing is generated
    found = threads.outside_loops(replayed, place, step, note=note, make_engine=silent)
    if bundle is not None:
        pack(found, bundle, text=text)
    return found
