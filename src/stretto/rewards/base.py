"""The seam between the parts of a reward and whoever combines them.

A verdict is one number about one trajectory. It is asynchronous because some verdicts run in other processes. What it
cannot judge it refuses with a `StrettoError` or a `ValueError`; it has no number that would mean "I do not know".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stretto.types import Trajectory

Verdict = Callable[[Trajectory], Awaitable[float]]
"""One part of a reward: what this trajectory is worth, usually between 0 and 1."""
