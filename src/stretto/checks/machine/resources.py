"""Whether there is enough of what runs out in silence: threads, open files, shared memory, disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from stretto.checks.machine.base import GB, Check, MachineCheck
from stretto.checks.machine.load import cpu_share
from stretto.models.size import WIDTHS, parameters
from stretto.recipe.schema import Recipe

FILES, FILES_SPREAD = 256, 4096
"""Open files that a run needs: in one process, and in several, which hold connections to each other."""

SHARED = GB
"""Bytes of /dev/shm that processes need to hand each other tensors. A container has 64 MB unless told otherwise."""


BUCKET = GB // 2
"""Bytes of weights that vLLM is given at once."""


def threads_have_cores(setting: MachineCheck) -> Check:
    """More threads than cores wait for each other at every operation. What is not said is picked by what is free."""
    machine = setting.machine
    given = machine.environment.get("OMP_NUM_THREADS", "")
    if not given:
        return Check(name="threads", ok=True, text=str(cpu_share(machine.cores, machine.busy)))
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    fix = "leave OMP_NUM_THREADS out, and a run takes the cores that are free"
    if not (given.isdigit() and int(given) > 0):
        return Check(name="threads", ok=False, text=f"OMP_NUM_THREADS={given!r} is no number of threads", fix=fix)
    threads = int(given)
    if threads <= machine.cores:
        return Check(name="threads", ok=True, text=f"{threads} thread{'' if threads == 1 else 's'} on {cores}")
    text = f"torch would start {threads} threads (OMP_NUM_THREADS says so), and this process may use {cores}"
    return Check(name="threads", ok=False, text=text, fix=fix)


def files_can_be_opened(setting: MachineCheck) -> Check:
    """Every connection is an open file."""
    limit, need = setting.machine.files, FILES_SPREAD if setting.devices > 1 else FILES
    if limit is None or limit >= need:
        text = f"{'any number of' if limit is None else limit} files may be open at once"
        return Check(name="open files", ok=True, text=text)
    text = f"{limit} files may be open at once, and {need} are needed"
    return Check(name="open files", ok=False, text=text, fix=f"ulimit -n {need}, or raise the limit of your system")


def memory_is_shared(setting: MachineCheck) -> Check | None:
    """Processes on one host hand each other tensors by way of /dev/shm."""
    shared = setting.machine.shared
    if setting.devices == 1 or shared is None:
        return None
    if shared >= SHARED:
        return Check(name="shared memory", ok=True, text=f"{shared / GB:.1f} GB free in /dev/shm")
    text = f"{shared / GB:.2f} GB free in /dev/shm, and several processes need at least {SHARED / GB:.0f} GB"
    return Check(name="shared memory", ok=False, text=text, fix="start the container with --shm-size=8g, or clear it")


def engine_files_have_room(setting: MachineCheck) -> Check | None:
    """vLLM is given weights in files of /dev/shm, each worker its own: all at its start, and a bucket at a publish."""
    recipe, shared = setting.recipe, setting.machine.shared
    if recipe is None or recipe.engine.kind != "vllm" or shared is None:
        return None
    if getattr(recipe.engine, "url", None) is not None:  # only an adapter travels, by way of the run's folder
        return None
    if (count := parameters(recipe.model.name, setting.root)) is None:
        return None
    need = setting.devices * (count * WIDTHS[recipe.model.dtype] + BUCKET)
    told = f"{shared / GB:.2f} GB free in /dev/shm, and vLLM is given its weights in files of {need / GB:.2f} GB there"
    if shared >= need:
        return Check(name="engine files", ok=True, text=told)
    fix = f"start the container with --shm-size={-(-need // GB) + 1}g; they go by way of a slower disk otherwise"
    return Check(name="engine files", ok=False, text=told, fix=fix)


def disk_has_room(setting: MachineCheck) -> Check | None:
    """Checkpoints fit, with what guards.min_disk_gb keeps free."""
    recipe = setting.recipe or Recipe()
    folder = Path.cwd() / ("runs" if recipe.run.folder == "auto" else recipe.run.folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, each = shutil.disk_usage(there).free / GB, checkpoint_gb(setting)
    kept = recipe.checkpoint.keep + (recipe.checkpoint.best is not None)
    need = recipe.guards.min_disk_gb + (kept + 1) * each  # one more while it is written
    told = f"{free:.1f} GB free in {there}"
    if each:
        told = f"{told}; a checkpoint takes about {each:.1f} GB, and {kept} are kept"
    if free >= need:
        return Check(name="disk", ok=True, text=told)
    fix = "make room, name another run.folder, or lower checkpoint.keep"
    return Check(name="disk", ok=False, text=f"{told}, so {need:.1f} GB are needed", fix=fix)


def checkpoint_gb(setting: MachineCheck) -> float:
    """A checkpoint in GB, where all weights are trained and their number is known: weights, masters and moments."""
    recipe = setting.recipe
    if recipe is None or recipe.model.adapter is not None:
        return 0.0
    if (count := parameters(recipe.model.name, setting.root)) is None:
        return 0.0
    width = WIDTHS[recipe.model.dtype]
    return count * (width + 3 * max(4, width)) / GB
