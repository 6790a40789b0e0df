"""What one device can do: a table of well-known ones, found by name however the name is spelled.

Numbers are what data sheets and public benchmarks say, not what anything here measured; a cluster file may give a
machine's own (`cluster`). Memory in GB counts 2^30 bytes. Rates are in FLOP/s and bytes/s, one direction of a link.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from enum import Enum

from stretto.errors import RecipeError

GB = 2**30
"""Bytes of a GB."""


class DeviceKind(Enum):
    """What devices of one kind have in common."""

    GPU = "gpu"
    CPU = "cpu"

    @property
    def micro_batch(self) -> int:
        """Tokens of a micro-batch where a recipe leaves it open; running out of memory lowers it."""
        return 16_384 if self is DeviceKind.GPU else 2304

    @property
    def has_own_memory(self) -> bool:
        """True if its memory is not its host's, so that neighbors take none of it and what sleeps can leave it."""
        return self is DeviceKind.GPU

    @property
    def has_matrix_units(self) -> bool:
        """True if it multiplies narrow numbers faster than full ones."""
        return self is DeviceKind.GPU

    @property
    def is_alike_everywhere(self) -> bool:
        """True if a name says what it can do; threads of a CPU are as fast as their machine."""
        return self is DeviceKind.GPU


def kind_of(device: str) -> DeviceKind:
    """The kind of a device, of which its name tells: "host0/gpu:3" is a GPU."""
    return DeviceKind(_place(device).partition(":")[0])


def number_of(device: str) -> int:
    """Which of its host's devices of its kind it is: 3 of "host0/gpu:3"."""
    return int(_place(device).partition(":")[2])


def host_of(device: str) -> str:
    """The host of a device: "host0" of "host0/gpu:3"."""
    return device.rpartition("/")[0]


def _place(device: str) -> str:
    return device.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one thread of a CPU."""

    name: str
    """The device's name, as people write it."""
    flops: float
    """Peak of dense bf16 products, FLOP/s."""
    matmul: float
    """Best that anyone measured on large products, FLOP/s: the true ceiling."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bandwidth of that memory, bytes/s."""
    link: float
    """To devices of the same domain, bytes/s in one direction."""
    nic: float
    """This device's share of its host's network, bytes/s in one direction."""
    host_link: float
    """To host memory, bytes/s in one direction."""
    per_host: int = 8
    """Devices of a usual host."""
    domain: int = 8
    """Devices that `link` joins; may span hosts."""
    host_memory: float = 256.0 * GB
    """This device's share of its host's memory, bytes."""
    kind: DeviceKind = field(default=DeviceKind.GPU, hash=False)
    """Of which its name tells, as in "host0/gpu:3"."""
    threads: int = 0
    """Threads of a CPU device that is said to have so many."""


def _gpu(
    name: str, peak: float, best: float, memory: float, bandwidth: float, link: float, nic: float, host: float
) -> Device:
    """A row of the table: TFLOP/s twice, GB, then GB/s as data sheets count them (10^9)."""
    return Device(
        name=name, flops=peak * 1e12, matmul=best * 1e12, memory=memory * GB, bandwidth=bandwidth * 1e9,
        link=link * 1e9, nic=nic * 1e9, host_link=host * 1e9,
    )  # fmt: skip


def _card(device: Device, *, host_memory: float = 64.0) -> Device:
    """One that sits in a PCIe slot, with a smaller host around it."""
    return replace(device, host_memory=host_memory * GB)


def _rack(device: Device) -> Device:
    """One of a rack whose 72 devices share one link domain, four to a host."""
    return replace(device, per_host=4, domain=72, host_memory=240.0 * GB)


_CPU = Device(
    name="cpu", flops=4e11, matmul=3.5e11, memory=4.0 * GB, bandwidth=1.5e10, link=5e9, nic=1e9, host_link=1e10,
    per_host=2**16, domain=2**16, host_memory=4.0 * GB, kind=DeviceKind.CPU,
)  # fmt: skip

DEVICES = {
    device.name: device
    for device in (
        #     name        peak  best  GB  GB/s  link  nic host
        _gpu("A100-40GB", 312, 271, 40, 1555, 300, 25, 31),
        _gpu("A100", 312, 271, 80, 2039, 300, 25, 31),
        _gpu("A800", 312, 271, 80, 2039, 200, 25, 31),
        _gpu("H100", 989, 795, 80, 3350, 450, 50, 63),
        _gpu("H800", 989, 795, 80, 3350, 200, 50, 63),
        _gpu("H200", 989, 795, 141, 4800, 450, 50, 63),
        _gpu("H20", 148, 137, 96, 4000, 450, 50, 63),
        _gpu("H20-141GB", 148, 137, 141, 4800, 450, 50, 63),
        _gpu("B200", 2250, 1745, 180, 8000, 900, 50, 63),
        _gpu("B300", 2250, 1745, 270, 8000, 900, 100, 63),
        _rack(_gpu("GB200", 2500, 1900, 186, 8000, 900, 50, 225)),
        _rack(_gpu("GB300", 2500, 1900, 278, 8000, 900, 100, 225)),
        replace(_gpu("GH200", 989, 829, 96, 4000, 450, 50, 450), per_host=1, domain=1, host_memory=480.0 * GB),
        _gpu("MI300X", 1307, 668, 192, 5300, 448, 50, 63),
        _gpu("V100", 125, 105, 32, 900, 150, 12, 15),
        _card(_gpu("A40", 150, 125, 48, 696, 28, 6, 31)),
        _card(_gpu("A10", 125, 100, 24, 600, 28, 3, 31)),
        _card(_gpu("A6000", 155, 125, 48, 768, 28, 3, 31)),
        _card(_gpu("L40S", 362, 280, 48, 864, 28, 6, 31), host_memory=128.0),
        _card(_gpu("L4", 121, 95, 24, 300, 28, 3, 31)),
        _card(_gpu("RTX3090", 71, 62, 24, 936, 28, 3, 31)),
        _card(_gpu("RTX4090", 165, 150, 24, 1008, 28, 3, 31)),
        _card(_gpu("RTX5090", 209, 190, 32, 1792, 56, 3, 63)),
        _CPU,
    )
}
"""The table. `link` of a card without one is its PCIe slot; `cpu` is one thread of an ordinary machine."""

WITHOUT_BFLOAT16 = ("V100",)
"""Cards whose rates in the table are of float16: bfloat16 they have in software only."""


def plain(name: str) -> str:
    """A name without case, spaces, dashes and what sellers add: "NVIDIA H100 SXM5 80GB" and "h100" are one device."""
    letters = re.sub(r"nvidia|amd|geforce|tesla|sxm\d?|hbm\d\w?|tensorcore|[\s_-]", "", name.lower())
    letters = re.sub(r"^rtx(?=a\d000)|pcie(?=\d0gb)|(?<=\d0gb)pcie$", "", letters)  # as drivers call them
    letters = re.sub(
        r"(?<=a100|a800|h100|h800)80gb?$|(?<=h200)141gb?$|(?<=gh200)480gb?$|(?<=v100)32gb?$|(?<=h20)96gb?$", "", letters
    )
    return re.sub(r"(?<=\d)g$", "gb", letters)


_BY_PLAIN_NAME = {plain(name): device for name, device in DEVICES.items()}
_CARDS = {number: f"RTX{number}" for number in ("3090", "4090", "5090")}
for _other, _name in {
    **_CARDS,
    "A100-80": "A100",
    "A100-80GB": "A100",
    "A100-40": "A100-40GB",
    "H100-80": "H100",
}.items():
    _BY_PLAIN_NAME[plain(_other)] = DEVICES[_name]

NUMBERS = (
    "or give its numbers in a cluster file: `devices: {NAME: {flops: 9.9e14, memory_gb: 80, bandwidth: 3.3e12}}` "
    "(FLOP/s in bf16, GB, bytes/s)"
)
"""How to plan with a device that the table lacks."""


def with_threads(device: Device, count: int) -> Device:
    """A CPU device of so many threads, called `cpu2` and the like. What they share of the machine stays as it is."""
    numbers = {name: count * getattr(device, name) for name in ("flops", "matmul", "bandwidth")}
    name = device.name if count == 1 else f"{device.name}{count}"
    return replace(device, name=name, threads=count, **numbers)


def is_known(name: str) -> bool:
    """True for a device of the table."""
    return plain(name) in _BY_PLAIN_NAME


def _of_memory(size: int, field: str) -> Device:
    """The only card of so many GB, or a RecipeError that lists those of this or the nearest size."""
    cards = [device for device in DEVICES.values() if device.kind is DeviceKind.GPU]
    nearest = min({round(card.memory / GB) for card in cards}, key=lambda known: (abs(known - size), known))
    alike = [card for card in cards if round(card.memory / GB) == nearest]
    if nearest == size and len(alike) == 1:
        return alike[0]
    listed = ", ".join(card.name for card in alike)
    reason = f"{size}GB is the memory of no card that is known; the nearest, of {nearest} GB, are {listed}"
    if nearest == size:
        reason = f"{size}GB is the memory of {len(alike)} cards: {listed}"
    fix = f"name the card, such as 1x{alike[0].name}; `stretto plan --cluster list` lists all with their numbers"
    raise RecipeError.of(field, reason, fix)


def find_device(name: str, *, field: str = "placement.cluster") -> Device:
    """The device of this name, or a RecipeError with the nearest names that are known."""
    device = _BY_PLAIN_NAME.get(plain(name))
    if device is not None:
        return device
    if (several := re.fullmatch(r"cpu([1-9]\d{0,3})", plain(name))) is not None:
        return with_threads(_CPU, int(several[1]))
    if (size := re.fullmatch(r"(\d{1,4})gb", plain(name).replace("gib", "gb"))) is not None:
        return _of_memory(int(size[1]), field)
    if plain(name) in ("gpu", "gpus", "cuda"):  # 1xgpu alone is known: whichever one GPU is there
        raise RecipeError.of(field, f"{name!r} does not say which kind of GPU", f"say H100, L4 or the like, {NUMBERS}")
    near = difflib.get_close_matches(plain(name), _BY_PLAIN_NAME, n=3, cutoff=0.4)
    known = list(dict.fromkeys(_BY_PLAIN_NAME[key].name for key in near)) or list(DEVICES)
    raise RecipeError.of(
        field, f"no device is known as {name!r}; the nearest are {', '.join(known)}", f"name one of them, {NUMBERS}"
    )
