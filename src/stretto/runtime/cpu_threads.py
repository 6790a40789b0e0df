"""What the cores of a machine do: threads that each CPU device computes with, and processes that judge answers.

A run keeps to the number of threads: it decides how sums are rounded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from stretto.checks.machine.facts import cores
from stretto.checks.machine.load import busy_cores, cpu_share
from stretto.placement.build import OPEN
from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import DeviceKind, kind_of
from stretto.placement.plan import Plan
from stretto.recipe.schema import Recipe
from stretto.runtime.base_copy import Note

MOST_JUDGES = 16
"""Processes for user code. Each keeps the user's modules imported, and memory is finite."""


def threads_of(recipe: Recipe, plan: Plan, note: Note, *, before: int | None = None) -> Mapping[str, int]:
    """Threads of each CPU device: what the cluster says, or one.

    A single device takes what the user has set, or as many as `before`, when the run began, or all cores that are free.
    """
    said = {} if recipe.placement.cluster in OPEN else parse_cluster(recipe.placement.cluster).threads
    device, *others = plan.devices
    if said or others or kind_of(device) is not DeviceKind.CPU:
        return said
    threads = torch.get_num_threads()
    if not os.environ.get("OMP_NUM_THREADS"):
        if before is not None and before <= threads:
            return {device: before}
        share = cpu_share(cores(), busy_cores())
        if share.threads < threads or share.competes:
            note(str(share))
        threads = min(share.threads, threads)
    if before not in (None, threads):
        note(
            f"this run began with {before} threads and goes on with {threads}: its numbers may differ in the last bits"
        )
    return {device: threads}


def reward_worker_count(recipe: Recipe) -> int:
    """Processes for user code. At least four, since half of a step's answers end in its last moments, and functions
    that wait for something need no core of their own."""
    return _half_of_the_cores(recipe, least=4)


def program_count(recipe: Recipe) -> int:
    """Programs in the sandbox at a time: they compute, each with a deadline, so there are no more than cores for it."""
    return _half_of_the_cores(recipe, least=2)


def _half_of_the_cores(recipe: Recipe, *, least: int) -> int:
    """What the recipe says, or half of the cores: the other half is for what generates and trains."""
    told = recipe.run.reward_workers
    return min(max(least, cores() // 2), MOST_JUDGES) if told == "auto" else told
