"""Whether programs that a run may start are there and work: Ray for several processes, the sandbox for model code,
a compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from stretto.checks.machine.base import Check, MachineCheck
from stretto.errors import SandboxError
from stretto.extras import install
from stretto.kernels.cpu.compiler import compiler, load
from stretto.recipe.schema import ProgramReward, Recipe
from stretto.sandbox.isolated.programs import look
from stretto.sandbox.isolated.protection import Protection

LOCKED_IN = (
    "code that a model wrote has processes, files, network and users of its own, and its system calls are filtered"
)
UNLOCK = (
    "allow namespaces (as root, or by the settings of your kernel or container: user namespaces, mounts) or install "
    "bubblewrap, and install libseccomp; or run in a virtual machine that may be lost"
)

SLOWER = "steps of a CPU take up to 1.5 times as long without the kernels that it would compile"
"""What that costs: SmolLM2, 64 answers on two cores."""

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


def kernels_can_be_compiled(setting: MachineCheck) -> Check | None:
    """Those with which a CPU decodes and trains; tried, since a compiler may lack OpenMP."""
    if setting.uses_gpu or sys.platform != "linux":
        return None
    found = load(bf16=True)
    if not isinstance(found, str):
        text = f"{Path(compiler()[0]).name} compiles the kernels for CPUs"
        return Check(name="C compiler", ok=True, text=text)
    fix = "install gcc (apt install gcc), or name a gcc in CC, or go on without"
    return Check(name="C compiler", ok=False, text=f"{found}; {SLOWER}", fix=fix)


def sandbox_locks_in(setting: MachineCheck) -> Check | None:
    """What stands between this machine and the code that a model writes, where a recipe runs such code."""
    return sandbox_check(look) if setting.recipe is None or runs_programs(setting.recipe) else None


def sandbox_check(find: Callable[[], Protection]) -> Check:
    """Starts a sandbox and says what it lacks."""
    try:
        missing = find().missing
    except SandboxError as error:
        return Check(name="sandbox", ok=False, text=f"no sandbox for code that a model wrote: {error}", fix=UNLOCK)
    if not missing:
        return Check(name="sandbox", ok=True, text=LOCKED_IN)
    text = f"code that a model wrote is not locked in: {'; '.join(missing)}"
    return Check(name="sandbox", ok=False, text=text, fix=UNLOCK)


def runs_programs(recipe: Recipe) -> bool:
    """True if code that a model wrote runs with this recipe."""
    return any(isinstance(part, ProgramReward) for part in recipe.rewards) or recipe.environment.kind == "tools"
