"""Constants that were measured on this machine: a small file under `.stretto/rates`, found again by machine and device.

`stretto plan --measure` writes it. Whoever prices a plan for devices of that kind on this machine reads it, and says
so; on another machine, or for other devices, it is as if it were not there. A cluster file's own rates come first.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError
from stretto.placement.cluster import Cluster
from stretto.placement.rates import Rates

FOLDER = Path(".stretto", "rates")
"""Beside the tables of V*."""
ELSEWHERE = "the numbers of CPU devices are another machine's until `stretto plan --measure` has run on this machine"
"""What is said where nothing was measured and no data sheet exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCalibration:
    """What was measured."""

    machine: str
    """On which machine."""
    device: str
    """The devices that were measured."""
    model: str
    """The model that was measured."""
    date: str
    """When."""
    steps: int
    """How many steps were taken for it."""
    error: float
    """Median relative error with which the constants tell the parts of those steps."""
    rates: Mapping[str, float]
    """The constants by name."""

    def __str__(self) -> str:
        return f"constants measured on this machine on {self.date} ({self.model}, {self.steps} steps, {self.machine})"


def this_machine() -> str:
    """The processor and how many cores there are, which is what constants depend on."""
    return f"{processor()}, {os.cpu_count()} cores"


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def path_of(device: str) -> Path:
    """Where constants of such devices on this machine are kept."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', f'{this_machine()} {device}'.lower()).strip('-')}.json"


def keep(found: SavedCalibration) -> Path:
    """Writes them down, in place of earlier ones."""
    path = path_of(found.device)
    draft = path.with_suffix(".draft")
    told = {name: getattr(found, name) for name in SavedCalibration.__slots__} | {"rates": dict(found.rates)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise RecipeError.of("--measure", f"{path} cannot be written: {error.strerror}", "run it elsewhere") from None
    return path


def kept_for(cluster: Cluster) -> SavedCalibration | None:
    """What was measured here with the devices of a cluster, or none; all of them must be of one kind."""
    names = {device.name for device, _ in cluster.pools()}
    if len(names) != 1:
        return None
    path = path_of(names.pop())
    try:
        told: Any = json.loads(path.read_text(encoding="utf-8"))
        found = SavedCalibration(**told)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise _spoiled(path, str(error)) from None
    if not isinstance(found.rates, dict) or not all(isinstance(value, int | float) for value in found.rates.values()):
        raise _spoiled(path, "its rates are no numbers")
    Rates.of(found.rates, field=f"{path}: rates")
    return found if found.machine == this_machine() else None


def _spoiled(path: Path, why: str) -> RecipeError:
    return RecipeError.of(str(path), f"cannot be read: {why}", "remove it, and measure again")


def as_measured(cluster: Cluster) -> tuple[Cluster, str | None]:
    """A cluster with the constants that were measured for it, and where they come from; its own come first."""
    found = kept_for(cluster)
    if rates := {**(found.rates if found else {}), **cluster.rates}:
        # Constants that were measured before there was one for cores that work alone have its effect inside.
        cluster = replace(cluster, rates={"lone": 0.0, **rates})
    return cluster, str(found) if found else ELSEWHERE if borrowed(cluster) else None


def borrowed(cluster: Cluster) -> bool:
    """True if the constants of these devices are another machine's, where none were measured here."""
    return not cluster.rates and any(not device.kind.is_alike_everywhere for device, _ in cluster.pools())
