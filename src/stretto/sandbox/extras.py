"""Packages that not everybody needs, and so are not installed with the project: which extra brings them.

Asked without importing anything, so that `stretto check` can say at once what is missing.
"""

from __future__ import annotations

from importlib.util import find_spec

from stretto.errors import Problem

EXTRAS = {"datasets": "tasks", "reasoning_gym": "tasks", "math_verify": "tasks"}
"""Package -> the extra of this project that installs it."""


def missing_extra(package: str, field: str) -> Problem | None:
    """What to install before `field` can have its value, or none if the package is there."""
    if find_spec(package) is not None:
        return None
    extra = EXTRAS[package]
    reason = f"needs the package {package}, which is not installed"
    return Problem(field=field, reason=reason, fix=f"needs the extra: pip install 'stretto[{extra}]'")
