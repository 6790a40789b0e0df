"""Puts the files of a deployment into a folder, with stretto itself where the machines have none, and the best plan.

A new machine gets the very code that wrote the files. From a clone that is its source, without what Git ignores; from
an installed package the same files are taken from where it was installed, with what it asks for beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

from stretto import __version__
from stretto.deploy.deployment import INPUTS, Deployment
from stretto.deploy.targets import NEEDS_SOURCE, Files
from stretto.errors import RecipeError
from stretto.storage.atomic import storing

PACKAGE = Path(__file__).resolve().parents[1]
CLONE = PACKAGE.parents[1]
OF_CLONE = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")


def write(made: Deployment, target: str, written: Files, plan: Mapping[str, Any] | None) -> list[Path]:
    """The paths of what was written; a folder that is there already is refused."""
    if made.folder.exists():
        raise RecipeError.of("--to", f"{made.folder} exists already", "name another folder, or remove it")
    draft = made.folder.with_name(f".{made.folder.name}.partial")
    with storing(made.folder):
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir(parents=True)
            for name, content in written.items():
                path = draft / name
                path.write_text(content, encoding="utf-8")
                if path.suffix == ".sh":
                    path.chmod(0o755)
            if plan is not None:
                (draft / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
            for each in made.inputs:
                copy = draft / INPUTS / each.name
                copy.parent.mkdir(parents=True, exist_ok=True)
                if each.path.is_dir():
                    shutil.copytree(each.path, copy, ignore=shutil.ignore_patterns(*each.without), dirs_exist_ok=True)
                else:
                    shutil.copy2(each.path, copy)
            if target in NEEDS_SOURCE:
                copy_source(draft / "stretto")
            draft.rename(made.folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return sorted(path for path in made.folder.iterdir())


def copy_source(target: Path) -> None:
    """This very stretto as a folder that pip installs."""
    shutil.copytree(PACKAGE, target / "src" / "stretto", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    if (CLONE / "pyproject.toml").is_file() and (CLONE / "src" / "stretto") == PACKAGE:
        for name in OF_CLONE:
            shutil.copy2(CLONE / name, target / name)
        return
    (target / "pyproject.toml").write_text(_project(), encoding="utf-8")
    pinned = sorted(
        {f"{each.metadata['Name']}=={each.version}" for each in distributions()} - {f"stretto=={__version__}"}
    )
    (target / "constraints.txt").write_text("\n".join(pinned) + "\n", encoding="utf-8")


def _project() -> str:
    """What pip needs to know of an installed stretto: its requirements as its own metadata has them."""
    try:
        found = distribution("stretto")
    except PackageNotFoundError:
        reason = "is neither a clone nor installed, so there is nothing that other machines could install"
        raise RecipeError.of("stretto", reason, "install it with pip") from None
    plain, extras = list[str](), dict[str, list[str]]()
    for need in found.requires or ():
        name, _, marker = need.partition("; extra == ")
        if marker:
            extras.setdefault(marker.strip().strip("'\""), []).append(name.strip())
        else:
            plain.append(need)
    listed = "\n".join(f"{extra} = {json.dumps(needs)}" for extra, needs in extras.items())
    return (
        '[build-system]\nrequires = ["hatchling>=1.27"]\nbuild-backend = "hatchling.build"\n\n'
        f'[project]\nname = "stretto"\nversion = "{__version__}"\nrequires-python = ">=3.11"\n'
        f'dependencies = {json.dumps(plain)}\n\n[project.scripts]\nstretto = "stretto.cli.main:main"\n\n'
        f'[project.optional-dependencies]\n{listed}\n\n[tool.hatch.build.targets.wheel]\npackages = ["src/stretto"]\n'
    )
