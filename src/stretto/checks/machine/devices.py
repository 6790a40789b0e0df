"""Whether there are devices for what a recipe asks, torch can use them, none is forgotten, and a model fits one."""

from __future__ import annotations

from stretto.checks.machine.base import GB, Check, MachineCheck
from stretto.errors import RecipeError
from stretto.models.size import WIDTHS, parameters
from stretto.placement.build import OPEN, named_by_cells
from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import DeviceKind, find_device, kind_of
from stretto.recipe.schema import Placement, Recipe


def devices_are_visible(setting: MachineCheck) -> Check | None:
    """As many as the recipe asks for. Those of several hosts are counted by Ray, when a run starts."""
    if setting.hosts > 1:
        return None
    gpus, cores, count = setting.machine.gpus, setting.machine.cores, setting.devices
    told = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}" if gpus else "no GPU"
    kind = f" ({gpus[0].name}, {gpus[0].memory / GB:.0f} GB)" if gpus else ""
    seen = len(gpus) if setting.uses_gpu else cores
    text = f"{told}{kind} and {cores} CPU core{'' if cores == 1 else 's'} can be used"
    if setting.recipe is not None and (shared := shared_cores(setting.recipe.placement, cores)):
        return Check(name="devices", ok=True, text=f"{text}; {shared}")
    if count <= seen:
        return Check(name="devices", ok=True, text=text)
    kind = f"{'GPU' if setting.uses_gpu else 'CPU core'}{'' if count == 1 else 's'}"
    fix = "use fewer, or make the others visible: CUDA_VISIBLE_DEVICES, or the options of your container"
    return Check(name="devices", ok=False, text=f"need {count} {kind}, see {seen}", fix=fix)


def shared_cores(section: Placement, cores: int) -> str | None:
    """A sentence about CPU devices that are more than the cores of this machine; `None` if each has its own."""
    if section.cluster in OPEN:
        count = sum(kind_of(device) is DeviceKind.CPU for device in named_by_cells(section))
        threads = count
    else:
        cluster = parse_cluster(section.cluster)
        each = [d for d in cluster.devices.values() if d.kind is DeviceKind.CPU] if len(cluster.hosts) == 1 else []
        count, threads = len(each), sum(device.threads or 1 for device in each)
    if count == 0 or threads <= cores:
        return None
    asked = f"{count} CPU device{'s' * (count > 1)}" + (f" of {threads} threads" if threads > count else "")
    verb = "share" if count > 1 else "has"
    return f"{asked} {verb} {cores} core{'s' * (cores > 1)}: results are the same, and steps take longer than planned"


def torch_can_use_the_gpu(setting: MachineCheck) -> Check | None:
    """A build of torch for CPUs leaves a GPU alone without a word."""
    torch = setting.machine.versions.get("torch", "")
    if not setting.machine.gpus or not setting.uses_gpu or not torch:
        return None
    if not torch.endswith("+cpu"):
        return Check(name="torch build", ok=True, text=f"torch {torch} is built for GPUs")
    text = f"a GPU is visible, and torch {torch} is a build for CPUs"
    return Check(
        name="torch build", ok=False, text=text, fix="install a torch for GPUs, or use placement.cluster: 1xcpu"
    )


def no_device_is_forgotten(setting: MachineCheck) -> Check | None:
    """A GPU without work is a choice, and then the recipe says so."""
    gpus, recipe = setting.machine.gpus, setting.recipe
    if recipe is None or recipe.placement.cluster != "auto" or recipe.placement.cells is not None or len(gpus) < 2:
        return None
    if (idle := len(gpus) - setting.devices) <= 0:
        return Check(name="idle devices", ok=True, text="every visible GPU has work")
    text = f"{idle} of {len(gpus)} visible GPUs would have no work"
    fix = f"name them all (placement.cluster: {len(gpus)}x{known(gpus[0].name)}), or say that one is meant: 1xgpu"
    return Check(name="idle devices", ok=False, text=text, fix=fix)


def known(name: str) -> str:
    """What a recipe may call a GPU, given its driver's name for it."""
    try:
        return find_device(name).name
    except RecipeError:
        return "NAME"


def model_fits(setting: MachineCheck) -> Check | None:
    """Weights and what trains them fit one device. A lower bound: caches and activations come on top."""
    recipe, machine = setting.recipe, setting.machine
    numbers = parameters(recipe.model.name, setting.root) if recipe is not None else None
    if recipe is None or setting.devices > 1:
        return None
    if numbers is None:
        if recipe.model.name == "scratch":
            return None
        text = f"not checked: the size of {recipe.model.name} is not known before its files are here"
        return Check(name="memory", ok=True, text=text)
    on_gpu = setting.uses_gpu and bool(machine.gpus)
    there = min(gpu.memory for gpu in machine.gpus) if on_gpu else machine.memory
    need, whose = numbers * bytes_each(recipe), "the GPU" if on_gpu else "this machine"
    text = f"the model and what trains it need at least {need / GB:.1f} GB, and {whose} has {there / GB:.1f} GB"
    if need <= there:
        return Check(name="memory", ok=True, text=text)
    less = "train an adapter (model.adapter)"
    if recipe.model.adapter:
        less = "store the base in few bits (model.quantize: nf4)"
    fix = "use a smaller model" if recipe.model.quantize in ("nf4", "auto") else f"{less}, or use a smaller model"
    return Check(name="memory", ok=False, text=text, fix=fix)


STORED = {"nf4": 0.5, "int8": 1.0, "fp8": 1.0, "auto": 0.5}
"""Bytes of a weight of a frozen base, at least."""

NARROW = {"adamw16bit": 4.0, "adamw8bit": 2.0}
"""Bytes of both moments."""


def bytes_each(recipe: Recipe) -> float:
    """Bytes that a run holds per parameter of the model.

    A frozen one is its weight. A trained one also has a gradient and two moments in fp32 (fp64 where it is computed
    in that), and a master unless it is its own; narrow moments take less, and masters beside them 2 bytes.
    """
    width = WIDTHS[recipe.model.dtype]
    if recipe.model.adapter is not None:
        return STORED.get(recipe.model.quantize, width)
    if (narrow := NARROW.get(recipe.optimizer.name)) is not None:
        return 2 * width + narrow if width >= 4 else width + 6 + narrow
    return 4 * width if width >= 4 else width + 16
