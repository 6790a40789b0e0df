"""Facts about this machine, gathered in a moment and without torch.

What cannot be found out is left open rather than guessed: a check must never refuse a machine that works. Containers
limit cores and memory by control groups, which most libraries do not see.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from stretto import host_memory
from stretto.checks.machine.base import Gpu, MachineFacts

PACKAGES = ("stretto", "torch", "transformers", "peft", "torchvision", "torchaudio", "torchcodec", "ray")
"""Distributions that checks ask about."""

ELSEWHERE = "203.0.113.1"
"""An address that belongs to nobody. A datagram socket that is connected to it sends nothing."""


CPUS = Path("/sys/devices/system/cpu")
"""What Linux says of each core."""


def look() -> MachineFacts:
    """This machine, now."""
    found = {name: told for name in PACKAGES if (told := _distribution(name))}
    return MachineFacts(
        cores=cores(),
        shown=shown(),
        memory=host_memory.total(),
        shared=_free("/dev/shm"),
        files=_files(),
        address=_address(),
        gpus=tuple(visible(_gpus(), os.environ)),
        versions={name: version for name, (version, _) in found.items()},
        needs={name: needs for name, (_, needs) in found.items()},
        environment=dict(os.environ),
    )


def cores() -> int:
    """Cores that this process may use."""
    return min(shown(), cores_of_group(host_memory.GROUPS) or shown())


def shown() -> int:
    """Cores that a library sees, which knows nothing of a container's share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def neighbors_together(numbers: Collection[int], folder: Path = CPUS) -> list[int]:
    """Numbers of cores, in an order in which the hardware threads of one physical core follow each other."""

    def first_of_its_core(number: int) -> int:
        try:
            together = (folder / f"cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii")
            return min(map(int, re.findall(r"\d+", together)))  # "0,8" or "0-1"
        except (OSError, ValueError):
            return number

    return sorted(numbers, key=lambda number: (first_of_its_core(number), number))


def _distribution(name: str) -> tuple[str, tuple[str, ...]] | None:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    return found.version, tuple(found.requires or ())


def cores_of_group(groups: Path) -> int | None:
    """Cores that a container's share of time comes to, rounded up."""
    numbers = _numbers(groups / "cpu.max") or [
        *_numbers(groups / "cpu/cpu.cfs_quota_us"),
        *_numbers(groups / "cpu/cpu.cfs_period_us"),
    ]
    return -(-numbers[0] // numbers[1]) if len(numbers) == 2 and min(numbers) > 0 else None


def _numbers(path: Path) -> list[int]:
    """The whole numbers in a file, or none if there are other words in it or it cannot be read."""
    try:
        return [int(word) for word in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return []


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _files() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _address() -> str | None:
    """The address that this host would reach others from. Nothing is sent, and no name is looked up."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE, 9))
        address = str(probe.getsockname()[0])
        return None if address.startswith("127.") else address
    return None


def visible(gpus: list[Gpu], environment: Mapping[str, str]) -> Iterator[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves: numbers or ids of a list that ends at the first that is neither."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        yield from gpus
        return
    for place, word in enumerate(listed.replace(" ", "").split(",")):
        if word.isdigit() and int(word) < len(gpus):
            yield gpus[int(word)]
        elif word.startswith(("GPU-", "MIG-")) and gpus:
            yield gpus[min(place, len(gpus) - 1)]
        else:
            return


class _Memory(ctypes.Structure):
    """How the driver's library tells the memory of a GPU."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpus() -> list[Gpu]:
    """Every GPU that the driver knows. Asks its management library, which leaves this process free to fork."""
    try:
        return gpus_of(ctypes.CDLL("libnvidia-ml.so.1"))
    except (OSError, AttributeError):
        return []


def gpus_of(library: Any) -> list[Gpu]:
    """Every GPU that the management library tells of; none where it does not start."""
    if library.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [found for index in range(count.value) if (found := _gpu(library, index))]
    finally:
        library.nvmlShutdown()


def _gpu(library: Any, index: int) -> Gpu | None:
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None
    library.nvmlDeviceGetName(handle, name, len(name))
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(name=name.value.decode("utf-8", "replace"), memory=memory.total)
