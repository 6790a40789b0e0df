"""The files of each target, by name. A target is a function from a deployment to files; it starts and sends nothing."""

from __future__ import annotations

import hashlib
import shlex
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from stretto.deploy.deployment import INSIDE, Deployment, fill, yaml_text
from stretto.errors import RecipeError

Files = dict[str, str]
"""Name within the folder -> content."""

MODAL = {
    "A100": "A100-80GB", "A100-40GB": "A100-40GB", "H100": "H100", "H200": "H200", "B200": "B200", "L40S": "L40S",
    "L4": "L4", "A10": "A10",
}  # fmt: skip
SKYPILOT = {
    "A100": "A100-80GB", "A100-40GB": "A100", "H100": "H100", "H200": "H200", "B200": "B200", "L40S": "L40S",
    "L4": "L4", "A10": "A10", "A40": "A40", "A6000": "RTXA6000", "RTX3090": "RTX3090", "RTX4090": "RTX4090",
    "V100": "V100-32GB", "MI300X": "MI300X", "GH200": "GH200",
}  # fmt: skip
"""A device's name here -> its name there."""

OLDEST_RAY = "2.52.0"

LEAD = 300
"""Seconds before its time is up that a run is told to save and stop."""


def slurm(made: Deployment) -> Files:
    """A batch script that saves before its time is up, queues itself again and goes on."""
    devices = f"--cpus-per-task={made.threads}" if made.threads else f"--gpus-per-node={made.devices}"
    script = fill(
        "slurm.sh",
        {
            "name": made.name,
            "hosts": made.hosts,
            "devices": devices,
            "hours": made.hours,
            "lead": LEAD,
            "folder": shlex.quote(str(made.folder)),
        },
    )
    return {"job.sh": script, "train.sh": train(made, str(made.project)), "setup.sh": fill("setup.sh", {})}


def docker(made: Deployment) -> Files:
    """An image with the project, and a service that restarts it."""
    _one_machine(made, "docker")
    gpus = "" if made.threads else fill("compose-gpus.yaml", {"devices": made.devices})
    compose = fill("compose.yaml", _words(made) | {"gpus": gpus, "up": "/".join([".."] * (made.inside.count("/") + 1))})
    return container(made) | {"compose.yaml": compose}


def modal(made: Deployment) -> Files:
    """A program of Modal's that trains in a container with a volume, and is retried."""
    _one_machine(made, "modal")
    gpus = "" if made.threads else f"{_named(made, MODAL, 'Modal')}:{made.devices}"
    where = f"cpu={made.threads}.0" if made.threads else f"gpu={gpus!r}"
    values = {
        "name": repr(made.name),
        "volume": repr(f"{made.name}-runs"),
        "dockerfile": repr(f"{made.inside}/Dockerfile"),
        "inside": repr(made.inside),
        "where": where,
        "seconds": min(made.hours, 24) * 3600,
    }
    image = {"Dockerfile": fill("modal.Dockerfile", _image(made))}
    return container(made) | image | {"app.py": fill("modal_app.txt", values)}


def kuberay(made: Deployment) -> Files:
    """A RayJob on Kubernetes with a volume for runs; a job that is tried again goes on."""
    vendor = "amd.com/gpu" if made.device.startswith("MI") else "nvidia.com/gpu"
    resources = {"cpu": made.threads} if made.threads else {vendor: made.devices}
    words = _words(made) | {"resources": _mapping(resources)}
    mount = "\n        - {name: runs, mountPath: /workspace/runs}"
    volume = f"\n    - name: runs\n      persistentVolumeClaim: {{claimName: {made.name}-runs}}"
    head = fill("ray-pod.yaml", words | {"mount": mount, "volume": volume})
    others = fill("ray-pod.yaml", words | {"mount": "", "volume": ""})  # only the host of the command has the run
    workers = ""
    if made.hosts > 1:
        workers = fill("ray-workers.yaml", {"count": made.hosts - 1, "pod": _indented(others, 10)})
    told = {
        "pod": _indented(head, 8),
        "workers": workers,
        "ray": yaml_text(ray_version()),
    }
    job = fill("rayjob.yaml", words | told)
    return container(made) | {"rayjob.yaml": job}


def skypilot(made: Deployment) -> Files:
    """A task of SkyPilot's on machines of whatever cloud has them; recovered after a preemption, it goes on."""
    gpus = "" if made.threads else f"{_named(made, SKYPILOT, 'SkyPilot')}:{made.devices}"
    where = f"cpus: {made.threads}+" if made.threads else f"accelerators: {gpus}"
    # Names of buckets are everybody's, so the project's own is in it.
    bucket = f"{made.name}-runs-{hashlib.sha256(f'{uuid.getnode()}|{made.project}'.encode()).hexdigest()[:8]}"
    packages = f"\n  pip install --no-deps {shlex.join(made.packages)}" if made.packages else ""
    told = {
        "where": where,
        "hosts": made.hosts,
        "bucket": bucket,
        "packages": packages,
        "extras": ",".join(made.extras),
    }
    sky = fill("sky.yaml", _words(made) | told)
    return {"sky.yaml": sky, "train.sh": train(made, None), "ray.sh": fill("sky-ray.sh", {})}


TARGETS: Mapping[str, Callable[[Deployment], Files]] = {
    "slurm": slurm, "modal": modal, "kuberay": kuberay, "skypilot": skypilot, "docker": docker,
}  # fmt: skip

NEEDS_SOURCE = frozenset({"modal", "kuberay", "skypilot", "docker"})
"""Targets whose machines have no stretto yet."""

NEXT = {
    "slurm": "look at {folder}/setup.sh, then: sbatch {folder}/job.sh",
    "modal": "modal run --detach {folder}/app.py",
    "kuberay": "docker build -f {folder}/Dockerfile -t {image} . && docker push {image} && "
    "kubectl apply -f {folder}/rayjob.yaml",
    "skypilot": "sky jobs launch {folder}/sky.yaml",
    "docker": "docker compose -f {folder}/compose.yaml up --build",
}
"""What to type next."""


def train(made: Deployment, project: str | None) -> str:
    """The script that begins the run or goes on with it; without `project`, in the folder that it is called in."""
    return fill(
        "train.sh",
        {
            "project": "." if project is None else shlex.quote(project),
            "run": shlex.quote(made.run),
            "before": fill("value.sh", {"told": made.told}) if made.makes_table else "",
            "command": f'{made.verb} {made.told} run.folder="$run"',
        },
    )


def container(made: Deployment) -> Files:
    """What an image is built from."""
    dockerfile = fill("Dockerfile", _image(made))
    return {
        "Dockerfile": dockerfile,
        "Dockerfile.dockerignore": fill("dockerignore", {}),
        "train.sh": train(made, INSIDE),
    }


def _image(made: Deployment) -> dict[str, str]:
    """What a Dockerfile is told. Packages that carry files need nothing themselves, and get a step of their own."""
    step = f"\nRUN pip install --no-cache-dir --no-deps {shlex.join(made.packages)}" if made.packages else ""
    return {"folder": made.inside, "extras": ",".join(made.extras), "packages": step}


def ray_version() -> str:
    """The Ray of the image, of which KubeRay is told: that of this environment, or the oldest that asks for tokens."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return OLDEST_RAY


def _words(made: Deployment) -> dict[str, str]:
    """What files of YAML are told."""
    return {
        "name": made.name,
        "image": yaml_text(made.image),
        "inside": made.inside,
        "dockerfile": yaml_text(f"{made.inside}/Dockerfile"),
    }


def _one_machine(made: Deployment, target: str) -> None:
    if made.hosts > 1:
        reason = f"{made.hosts} machines with {target} are not available yet"
        raise RecipeError.of("--cluster", reason, "use one machine, or slurm, kuberay or skypilot")


def _named(made: Deployment, names: Mapping[str, str], who: str) -> str:
    """What a device is called by somebody else."""
    if made.device not in names:
        reason = f"what {who} calls {made.device} is not known here"
        raise RecipeError.of("--cluster", reason, f"use one of {', '.join(names)}")
    return names[made.device]


def _mapping(values: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{yaml_text(key)}: {value}" for key, value in values.items()) + "}"


def _indented(text: str, spaces: int) -> str:
    return "".join(" " * spaces + line if line.strip() else line for line in text.splitlines(keepends=True)).rstrip()
