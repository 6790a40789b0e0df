"""`stretto doctor` and the checks that every run begins with: what is printed, what is refused, and nothing loaded."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from running import recipe_in, written
from stretto.checks import doctor
from stretto.checks.machine.base import Check, Gpu, MachineCheck
from stretto.checks.machine.facts import look
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.openmp import BOUNDED, PASSIVE, USER

OLD = Check(name="packages", ok=False, text="torch>=2.11 is needed, and 1.0 is installed", fix="pip install torch")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return str(written(tmp_path))


def test_the_machine_alone_can_be_asked(recipe, capsys):
    code = main(["doctor"])
    out, error = capsys.readouterr()
    assert error == ""
    assert "packages" in out
    assert "torch " in out
    assert ("nothing wrong was found" in out) == (code == 0)


def test_json_is_one_document_with_a_sentence_per_check(recipe, capsys):
    code = main(["doctor", recipe, "run.steps=2", "--json"])
    out, error = capsys.readouterr()
    document = json.loads(out)
    assert error == ""
    assert list(document) == ["ok", "checks"]
    assert document["ok"] == (code == 0) == all(check["ok"] for check in document["checks"])
    assert all(list(check) == ["name", "ok", "text", "fix"] for check in document["checks"])
    assert all((check["fix"] is None) == check["ok"] for check in document["checks"])
    names = [check["name"] for check in document["checks"]]
    assert len(set(names)) == len(names)
    assert {"packages", "devices", "threads", "disk", "loopback", "address"} <= set(names)


def test_what_fails_is_marked_with_its_fix_and_exits_with_1(recipe, capsys):
    assert main(["doctor", recipe, "guards.min_disk_gb=1e9"]) == 1
    out = capsys.readouterr().out
    (line, fix) = [index for index, text in enumerate(out.splitlines()) if "are needed" in text or "make room" in text]
    assert out.splitlines()[line].startswith("!!  disk")
    assert fix == line + 1
    assert "checks failed" in out


def test_a_wrong_recipe_is_refused_as_everywhere(recipe, capsys):
    assert main(["doctor", recipe, "batch.sampels=2", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [problem["field"] for problem in document["problems"]] == ["batch.sampels"]
    assert document["checks"] is None


HEAVY = ["torch", "transformers", "peft", "accelerate", "vllm", "ray", "gguf", "pandas"]
PROBE = """
import json, sys
from stretto.cli.main import main
main(["doctor", sys.argv[1]])
print("LOADED", [name for name in json.loads(sys.argv[2]) if name in sys.modules])
"""


def test_nothing_heavy_is_loaded(recipe):
    command = [sys.executable, "-W", "error", "-c", PROBE, recipe, json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "packages" in done.stdout
    assert done.stdout.endswith("LOADED []\n")


COMPETING = """
import os, sys
from pathlib import Path
from stretto.checks import doctor
from stretto.recipe.load import parse_recipe
doctor.busy_cores = lambda: float(sys.argv[1])
doctor.admit(parse_recipe({"model": {"name": "scratch"}}), root=Path())
print(os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules)
"""


@pytest.mark.parametrize(("busy", "spins"), [("0", BOUNDED), ("1e9", PASSIVE)])
def test_where_others_take_every_core_a_run_does_not_spin(busy, spins):
    given = {name: value for name, value in os.environ.items() if name not in USER}
    command = [sys.executable, "-c", COMPETING, busy]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [spins["GOMP_SPINCOUNT"], "False"], done.stderr


def test_checks_without_anything_to_say_are_left_out():
    setting = MachineCheck(machine=look())
    assert doctor.examine(setting, [lambda _: None, lambda _: OLD]) == [OLD]


def test_what_runs_at_start_is_part_of_what_the_doctor_asks():
    assert set(doctor.AT_START + doctor.AT_START_OF_SEVERAL) < set(doctor.CHECKS)
    assert len(set(doctor.CHECKS)) == len(doctor.CHECKS)


def test_a_run_of_one_process_is_admitted_here(tmp_path):
    doctor.admit(recipe_in(tmp_path), root=tmp_path)


@pytest.fixture
def outdated(monkeypatch):
    """This machine with a library from long ago."""
    here = look()
    old = replace(here, versions=here.versions | {"torch": "1.0"}, needs={"stretto": ("torch>=2.11",)})
    monkeypatch.setattr(doctor, "look", lambda: old)


def test_train_refuses_a_machine_on_which_it_could_not_go_well(recipe, outdated, capsys, tmp_path):
    assert main(["train", recipe]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "packages: torch>=2.11 is needed, and 1.0 is installed\n    fix: pip install 'torch>=2.11'" in error
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_resume_refuses_it_too(recipe, capsys, request, tmp_path):
    assert main(["train", recipe, "run.steps=1"]) == 0
    request.getfixturevalue("outdated")
    before = sorted(path.name for path in Path("runs/tiny-001").rglob("*"))
    assert main(["resume", "runs/tiny-001"]) == 2
    assert "1.0 is installed" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs/tiny-001").rglob("*")) == before


def test_devices_that_a_run_leaves_without_work_are_told_but_not_refused(recipe, capsys, tmp_path, monkeypatch):
    gpu = Gpu(name="NVIDIA H100 80GB HBM3", memory=80 * 2**30)
    here = replace(look(), gpus=(gpu,) * 4, versions=look().versions | {"torch": "2.13.0+cu130"})
    monkeypatch.setattr(doctor, "look", lambda: here)
    assert main(["train", recipe, f"run.folder={tmp_path / 'one'}", "run.steps=1"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "note: 3 of 4 visible GPUs would have no work; name them all (placement.cluster: 4xH100)" in told
    named = recipe_in(tmp_path, placement={"cluster": "1xgpu"})
    assert doctor.admit(named, root=tmp_path) == []


def test_several_processes_need_more_of_a_machine(tmp_path, monkeypatch):
    recipe = recipe_in(tmp_path)
    spread = recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"cluster": "2xcpu"})})
    here = look()
    bare = replace(here, files=64, shared=2**20, versions={k: v for k, v in here.versions.items() if k != "ray"})
    monkeypatch.setattr(doctor, "look", lambda: bare)
    doctor.admit(recipe, root=tmp_path)
    with pytest.raises(RecipeError) as error:
        doctor.admit(spread, root=tmp_path)
    assert [problem.field for problem in error.value.problems] == ["open files", "shared memory", "ray"]
