"""The preflight: is this machine fit for a recipe, in one plain sentence per question, before anything heavy loads.

`CHECKS` is the whole list, which `stretto doctor` runs; a room that needs more of a machine adds a function there.
`AT_START` are those that are quick and whose failure would end a run anyway, late and in other words: `train` and
`resume` run them first and refuse. `TOLD_AT_START` leave devices without work or doors open, which a run may do, but
not silently. What only makes a run slow is the doctor's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stretto.checks.machine import devices, engine_python, network, packages, programs, resources
from stretto.checks.machine.base import Check, Function, MachineCheck
from stretto.checks.machine.facts import look
from stretto.checks.machine.load import busy_cores, cpu_share
from stretto.errors import DeadlineError, Problem, RecipeError
from stretto.openmp import wait_passively
from stretto.recipe.schema import Recipe

CHECKS: tuple[Function, ...] = (
    packages.core_versions,
    packages.companions_match,
    devices.devices_are_visible,
    devices.torch_can_use_the_gpu,
    devices.no_device_is_forgotten,
    devices.model_fits,
    resources.threads_have_cores,
    resources.files_can_be_opened,
    resources.memory_is_shared,
    resources.disk_has_room,
    network.loopback_is_reached,
    network.own_address_is_reached,
    network.cluster_is_reached,
    network.cluster_has_a_token,
    programs.ray_is_installed,
    engine_python.engine_is_there,
    resources.engine_files_have_room,
    programs.kernels_can_be_compiled,
    programs.sandbox_locks_in,
)
"""In the order in which they are shown."""

AT_START: tuple[Function, ...] = (
    packages.core_versions,
    packages.companions_match,
    devices.model_fits,
    engine_python.engine_is_there,
)
"""Checks at the start of every run."""

TOLD_AT_START: tuple[Function, ...] = (
    devices.torch_can_use_the_gpu,
    devices.no_device_is_forgotten,
    network.cluster_has_a_token,
    programs.sandbox_locks_in,
    resources.engine_files_have_room,
)
"""Checks at the start of every run, which goes on whatever they say."""

AT_START_OF_SEVERAL: tuple[Function, ...] = (
    resources.files_can_be_opened,
    resources.memory_is_shared,
    network.loopback_is_reached,
    network.own_address_is_reached,
    network.cluster_is_reached,
    programs.ray_is_installed,
)
"""Also of a run of several processes."""


def examine(setting: MachineCheck, checks: Sequence[Function] = CHECKS) -> list[Check]:
    """What these checks say; those that do not concern the recipe say nothing."""
    return [found for check in checks if (found := check(setting)) is not None]


def examined(recipe: Recipe | None, *, root: Path) -> list[Check]:
    """Every check, on this machine."""
    return examine(MachineCheck(machine=replace(look(), busy=busy_cores()), recipe=recipe, root=root))


def admit(recipe: Recipe, *, root: Path) -> list[str]:
    """What to tell about a run of this recipe on this machine; a RecipeError has everything that would end it.

    A DeadlineError if that is nothing but somebody who does not answer.
    """
    setting = MachineCheck(machine=look(), recipe=recipe, root=root)
    checks = AT_START + (AT_START_OF_SEVERAL if setting.devices > 1 else ())
    if wrong := [found for found in examine(setting, checks) if not found.ok]:
        if all(found.silent for found in wrong):
            raise DeadlineError("\n".join(f"start: {found.text}\n    fix: {found.fix}" for found in wrong))
        raise RecipeError(*(Problem(field=w.name, reason=w.text, fix=w.fix or "stretto doctor") for w in wrong))
    if cpu_share(setting.machine.cores, busy_cores()).competes:
        wait_passively()  # before torch is loaded
    shared = devices.shared_cores(recipe.placement, setting.machine.cores)
    told = [f"{found.text}; {found.fix}" for found in examine(setting, TOLD_AT_START) if not found.ok]
    return [*([shared] if shared else []), *told]
