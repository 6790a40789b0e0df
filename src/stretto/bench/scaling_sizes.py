"""Parts of a cluster for `stretto bench scaling RECIPE`: which sizes, how each is written, and what is at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from stretto.checks.machine.facts import look
from stretto.checks.machine.network import cluster_named
from stretto.errors import RecipeError
from stretto.placement.cluster import Cluster, parse_cluster
from stretto.placement.devices import Device, DeviceKind
from stretto.recipe.schema import Recipe


def usual_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and all."""
    return tuple(dict.fromkeys([*(2**power for power in range(most.bit_length()) if 2**power <= most), most]))


def refuse_cells(recipe: Recipe) -> None:
    """Raises for cells by hand: those of a whole cluster name devices that its parts lack."""
    if recipe.placement.cells is not None:
        reason = "cells by hand name their devices, and most numbers of devices lack some"
        fix = "add placement.cells=null to the command, so that each number of devices gets the plan of a strategy"
        raise RecipeError.of("placement.cells", reason, fix)


def refuse_sizes(sizes: Sequence[int], ahead: Sequence[int], cluster: Cluster) -> None:
    """Raises for sizes that the cluster does not have, or cannot be made of it."""
    if wrong := [size for size in sizes if not 1 <= size <= len(cluster)]:
        fix = "use sizes of the cluster, and --ahead for those that are only to be predicted"
        raise RecipeError.of("--size", f"the cluster has {len(cluster)} devices, not {wrong[0]}", fix)
    if any(size > len(cluster) for size in ahead) and len(cluster.pools()) > 1:
        reason = "it has several kinds of devices, so it is not clear which there would be more of"
        raise RecipeError.of("--ahead", reason, "use sizes that the cluster has, or a cluster of one kind")


def part_of(cluster: Cluster, size: int) -> Cluster:
    """The first devices of a cluster; beyond it, more of its hosts."""
    hosts, left = [], size
    for host in cluster.hosts:
        count = min(left, host.count)
        if count:
            each = host.each[:count]
            hosts.append(replace(host, count=count, device=each[0], unequal=each if len(set(each)) > 1 else ()))
        left -= count
    last = cluster.hosts[-1]
    while left > 0 and last.device.kind.has_own_memory:
        count = min(left, last.device.per_host)
        hosts.append(replace(last, name=f"host{len(hosts)}", count=count, unequal=()))
        left -= count
    if left > 0:  # threads of a CPU are all of one machine
        hosts[-1] = replace(hosts[-1], count=hosts[-1].count + left)
    if len(hosts) == 1:
        hosts = [replace(hosts[0], name="localhost")]
    elif hosts[0].name == "localhost":
        hosts[0] = replace(hosts[0], name="host0")
    return replace(cluster, hosts=tuple(hosts))


def written(cluster: Cluster) -> str:
    """A cluster as a recipe writes it. One CPU device has one thread, as each of several."""
    alone = len(cluster) == 1
    parts = []
    for host in cluster.hosts:
        several = "1x" if len(cluster.hosts) > 1 else ""
        kinds: dict[Device, int] = {}
        for device in host.each:
            kinds[device] = kinds.get(device, 0) + 1
        for device, count in kinds.items():
            bare = device.kind is DeviceKind.CPU and not device.threads
            parts.append(f"{several}{count}x{device.name}{'1' * (alone and bare)}")
    return "+".join(parts)


def name_of(cluster: Cluster) -> str:
    """A cluster in words."""
    return str(cluster)


def not_at_hand(cluster: Cluster) -> str | None:
    """Why a run could not have these devices; none if it can."""
    parse_cluster(written(cluster))  # devices that only a cluster file knows have no name here
    if len(cluster.hosts) > 1:
        return None if cluster_named(os.environ) else f"{len(cluster.hosts)} hosts need a Ray cluster (RAY_ADDRESS)"
    here, kind = look(), cluster.hosts[0].device.kind
    there = here.cores if kind is DeviceKind.CPU else len(here.gpus)
    count = sum(device.threads or 1 for device in cluster.devices.values()) if kind is DeviceKind.CPU else len(cluster)
    word = "cores" if kind is DeviceKind.CPU else "GPUs"
    return None if count <= there else f"they need {count} {word}, and there are {there}"
