"""Whether the libraries that everything stands on are there, in versions that work, and nothing beside breaks them.

Versions are read from the metadata of what is installed; the ranges are those that stretto itself was installed with.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from stretto.checks.machine.base import Check, MachineCheck, MachineFacts

CORE = ("torch", "transformers", "peft")
"""What nothing works without."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""What transformers loads where it is present: one that was built for another torch then breaks the import."""

PATIENCE = 30.0
"""Seconds that the import of a companion may take."""


def core_versions(setting: MachineCheck) -> Check | None:
    """torch, transformers and peft are installed, in the ranges that stretto was written for."""
    machine = setting.machine
    wanted = {asked.name: asked for asked in _requirements(machine, "stretto") if asked.name in CORE}
    wrong = [asked for name, asked in wanted.items() if not _fits(asked, machine.versions.get(name))]
    if not wanted:
        return None
    told = [f"{name} {machine.versions.get(name, 'is missing')}" for name in wanted]
    if not wrong:
        return Check(name="packages", ok=True, text=", ".join(told))
    reasons = [f"{asked} is needed, and {machine.versions.get(asked.name, 'none')} is installed" for asked in wrong]
    fix = f"pip install {' '.join(repr(str(asked)) for asked in wrong)}"
    return Check(name="packages", ok=False, text="; ".join(reasons), fix=fix)


def companions_match(setting: MachineCheck) -> Check | None:
    """What was built for another torch is imported once, in a process of its own, to see whether it breaks."""
    present = [name for name in COMPANIONS if name in setting.machine.versions]
    if not present:
        return None
    broken = {name: why for name in suspects(setting.machine) if (why := import_error(name))}
    if not broken:
        return Check(name="companions", ok=True, text=f"{', '.join(present)} can be imported beside this torch")
    why = next(iter(broken.values()))
    return Check(
        name="companions",
        ok=False,
        text=f"{', '.join(broken)} cannot be imported beside this torch, which breaks transformers too ({why})",
        fix=f"pip uninstall {' '.join(broken)}: stretto uses none of them",
    )


def suspects(machine: MachineFacts) -> list[str]:
    """Companions that were built for another torch, by what their metadata says."""
    torch = machine.versions.get("torch")
    if torch is None:
        return []
    return [
        name
        for name in COMPANIONS
        if (version := machine.versions.get(name)) is not None
        and (
            _build(version) != _build(torch) or not all(_fits(r, torch) for r in _requirements(machine, name, "torch"))
        )
    ]


def import_error(module: str) -> str | None:
    """The last line of what importing a module says, or none if that works."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {PATIENCE:g} s"
    if done.returncode == 0:
        return None
    return next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")


def _build(version: str) -> str | None:
    """What a wheel was built for, such as `cpu` or `cu130`, where its version says so."""
    try:
        return Version(version).local
    except InvalidVersion:
        return None


def _requirements(machine: MachineFacts, name: str, of: str | None = None) -> Iterator[Requirement]:
    """What a distribution asks for without extras; of one other, if named."""
    for text in machine.needs.get(name, ()):
        try:
            asked = Requirement(text)
        except InvalidRequirement:
            continue
        if of in (None, asked.name) and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
            yield asked


def _fits(asked: Requirement, version: str | None) -> bool:
    """True if a version is in the range; one that is no version is nobody's to judge."""
    try:
        return version is not None and asked.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True
