"""Functions that were given to `stretto.train` as objects: the kinds that a recipe has for them, and what they are.

Those that nobody can import are `<function NAME>` in a recipe, and whoever goes on with the run gives them again. A run
notes their source among its inputs, so that another one is not taken for the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
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
    algorithm: str | None = None
    """The name of an algorithm that only this process knows."""
    callbacks: tuple[Callable[[StepEvent], object], ...] = ()
    """What is called after each step."""
    server: ForkServer | None = None
    """Makes the processes that the reward functions run in; none where there are none."""

    @property
    def kinds(self) -> frozenset[str]:
        """What a recipe may call them."""
        return frozenset(self.rewards) | frozenset(self.environments)

    @property
    def nameless(self) -> dict[str, Callable[..., Any]]:
        """Functions that nobody can import: kind -> function."""
        return {kind: each for kind, each in {**self.rewards, **self.environments}.items() if ":" not in kind}

    def sources(self, kinds: Collection[str]) -> dict[str, str | None]:
        """Kind -> what the source of its function comes to, where no file says it; none where Python keeps none."""
        return {kind: _digest(function) for kind, function in self.nameless.items() if kind in kinds}


NONE_GIVEN = UserFunctions()
"""The functions of a run whose recipe names everything."""


def _digest(function: Callable[..., Any]) -> str | None:
    try:
        code = inspect.getsource(inspect.unwrap(function) if inspect.isroutine(function) else type(function))
    except (OSError, TypeError, SyntaxError, TokenError):  # the file may have changed since, or be another
        return None
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()


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
