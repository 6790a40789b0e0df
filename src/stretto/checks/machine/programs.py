"""Whether programs that a run may start are there and work: Ray for several processes, bubblewrap for a sandbox."""

from __future__ import annotations

import shutil
import subprocess

from packaging.version import InvalidVersion, Version

from stretto.checks.machine.base import Check, MachineCheck
from stretto.extras import install

PATIENCE = 2.0
"""Seconds that a sandbox may take to start."""

SANDBOX = ("--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
"""What isolation asks of bubblewrap: namespaces of its own, and nothing to write to."""

RAY = "2.52"
"""The first Ray that refuses who does not have a cluster's token; pyproject.toml asks for it, too."""

TOO_OLD = f"ray {{}} is installed, and only {RAY} and later refuse whoever does not have the token of a run"
"""What is said of an older version."""


def ray_is_installed(setting: MachineCheck) -> Check | None:
    """Several devices are several processes, which Ray starts."""
    if setting.recipe is None or setting.devices == 1:
        return None
    if version := setting.machine.versions.get("ray"):
        if too_old(version):
            return Check(name="ray", ok=False, text=TOO_OLD.format(version), fix=f"pip install 'ray>={RAY}'")
        return Check(name="ray", ok=True, text=f"ray {version} is installed")
    text = f"the recipe uses {setting.devices} devices, and ray, which starts their processes, is not installed"
    return Check(name="ray", ok=False, text=text, fix=f"{install('ray')}, or use one device")


def too_old(version: str) -> bool:
    """True for a Ray that lets in anybody; one that is no version is nobody's to judge."""
    try:
        return Version(version) < Version(RAY)
    except InvalidVersion:
        return False


def bubblewrap_starts(setting: MachineCheck) -> Check | None:
    """Where bubblewrap is installed, the kernel also lets it make namespaces."""
    program = shutil.which("bwrap")
    return None if program is None else sandbox_check(program)


def sandbox_check(program: str) -> Check:
    """Runs `true` in a sandbox."""
    fix = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or your container's settings)"
    try:
        done = subprocess.run(
            [program, *SANDBOX, "true"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
        )
        why = "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1:] or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        why = f"it did not start within {PATIENCE:g} s"
    except OSError as error:
        why = error.strerror or str(error)
    if not why:
        return Check(name="bubblewrap", ok=True, text="bubblewrap can isolate a program")
    reason = why if isinstance(why, str) else why[0]
    return Check(name="bubblewrap", ok=False, text=f"bubblewrap is installed, and cannot start: {reason}", fix=fix)
