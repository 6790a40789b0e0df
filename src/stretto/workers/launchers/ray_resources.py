"""What a run asks of a Ray cluster, and what of it a cluster does not have: plain arithmetic, without Ray.

A node is what Ray calls a host, and a bundle is what is asked of one. Both are amounts by the names of resources.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from stretto.checks.machine.devices import known
from stretto.placement.devices import DeviceKind, kind_of, number_of
from stretto.workers.worker_spec import WorkerSpec

Amounts = Mapping[str, float]
"""Resource -> how much."""

TOUCH = 0.001
"""As much as is asked of a resource that only has to be there."""

KIND, ADDRESS = "accelerator_type:", "node:"
"""How Ray begins the names of resources that say which GPUs a node has, and which node it is."""


def bundle_of(devices: Sequence[str]) -> dict[str, float]:
    """What a host must have for these devices: a core for each, and the GPUs."""
    gpus = sum(kind_of(device) is DeviceKind.GPU for device in devices)
    return {"CPU": float(len(devices)), **({"GPU": float(gpus)} if gpus else {})}


def of_kinds(kinds: Sequence[str], nodes: Sequence[Amounts], *, among: Collection[str] = ()) -> list[dict[str, float]]:
    """What each host asks beside its devices, so that it becomes a node with GPUs of its kind.

    `kinds` are what the plan calls the hosts' devices, `among` those of the whole cluster, of which it may use a part.
    Nothing is asked where all are alike, nor where it is not clear what Ray calls a kind: the run would wait in vain.
    """
    if len({*kinds, *among}) < 2:
        return [{} for _ in kinds]
    names: dict[str, list[str]] = defaultdict(list)
    for name in sorted({name for node in nodes for name in node if name.startswith(KIND)}):
        names[known(name.removeprefix(KIND))].append(name)
    return [{names[kind][0]: TOUCH} if len(names[kind]) == 1 else {} for kind in kinds]


def visible_to(device: str, listed: str | None) -> str | None:
    """What CUDA_VISIBLE_DEVICES must say in the process of a GPU, given what it says here; none for a CPU.

    A plan counts the GPUs that are visible here.
    """
    if kind_of(device) is not DeviceKind.GPU:
        return None
    number = number_of(device)
    return str(number) if listed is None else listed.replace(" ", "").split(",")[number]


def seeing(assignment: WorkerSpec, listed: str | None) -> tuple[WorkerSpec, str | None]:
    """A worker that knows what the GPUs of its lane are called, because an engine may reach all of them from one
    process; and the GPU that its own process sees."""
    if (lane := assignment.lane) is not None:
        gpus = tuple(gpu for device in lane.devices if (gpu := visible_to(device, listed)) is not None)
        assignment = replace(assignment, lane=replace(lane, gpus=gpus))
    return assignment, visible_to(assignment.device, listed)


def shortage(bundles: Sequence[Amounts], nodes: Sequence[Amounts], free: Sequence[Amounts]) -> str:
    """What is missing for these bundles: in the nodes, or in what others leave free of them."""
    if told := lacking(bundles, nodes):
        return "; ".join(told)
    if told := lacking(bundles, free, left=" free"):
        return f"{'; '.join(told)} (others have taken the rest)"
    return "all of it is there and free by now"


def lacking(bundles: Sequence[Amounts], nodes: Sequence[Amounts], *, left: str = "") -> list[str]:
    """What nodes have too little of for these bundles, of which each needs a node of its own; empty if nothing."""
    told: list[str] = []
    for bundle in [dict(items) for items in dict.fromkeys(tuple(bundle.items()) for bundle in bundles)]:
        marks = {name: amount for name, amount in bundle.items() if amount == TOUCH}
        amounts = {name: amount for name, amount in bundle.items() if name not in marks}
        count = sum(_covers(other, bundle) for other in bundles)
        hosts = ("a host" if count == 1 else f"{count} hosts") + "".join(map(_mark, marks))
        able = [node for node in nodes if _covers(node, marks)]
        if len(able) < count:
            told.append(f"needs {hosts}, sees {len(able)}")
            continue
        short = [name for name, most in amounts.items() if sum(node.get(name, 0.0) >= most for node in able) < count]
        told += [f"needs {hosts} with {amounts[name]:g} {name}, sees {_list(name, able)}{left}" for name in short]
        fit = sum(_covers(node, amounts) for node in able)
        if not short and fit < count:
            together = " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
            told.append(f"needs {hosts} with {together} together, sees {fit}{left}")
    return told


def _covers(one: Amounts, other: Amounts) -> bool:
    """True if one has all that another has."""
    return all(one.get(name, 0.0) >= amount for name, amount in other.items())


def _mark(name: str) -> str:
    """A host's mark in words."""
    if name.startswith(KIND):
        return f" of {name.removeprefix(KIND)}"
    return f" at {name.removeprefix(ADDRESS)}"


def _list(name: str, nodes: Sequence[Amounts]) -> str:
    """How much of a resource nodes have, those with most first."""
    counts = Counter(node.get(name, 0.0) for node in nodes)
    return ", ".join(f"{amount:g}" + (f" ({n} times)" if n > 1 else "") for amount, n in sorted(counts.items())[::-1])
