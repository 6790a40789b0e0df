"""Functions that were given to `stretto.train` as objects: the kinds that a recipe has for them, and what they are.

Those that nobody can import are `<function NAME>` in a recipe, and whoever goes on with the run gives them again. A run
notes their source among its inputs, so that another one is not taken for the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

from stretto.environments.base import Environment
from stretto.errors import StrettoError
from stretto.sandbox.fork_server import ForkServer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A step that has ended, as callbacks get it."""

    step: int
    """The step's number; the first is 1."""
    steps: int
    """Steps of the run."""
    metrics: Mapping[str, float]
    """The step's metrics by their names in metrics.jsonl."""
    folder: Path
    """The run's folder."""


Callback = Callable[[StepEvent], object] | Callable[[int, Mapping[str, float]], object]
"""Called after each step, with the event, or with step and metrics where it takes two arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunctions:
    """Everything that was given as an object."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Kind in the recipe -> reward function."""
    environments: Mapping[str, Environment] = field(default_factory=dict)
    """Kind in the recipe -> environment."""
    nameless: Mapping[str, object] = field(default_factory=dict)
    """What was given and nobody can import, an algorithm too: kind in the recipe -> the function, class or object."""
    callbacks: tuple[Callable[[StepEvent], object], ...] = ()
    """What is called after each step."""
    server: ForkServer | None = None
    """Makes the processes that the reward functions run in; none where there are none."""

    @property
    def kinds(self) -> frozenset[str]:
        """What a recipe may call them."""
        return frozenset(self.rewards) | frozenset(self.environments) | frozenset(self.nameless)

    def sources(self, kinds: Collection[str]) -> dict[str, str | None]:
        """Kind -> what the source of its function comes to, where no file says it; none where Python keeps none."""
        return {kind: _digest(given) for kind, given in self.nameless.items() if kind in kinds}


NONE_GIVEN = UserFunctions()
"""The functions of a run whose recipe names everything."""


def _digest(given: object) -> str | None:
    try:
        code = _source(given)
    except (OSError, TypeError, SyntaxError, TokenError):  # the file may have changed since, or be another
        return None
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()


def _source(given: object) -> str:
    """The source of a function or class, or of the class of anything else; with what a partial fills in."""
    if isinstance(given, partial):
        filled = [*enumerate(given.args), *sorted(given.keywords.items())]
        return "\n".join([_source(given.func), *(f"{place}: {_filled(value)}" for place, value in filled)])
    if inspect.ismethod(given):
        given = given.__self__
    if inspect.isroutine(given):
        return inspect.getsource(inspect.unwrap(given))
    return inspect.getsource(given if inspect.isclass(given) else type(given))


def _filled(value: object) -> str:
    """A plain value as it is, anything else by its source."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return _source(value)


class Callbacks:
    """Calls them, and says once of each that it fails."""

    def __init__(
        self, callbacks: Collection[Callable[[StepEvent], object]], *, strict: bool, note: Callable[[str], None]
    ) -> None:
        """With `strict`, a failure ends the run."""
        self._callbacks, self._strict, self._note = tuple(callbacks), strict, note
        self._failed: set[int] = set()

    def __call__(self, event: StepEvent) -> None:
        """After a step. A KeyboardInterrupt in one of them is Ctrl-C."""
        for index, callback in enumerate(self._callbacks):
            try:
                callback(event)
            except KeyboardInterrupt:
                if (task := asyncio.current_task()) is None:
                    raise
                task.cancel()
            except Exception as error:  # the user's code may raise anything
                name = getattr(callback, "__name__", type(callback).__name__)
                text = f"callback {name}: step {event.step}: {type(error).__name__}: {error}"
                if self._strict:
                    fix = "mend it, or leave run.callbacks_strict out"
                    raise StrettoError(f"{text}\n    fix: {fix}") from error
                if index not in self._failed:
                    self._failed.add(index)
                    self._note(f"{text}; the run goes on, and this is said once")
