"""What is to be started where, checked, before any file is written: the recipe, the machines, the run's folder.

Where the project lies (the working directory) is what relative paths count from there, too. Nothing of the user's text
gets into a file but through `fill`, quoted for what reads it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from stretto.errors import RecipeError
from stretto.placement.cluster import Cluster, parse_cluster

NAME = re.compile(r"[^a-z0-9]+")
LONGEST_NAME = 40
PLAIN_PATH = re.compile(r"[A-Za-z0-9._/-]+")
LIMITED = ("slurm", "modal")
"""Targets whose jobs end after some hours."""
USUAL_HOURS = 24
INPUTS = "inputs"
"""Folder of copied inputs, beside the files that are written."""
INSIDE = "/workspace"
"""Where the project lies in a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCopy:
    """A file or folder that the recipe reads and that is copied beside the files that are written."""

    key: str
    """The recipe key that names it."""
    path: Path
    """The file or folder."""
    name: str
    """Path of the copy in `inputs/`; the key names its first part."""
    without: tuple[str, ...]
    """Names in a folder that are not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One run that is to be started elsewhere."""

    name: str
    """What it is called there: small letters, digits and dashes."""
    project: Path
    """The working directory, from which relative paths count."""
    recipe: str
    """The recipe's path within the project."""
    changes: tuple[str, ...]
    """Changes to it, as on a command line, the cluster among them."""
    hosts: int
    """Machines."""
    devices: int
    """Devices of each."""
    device: str
    """What they are called, such as H100 or cpu."""
    threads: int
    """Cores of each machine, where the devices are CPUs; else 0."""
    hours: int
    """Hours after which it is stopped and goes on in another job, where jobs have an end."""
    folder: Path
    """Where the files are written, within the project."""
    image: str
    """The container's name."""
    extras: tuple[str, ...] = ()
    """Extras of this project that the recipe needs."""
    packages: tuple[str, ...] = ()
    """Packages, with versions, that carry files which the recipe reads."""
    verb: str = "train"
    """The command that begins the run: train, sft or reward-model."""
    makes_table: bool = False
    """True if the run reads a table of V*, which is made before it begins."""
    inputs: tuple[InputCopy, ...] = ()
    """Inputs that the project's copy would leave out."""

    @property
    def run(self) -> str:
        """The run's folder within the project: one that is known beforehand, so that a restart finds it."""
        return f"runs/{self.name}"

    @property
    def inside(self) -> str:
        """The folder of the files within the project."""
        return self.folder.relative_to(self.project).as_posix()

    @property
    def told(self) -> str:
        """The recipe and its changes, for a shell. A table of V* lies beside the run's folder, on the same volume."""
        copies = [f"{each.key}={self.inside}/{INPUTS}/{each.name.partition('/')[0]}" for each in self.inputs]
        above = "../" * self.recipe.count("/")  # paths of tables count from the recipe
        table = [f"algorithm.vstar.table={above}{self.run}.vstar.jsonl"] if self.makes_table else []
        return shlex.join([self.recipe, *self.changes, *copies, *table])


def deployment(
    recipe: Path,
    changes: Sequence[str],
    *,
    cluster: str,
    to: Path | None,
    target: str,
    hours: int | None,
    image: str | None,
) -> Deployment:
    """What is to be written; RecipeError for what cannot be started there."""
    project = Path.cwd().resolve()
    path = recipe.resolve()
    if not path.is_relative_to(project):
        fix = f"call it from the folder that holds your project; {project} will be what is sent"
        raise RecipeError.of("RECIPE", f"{recipe} is not below the working directory", fix)
    if set_here := next((each for each in changes if each.startswith(("run.folder=", "placement.cluster="))), None):
        fix = "leave it out; the files name the folder, and --cluster the devices"
        raise RecipeError.of(set_here.partition("=")[0], "is set by the files that are written", fix)
    if hours is not None and target not in LIMITED:
        raise RecipeError.of(
            "--hours", f"has no effect for {target}, whose jobs have no end of their own", "leave it out"
        )
    hours = USUAL_HOURS if hours is None else hours
    if not 1 <= hours <= 24 * 365:
        raise RecipeError.of("--hours", f"is {hours}", "give a number of hours from 1 to 8760")
    hosts, devices, device, threads = _machines(parse_cluster(cluster, field="--cluster"))
    name = NAME.sub("-", path.stem.lower()).strip("-")[:LONGEST_NAME].strip("-") or "run"
    folder = (to or Path("deploy") / f"{name}-{target}").resolve()
    if not folder.is_relative_to(project) or folder == project:
        raise RecipeError.of("--to", f"{folder} is not below the working directory", "name a folder in your project")
    if not PLAIN_PATH.fullmatch(inside := folder.relative_to(project).as_posix()):
        fix = "use letters, digits, dots, dashes and underscores"
        raise RecipeError.of("--to", f"{inside!r} cannot be written into every file without quotes", fix)
    return Deployment(
        name=name,
        project=project,
        recipe=path.relative_to(project).as_posix(),
        changes=(*changes, f"placement.cluster={cluster}"),
        hosts=hosts,
        devices=devices,
        device=device,
        threads=threads,
        hours=hours,
        folder=folder,
        image=image or f"{name}:latest",
    )


def _machines(cluster: Cluster) -> tuple[int, int, str, int]:
    """Machines, devices of each, their name, and the cores of each where they are CPUs."""
    first = cluster.hosts[0]
    if any(host.count != first.count or host.device.name != first.device.name for host in cluster.hosts):
        fix = "use machines that are alike, or write one file for each kind by hand"
        raise RecipeError.of("--cluster", f"{cluster}: machines that differ are not available yet", fix)
    gpu = first.device.kind.has_own_memory
    return len(cluster.hosts), first.count, first.device.name, 0 if gpu else sum(d.threads or 1 for d in first.each)


class _File(Template):
    """A template with `@name`, because most of these files are full of dollar signs."""

    delimiter = "@"


def fill(template: str, values: Mapping[str, Any]) -> str:
    """A file of `templates/`. Text must come quoted for what reads it: `shlex.quote`, `yaml_text` or `repr`."""
    text = files("stretto.deploy").joinpath("templates", template).read_text("utf-8")
    return _File(text).substitute(values)


def yaml_text(text: str) -> str:
    """A text for YAML: JSON, which YAML reads as it is."""
    return json.dumps(text)
