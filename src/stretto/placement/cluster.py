"""A cluster: which devices exist, on which hosts, from text such as `6x8xH100` or from a cluster file.

It says what there is, never what is free. `H100` is one device, `8xH100` is one host of eight; a count beyond what one
host usually holds is split into such hosts. Threads of a CPU are this machine's: `1xcpu+1xcpu2` are two devices of one
host, of one and of two threads, unless the hosts are counted, too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from stretto import host_memory
from stretto.errors import Problem, RecipeError
from stretto.placement.devices import GB, Device, DeviceKind, find_device, is_known, with_threads
from stretto.placement.rates import Rates
from stretto.recipe import yaml_io as document
from stretto.recipe.schema import Count, Section

MOST_DEVICES = 16_384
"""As many as the largest published trainings of one model used; a slip of the finger otherwise fills the memory."""


NAME = r"(?:[A-Za-z]|\d{4}\b)[\w .-]*|\d{1,4}\s*gi?b?"
"""How the name of a device may look: it begins with a letter, or it is a number of four digits, as cards are called, or
a size of memory, such as 24GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine."""

    name: str
    """The host's name, as in the names of its devices."""
    device: Device
    """What it holds; the first of it, where CPU devices have different numbers of threads."""
    count: int
    """How many of it."""
    memory: float
    """Host memory in bytes."""
    unequal: tuple[Device, ...] = ()
    """Its devices one by one, where they differ."""

    @property
    def each(self) -> tuple[Device, ...]:
        """Its devices one by one."""
        return self.unequal or (self.device,) * self.count

    @property
    def names(self) -> tuple[str, ...]:
        """Of its devices, such as "host0/gpu:3"."""
        return tuple(f"{self.name}/{self.device.kind.value}:{index}" for index in range(self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Every host, in order."""

    hosts: tuple[Host, ...]
    """The machines."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Constants of the cost model that were measured here, by name."""

    @property
    def devices(self) -> dict[str, Device]:
        """Name such as "host0/gpu:3" -> device, in the order of the hosts."""
        return {name: each for host in self.hosts for name, each in zip(host.names, host.each, strict=True)}

    @property
    def threads(self) -> dict[str, int]:
        """Threads of the CPU devices that are said to have so many, by name."""
        return {name: device.threads for name, device in self.devices.items() if device.threads}

    def __len__(self) -> int:
        return sum(host.count for host in self.hosts)

    def pools(self) -> tuple[tuple[Device, int], ...]:
        """Each kind of device and how many there are, in the order of the hosts."""
        counts: Counter[Device] = Counter()
        for host in self.hosts:
            for device in host.each:
                counts[device] += 1
        return tuple(counts.items())

    def __str__(self) -> str:
        return " + ".join(f"{count} x {device.name}" for device, count in self.pools())


def parse_cluster(text: str, *, field: str = "placement.cluster") -> Cluster:
    """A cluster from text: the path of a cluster file, or parts `[hosts x] devices x NAME`, joined by `+`."""
    if os.path.isfile(text):
        return _from_file(text, field)
    parts = [_part(part.strip(), text, field) for part in text.split("+")]
    _check_size(sum(sum(counts) for _, counts in parts), text, field)
    hosts = [(device,) * count for device, counts in parts for count in counts]
    here = not any(re.match(r"\s*\d+\s*x\s*\d", part) for part in text.split("+"))
    if here and not any(device.kind.has_own_memory for device, _ in parts):
        hosts = [tuple(device for host in hosts for device in host)]
    return Cluster(hosts=tuple(_named(hosts)))


def _from_file(path: str, field: str) -> Cluster:
    try:
        data, problems = document.read(Path(path).read_text(encoding="utf-8"), name=path)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError.of(field, f"{path} cannot be read: {error}", "name a cluster file") from None
    if problems:
        raise RecipeError(*problems)
    return read_cluster(data, file=path)


def _part(part: str, text: str, field: str) -> tuple[Device, list[int]]:
    match = re.fullmatch(rf"(?:(\d{{1,18}})\s*x\s*)?(\d{{1,18}})\s*x\s*({NAME})", part, re.IGNORECASE)
    if match is None:
        if part[:1].isdigit() and re.fullmatch(NAME, part, re.IGNORECASE):  # a number of cards was left out
            return find_device(part, field=field), [1]
        with suppress(RecipeError):
            return find_device(part, field=field), [1]
        raise RecipeError.of(
            field,
            f"{text!r} is no cluster, and no file that is there",
            "write 8xH100, 6x8xH100 (hosts first), 8xH800+8xH20, 2xcpu or a file",
        )
    hosts, count, device = match[1], int(match[2]), find_device(match[3], field=field)
    if not count * int(hosts or 1):
        raise RecipeError.of(field, f"{part!r} has no devices", f"give a number from 1 to {MOST_DEVICES}")
    _check_size(count * int(hosts or 1), part, field)
    if hosts:
        return device, [count] * int(hosts)
    full, rest = divmod(count, device.per_host)
    return device, [device.per_host] * full + [rest] * (rest > 0)


def _check_size(count: int, told: str, field: str) -> None:
    if count > MOST_DEVICES:
        reason = f"{told!r} has {count} devices, and the largest cluster that can be planned has {MOST_DEVICES}"
        raise RecipeError.of(field, reason, f"give a number from 1 to {MOST_DEVICES}")


def _named(hosts: Sequence[tuple[Device, ...]]) -> Iterator[Host]:
    """Hosts with names: `localhost` if there is only one, `host0` and so on otherwise."""
    for index, devices in enumerate(hosts):
        name, count = "localhost" if len(hosts) == 1 else f"host{index}", len(devices)
        if not devices[0].kind.has_own_memory:
            share = _own_memory() / count
            devices = tuple(replace(device, memory=share, host_memory=share) for device in devices)
        first, unequal = devices[0], devices if len(set(devices)) > 1 else ()
        yield Host(name=name, device=first, count=count, memory=first.host_memory * count, unequal=unequal)


def _own_memory() -> float:
    """Of this machine: threads of a CPU are always threads of the one that plans."""
    return float(host_memory.total())


PerSecond = Annotated[float, Field(ge=1.0, le=1e30)]
Gigabytes = Annotated[float, Field(ge=1e-3, le=1e9)]


class DeviceNumbers(Section):
    """Numbers of a device in a cluster file; what is left out is taken from `like`, or guessed from the rest."""

    like: str | None = None
    """A device of the table to start from."""
    flops: PerSecond | None = None
    """Peak of dense bf16 products, FLOP/s."""
    matmul: PerSecond | None = None
    """Best measured on large products, FLOP/s."""
    memory_gb: Gigabytes | None = None
    """Memory in GB of 2^30 bytes."""
    bandwidth: PerSecond | None = None
    """Bandwidth of the device's memory, bytes/s."""
    link: PerSecond | None = None
    """To its neighbors, bytes/s in one direction."""
    nic: PerSecond | None = None
    """The device's share of the host's network, bytes/s."""
    host_link: PerSecond | None = None
    """To host memory, bytes/s."""
    domain: Count | None = None
    """How many devices `link` joins."""


class HostNumbers(Section):
    """Hosts of one kind in a cluster file."""

    device: Annotated[str, Field(min_length=1)]
    """A device of the table or of this file."""
    devices: Annotated[int, Field(ge=1, le=1024)]
    """How many each host has."""
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    """How many such hosts."""
    memory_gb: Gigabytes | None = None
    """Host memory in GB."""
    threads: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1)] | None = None
    """Threads of each CPU device, one number for each."""


class ClusterFile(Section):
    """A cluster as a file: hosts, devices that the table lacks, and measured constants."""

    hosts: Annotated[tuple[HostNumbers, ...], Field(min_length=1)]
    """The machines."""
    devices: dict[str, DeviceNumbers] = Field(default_factory=dict)
    """Devices by name; one of the table may be corrected."""
    rates: dict[str, float] = Field(default_factory=dict)
    """Constants of the cost model that were measured, by name."""


def read_cluster(data: Any, *, file: str) -> Cluster:
    """A cluster from what a cluster file says, already read as plain data; `file` names it in problems."""
    try:
        told = ClusterFile.model_validate(_tuples(data))
    except ValidationError as wrong:
        raise RecipeError(*_problems(wrong, file)) from None
    Rates.of(told.rates, field=f"{file}: rates")
    _check_size(sum(group.devices * group.count for group in told.hosts), "hosts", f"{file}: hosts")
    own = {name: _device(name, numbers, file) for name, numbers in told.devices.items()}
    held: list[tuple[Device, ...]] = []
    for index, group in enumerate(told.hosts):
        device = own[group.device] if group.device in own else find_device(group.device, field=f"{file}: hosts")
        held += [_devices(group, device, f"{file}: hosts.{index}.threads")] * group.count
    memory = [group.memory_gb for group in told.hosts for _ in range(group.count)]
    given = (_given(host, each) for host, each in zip(_named(held), memory, strict=True))
    return Cluster(hosts=tuple(given), rates=told.rates)


def _devices(group: HostNumbers, device: Device, field: str) -> tuple[Device, ...]:
    """The devices of a host."""
    if group.threads is None:
        return (device,) * group.devices
    if device.kind is not DeviceKind.CPU:
        raise RecipeError.of(field, f"{device.name} is no CPU", "leave it out")
    if len(group.threads) != group.devices:
        reason = f"there are {group.devices} devices, and numbers for {len(group.threads)}"
        raise RecipeError.of(field, reason, "give one number for each device")
    return tuple(with_threads(device, count) for count in group.threads)


def _given(host: Host, memory_gb: float | None) -> Host:
    """A host with the memory that a file says it has, of which each device gets its share."""
    if memory_gb is None:
        return host
    share = memory_gb * GB / host.count
    own: dict[str, Any] = {} if host.device.kind.has_own_memory else {"memory": share}
    first, *others = (replace(device, host_memory=share, **own) for device in host.each)
    unequal = (first, *others) if host.unequal else ()
    return replace(host, memory=memory_gb * GB, device=first, unequal=unequal)


def _tuples(data: Any) -> Any:
    """Lists of a document as tuples, which is what strict sections take."""
    if isinstance(data, dict):
        return {key: _tuples(value) for key, value in data.items()}
    return tuple(_tuples(value) for value in data) if isinstance(data, list) else data


KINDS = {"tuple_type": "is no list", "model_type": "is no section of keys and values", "extra_forbidden": "is no key"}
"""What pydantic calls an error -> our words, where its own speak of Python."""


def _problems(wrong: ValidationError, file: str) -> Iterator[Problem]:
    """Every complaint of the schema, in words; what is only short of items that are wrong themselves is left out."""
    errors = wrong.errors()
    usual = "a cluster file has hosts (device, devices, count, memory_gb, threads), devices and rates"
    numbers = f"a device has {', '.join(DeviceNumbers.model_fields)}"
    for error in errors:
        inside = any(other["loc"][:-1][: len(error["loc"])] == error["loc"] for other in errors)
        if error["type"] == "too_short" and inside:
            continue
        where = ".".join(str(part) for part in error["loc"]) or "the whole file"
        fix = numbers if error["loc"][:1] == ("devices",) and len(error["loc"]) > 2 else usual
        reason = KINDS.get(error["type"]) or f"{error['msg'][:1].lower()}{error['msg'][1:]}"
        yield Problem(
            field=f"{file}: {where}", reason="there are none" if error["type"] == "too_short" else reason, fix=fix
        )


def _device(name: str, told: DeviceNumbers, file: str) -> Device:
    where = f"{file}: devices.{name}"
    if told.like is None and None in (told.flops, told.memory_gb, told.bandwidth):
        raise RecipeError.of(
            where, "it needs flops, memory_gb and bandwidth", "give the three, or `like:` a device that is known"
        )
    base = find_device(told.like or (name if is_known(name) else "L4"), field=where)
    values: dict[str, Any] = told.model_dump(exclude={"like", "memory_gb"}, exclude_none=True)
    if told.memory_gb is not None:
        values["memory"] = told.memory_gb * GB
    if told.flops is not None and told.matmul is None:
        values["matmul"] = 0.8 * told.flops
    return replace(base, name=name, **values)
