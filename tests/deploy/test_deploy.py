"""Files that start a run elsewhere: what reads them can read them, and no text of the user's is a command in them."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from running import written
from stretto.api import deploying
from stretto.api.deploying import deploy, extras_of, packages_of
from stretto.api.recipes import PROBES
from stretto.checks.recipe import examine
from stretto.cli.main import main
from stretto.deploy.deployment import deployment
from stretto.deploy.targets import NEEDS_SOURCE, TARGETS
from stretto.errors import RecipeError
from stretto.planner.candidate import Candidate
from stretto.recipe.load import load_recipe
from test_recipes import RECIPES, SHIPPED, made_before, name_of, online

assert online  # a fixture
DOCKERIGNORE = files("stretto.deploy").joinpath("templates", "dockerignore").read_text().splitlines()
IGNORED = [line.removeprefix("**/") for line in DOCKERIGNORE if not line.startswith("#")]
SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
ODD = "a recipe; touch pwned $(touch pwned) 'x'"
"""A name that would do something in a shell."""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a recipe, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    return tmp_path


def made(target, recipe="tiny.yaml", *, cluster, **options):
    """The folder of a deployment."""
    return deploy(target, Path(recipe), cluster=cluster, **options).folder


def faked(folder, **scripts):
    """A folder of programs that stand for those of a cluster, each a shell script."""
    folder.mkdir(exist_ok=True)
    for name, body in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    return folder


def surroundings(project, fakes, **more):
    return {"PATH": f"{fakes}:{os.environ['PATH']}", "HOME": str(project), "LOG": str(project / "log"), **more}


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "node1"}
SAVES = """
echo "stretto $* at $RAY_ADDRESS, token of ${#RAY_AUTH_TOKEN}" >> "$LOG"
trap 'echo saved >> "$LOG"; exit 143' TERM
touch started
while :; do sleep 0.05; done
"""
"""A stretto that trains until it is told to stop, then saves."""
SRUN = """
echo "srun $*" >> "$LOG"
case "$*" in
    *--head*) exec python3 -c 'import os, socket, time
door = socket.create_server(("127.0.0.1", 20000 + int(os.environ["SLURM_JOB_ID"]) % 20000))
time.sleep(60)' ;;
    *) exec sleep 60 ;;
esac
"""
"""Processes on other machines: of the first, something listens where Ray would."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_script_is_one_and_the_plan_is_beside_it(project, target):
    folder = made(target, cluster="2xcpu" if target != "kuberay" else "2x8xH100")
    for script in folder.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
    assert json.loads((folder / "plan.json").read_text())["fits"] is True
    assert sorted(path.name for path in (project / "deploy").iterdir()) == [folder.name], "no draft is left"
    with pytest.raises(RecipeError, match="exists already"):
        made(target, cluster="2xcpu" if target != "kuberay" else "2x8xH100")


def test_train_begins_a_run_and_goes_on_with_it_whatever_it_is_called(project):
    recipe = written(project, name=ODD)
    changes = ["model.scratch.characters=01= $(touch pwned)"]
    folder = made("slurm", recipe, cluster="2xcpu", changes=changes)
    fakes = faked(project / "bin", stretto='printf "%s\\n" "$@" >> "$LOG"')
    environment = surroundings(project, fakes)
    subprocess.run(["bash", folder / "train.sh"], check=True, env=environment)
    told = (project / "log").read_text().splitlines()
    run = told[-1].removeprefix("run.folder=")
    assert told == ["train", recipe.name, *changes, "placement.cluster=2xcpu", told[-1]]
    (project / run).mkdir(parents=True)
    (project / run / ".lock").write_text("")
    subprocess.run(["bash", folder / "train.sh"], check=True, env=environment)
    assert (project / "log").read_text().splitlines()[-5] == "train" and not (project / run).exists(), "it never began"
    (project / run).mkdir(parents=True)
    (project / run / "recipe.yaml").write_text("")
    subprocess.run(["bash", folder / "train.sh"], check=True, env=environment)
    assert (project / "log").read_text().splitlines()[-2:] == ["resume", run]
    assert not list(project.rglob("pwned"))


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_train_sh_of_every_target_begins_every_recipe_in_a_clean_folder(path, tmp_path, monkeypatch, online):
    """The command that a job runs has nothing wrong with it where only what was sent is there, twice in a row."""
    project = tmp_path / "project"
    shutil.copytree(RECIPES, project / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(project)
    made_before(project, path.read_text())
    monkeypatch.setattr(deploying, "plan_there", lambda *given: {"seconds": {"step": 1.0}, "strategy": "flatten"})
    fakes = faked(tmp_path / "bin", stretto='printf "%s\\n" "$1" >> "$LOG"; printf "%s\\n" "$@" > "$LOG.$1"')
    for target in TARGETS:
        monkeypatch.chdir(project)
        folder = made(target, f"recipes/{path.name}", cluster="1xH100")
        there = project
        if target in NEEDS_SOURCE:
            there = tmp_path / target
            shutil.copytree(project, there, ignore=shutil.ignore_patterns(*IGNORED))
        script = there / folder.relative_to(project) / "train.sh"
        script.write_text(script.read_text().replace("cd -- /workspace", f"cd -- {there}"))
        log = tmp_path / f"{target}.log"
        environment = surroundings(there, fakes) | {"LOG": str(log)}
        subprocess.run(["bash", script], check=True, cwd=there, env=environment)
        verb = {"tiny-sft": "sft", "smollm2-sft": "sft"}.get(path.stem, "train")
        verb = "reward-model" if "reward-model" in path.stem else verb
        assert log.read_text().split() == [*["value"] * ("astar" in path.stem), verb]
        monkeypatch.chdir(there)
        _, recipe, *changes = Path(f"{log}.{verb}").read_text().splitlines()
        assert changes[-1] == f"run.folder=runs/{path.stem}"
        _, problems = examine(Path(recipe), [*changes[:-1], "run.folder=auto"], root=there / "recipes", probes=PROBES)
        assert [problem.field for problem in problems] == ["algorithm.vstar.table"] * ("astar" in path.stem), problems
        if "astar" in path.stem:
            _, recipe, *told = Path(f"{log}.value").read_text().splitlines()
            (table,) = [change.partition("=")[2] for change in told if change.startswith("algorithm.vstar.table")]
            assert told == changes[:-1]
            assert (there / "recipes" / table).resolve().parent == (there / "runs").resolve(), "on the volume"


@pytest.mark.slow
@pytest.mark.timeout(600)  # each start loads PyTorch, three of them on two cores
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny-astar-po", ["task.source.count=120", "batch.prompts=8", "algorithm.vstar.samples=2"]),
        ("tiny-sft", ["optimizer.warmup=0"]),
        ("tiny", ["batch.prompts=2", "batch.samples=2", "placement.strategy=flatten", "deadlines.start=500"]),
    ],
)
def test_train_sh_trains_and_is_started_again(name, changes, tmp_path, monkeypatch):
    shutil.copytree(RECIPES, tmp_path / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    usual = ["run.steps=2", "evaluate.every=0", "checkpoint={every: 1, best: null}", "guards.min_disk_gb=0"]
    usual += ["model.scratch.warmup_steps=2"] if name != "tiny-sft" else []
    folder = made(
        "slurm", f"recipes/{name}.yaml", cluster="3xcpu" if name == "tiny" else "1xcpu", changes=usual + changes
    )
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for _ in range(2):
        ran = subprocess.run(
            ["bash", folder / "train.sh"], env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "runs" / name / "checkpoints" / "step-000002").is_dir()
    assert (tmp_path / "runs" / f"{name}.vstar.jsonl").is_file() == ("astar" in name)


VALUE = """
echo "$1" >> "$LOG"
if [ "$1" = value ]; then trap 'echo ended >> "$LOG"; exit 143' TERM; touch started; while :; do sleep 0.05; done; fi
"""


def test_a_job_that_ends_while_it_makes_its_table_is_queued_again(project):
    folder = made("slurm", written(project, algorithm={"name": "astar_po"}), cluster="1xcpu")
    fakes = faked(project / "bin", stretto=VALUE, scontrol='echo "scontrol $*" >> "$LOG"', hostname="echo 127.0.0.1")
    environment = surroundings(project, fakes, **SLURM)
    process = subprocess.Popen(["bash", folder / "job.sh"], env=environment, cwd=project, start_new_session=True)
    assert ended(project, process, signal.SIGUSR1) == (0, ["value", "ended", "scontrol requeue 7"])


def test_a_table_that_cannot_be_made_ends_the_job_with_its_exit_code(project):
    folder = made("slurm", written(project, algorithm={"name": "astar_po"}), cluster="1xcpu")
    fakes = faked(project / "bin", stretto='echo "$1" >> "$LOG"; exit 3')
    ran = subprocess.run(["bash", folder / "train.sh"], env=surroundings(project, fakes), check=False)
    assert ran.returncode == 3 and (project / "log").read_text().split() == ["value"]


def test_a_table_that_the_recipe_names_is_not_made_anew(project):
    recipe = written(project, algorithm={"name": "astar_po", "vstar": {"table": "mine.jsonl"}})
    assert "stretto value" not in (made("slurm", recipe, cluster="1xcpu") / "train.sh").read_text()


@pytest.mark.parametrize("target", ["docker", "kuberay", "skypilot", "modal"])
def test_an_input_outside_the_project_is_refused_where_it_is_not_sent(project, tmp_path_factory, target):
    outside = tmp_path_factory.mktemp("A")
    rows = "\n".join(json.dumps({"prompt": f"{number:b}=", "answer": "1"}) for number in range(20))
    (outside / "train.jsonl").write_text(rows)
    (outside / "judge.py").write_text("def good(answer, prompt, signals):\n    return 1.0\n")
    (outside / "text.md").write_text("One and one are two.")
    (project / "linked.jsonl").symlink_to(outside / "train.jsonl")
    (project / "judge.py").symlink_to(outside / "judge.py")
    (project / "inside.jsonl").write_text(rows)
    source = {"kind": "jsonl", "path": "inside.jsonl"}

    def task(**keys):
        return {"task": {"source": source | keys, "holdout": {"prompts": 4}}}

    for field, changes in {
        "task.source.path": task(path=os.path.relpath(outside / "train.jsonl", project)),
        "task.source.path ": task(path=str(outside / "train.jsonl")),
        "task.source.path  ": task(path="linked.jsonl"),
        "environment.corpus": {"environment": {"kind": "tools", "tools": ["search"], "corpus": str(outside)}},
        "rewards.0.kind": {"rewards": [{"kind": "judge:good"}]},
    }.items():
        with pytest.raises(RecipeError, match="lies outside") as caught:
            made(target, written(project, **changes), cluster="1xH100")
        assert [problem.field for problem in caught.value.problems] == [field.strip()]
    assert not (project / "deploy").exists()
    if target == "docker":
        made("slurm", written(project, **task(path="linked.jsonl")), cluster="1xH100")
        made(target, written(project, **task()), cluster="1xH100")


def test_inputs_that_the_copy_of_the_project_leaves_out_are_copied_beside_it(project, monkeypatch):
    names = "runs/old/samples/step-000001.jsonl", "runs/old/checkpoints/step-000001/model.safetensors"
    for name in names:
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("{}")
    monkeypatch.setattr(deploying, "plan_there", lambda *given: {"seconds": {"step": 1.0}, "strategy": "flatten"})
    rows = "\n".join(json.dumps({"prompt": f"{number:b}=", "answer": "1"}) for number in range(20))
    (project / "runs" / "my rows.jsonl").write_text(rows)
    (project / ".env.jsonl").write_text(rows)
    task = {"source": {"kind": "jsonl", "path": "runs/my rows.jsonl"}, "holdout": {"prompts": 4}}
    recipe = written(project, task=task, batch__lengths={"from_run": "runs/old"})
    folder = made("docker", recipe, cluster="1xH100")
    inputs = {path.relative_to(folder).as_posix() for path in (folder / "inputs").rglob("*") if path.is_file()}
    assert inputs == {"inputs/runs-my-rows.jsonl", "inputs/runs-old/samples/step-000001.jsonl"}
    told = (folder / "train.sh").read_text()
    assert "task.source.path=deploy/tiny-docker/inputs/runs-my-rows.jsonl" in told
    assert "batch.lengths.from_run=deploy/tiny-docker/inputs/runs-old " in told
    shutil.rmtree(folder)
    task["source"]["path"] = ".env.jsonl"
    folder = made("docker", written(project, task=task), cluster="1xH100")
    assert (folder / "inputs" / "env.jsonl").is_file(), "what is often secret, and is named"


def test_what_the_output_says_of_a_chain(tmp_path, monkeypatch, capsys, online):
    shutil.copytree(RECIPES, tmp_path / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    ppo = tmp_path / "recipes" / "tiny-ppo.yaml"
    assert main(["deploy", "docker", str(ppo), "--cluster", "1xH100"]) == 2
    assert "tiny-sft" in capsys.readouterr().err, "the model that is trained first"
    (tmp_path / "runs" / "tiny-sft").mkdir(parents=True)
    assert main(["deploy", "docker", "recipes/tiny-sft.yaml", "--cluster", "1xH100"]) == 0
    told = capsys.readouterr().out
    assert (
        "not available for supervised training yet" in told
        and "train.sh calls stretto sft" in told
        and "runs/tiny-sft" in told
    )
    assert main(["deploy", "docker", "recipes/tiny-astar-po.yaml", "--cluster", "1xH100"]) == 0
    assert "makes the table of V* first (runs/tiny-astar-po.vstar.jsonl)" in capsys.readouterr().out


def job(project, folder, **more):
    """The batch script as Slurm would run it: a copy of it, somewhere else."""
    fakes = faked(
        project / "bin", stretto=SAVES, scontrol='echo "scontrol $*" >> "$LOG"', srun=SRUN, hostname="echo 127.0.0.1"
    )
    spool = project / "spool.sh"
    spool.write_text((folder / "job.sh").read_text())
    environment = surroundings(project, fakes, **(SLURM | more))
    return subprocess.Popen(["bash", spool], env=environment, cwd=project, start_new_session=True)


def ended(project, process, signal_number):
    """(exit code, log) once the script was sent a signal."""
    try:
        while not (project / "started").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal_number)
        code = process.wait(timeout=30)
        with pytest.raises(ProcessLookupError):  # nothing that it started is left
            for _ in range(200):
                os.killpg(process.pid, 0)
                time.sleep(0.02)
        return code, (project / "log").read_text().splitlines()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_job_whose_time_is_up_saves_and_queues_itself_again(project):
    folder = made("slurm", cluster="2xcpu")
    code, log = ended(project, job(project, folder), signal.SIGUSR1)
    assert code == 0 and log[0].startswith("stretto train tiny.yaml") and log[1:] == ["saved", "scontrol requeue 7"]


def test_a_job_that_is_cancelled_saves_and_stays_away(project):
    folder = made("slurm", cluster="2xcpu")
    code, log = ended(project, job(project, folder), signal.SIGTERM)
    assert code == 143 and log[1:] == ["saved"]


@pytest.mark.slow
def test_several_hosts_become_one_ray_cluster_with_a_token(project):
    folder = made("slurm", cluster="2x8xH100", changes=["model.dtype=bfloat16"])
    job_id = str(os.getpid())  # the port follows from it
    port = 20000 + os.getpid() % 20000
    code, log = ended(project, job(project, folder, SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID=job_id), signal.SIGUSR1)
    assert code == 0
    asked = {line.split()[-1]: line for line in log if line.startswith("srun")}
    assert f"--nodelist=node1 --overlap ray start --block --head --node-ip-address=127.0.0.1 --port={port}" in log[0]
    others = asked[f"--address=127.0.0.1:{port}"]
    assert "--nodes=1 --ntasks=1 --exclude=node1" in others
    (told,) = [line for line in log if line.startswith("stretto")]
    assert told.endswith(f"at 127.0.0.1:{port}, token of 64")
    lines = [line for line in (folder / "job.sh").read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --signal=B:USR1@300"} <= set(lines)


@pytest.mark.parametrize(("cluster", "workers"), [("8xH100", 0), ("3x4xMI300X", 2)])
def test_a_rayjob_is_what_its_schema_says(project, cluster, workers):
    claim, ray_job = yaml.safe_load_all((made("kuberay", cluster=cluster) / "rayjob.yaml").read_text())
    jsonschema.validate(ray_job, SCHEMA)
    groups = ray_job["spec"]["rayClusterSpec"].get("workerGroupSpecs", [])
    assert [group["replicas"] for group in groups] == [workers] * bool(workers)
    head = ray_job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (gpus,) = head["containers"][0]["resources"]["limits"].items()
    assert gpus == (("amd.com/gpu", 4) if "MI" in cluster else ("nvidia.com/gpu", 8))
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in head["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [claim["metadata"]["name"]]


def test_a_schema_that_takes_anything_would_prove_nothing(project):
    _, ray_job = yaml.safe_load_all((made("kuberay", cluster="8xH100") / "rayjob.yaml").read_text())
    ray_job["spec"]["rayClusterSpec"]["headGroupSpecs"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(ray_job, SCHEMA)


def test_a_service_of_compose_has_its_gpus_its_volumes_and_time_to_save(project):
    folder = made("docker", cluster="4xL4")
    service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["train"]
    assert (folder / service["build"]["context"]).resolve() == project
    assert (project / service["build"]["dockerfile"]).is_file()
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 4
    assert service["stop_signal"] == "SIGTERM" and service["stop_grace_period"] == "10m"
    assert (folder / "stretto" / "src" / "stretto" / "deploy" / "templates" / "Dockerfile").is_file()
    assert not list(folder.rglob("*.pyc"))


@pytest.mark.parametrize(
    ("changes", "extras"),
    [
        ((), "ray,tasks"),
        (("model.name=HuggingFaceTB/SmolLM2-135M", "model.quantize=nf4", "model.adapter={}"), "ray,tasks,quant"),
        (("environment={kind: tools}",), "ray,tasks,tools"),
        (("environment={kind: program, command: [python, -c, pass]}", "log=[mlflow]"), "ray,tasks,serve,mlflow"),
    ],
)
def test_what_a_recipe_needs_is_installed(project, changes, extras):
    recipe = load_recipe(project / "tiny.yaml", changes)
    made_for = deployment(Path("tiny.yaml"), (), cluster="1xL4", to=None, target="x", hours=None, image=None)
    for target in ("docker", "modal", "kuberay", "skypilot"):
        text = "".join(TARGETS[target](replace(made_for, extras=extras_of(recipe))).values())
        assert f"stretto[{extras}]" in text


def test_images_without_vllm_are_not_written(project):
    vllm = ["engine.kind=vllm", "model.adapter={}"]
    with pytest.raises(RecipeError, match=r"engine\.kind: what docker installs has no vLLM") as caught:
        made("docker", cluster="1xL4", changes=vllm)
    assert "slurm" in caught.value.problems[0].fix and not (project / "deploy").exists()


def test_a_model_of_a_package_comes_along(project):
    assert packages_of("scratch") == packages_of("org/name") == ()
    (package,) = packages_of("package:yaml/any.gguf")
    assert re.fullmatch(r"PyYAML==[\d.]+", package, re.IGNORECASE)
    made_for = deployment(Path("tiny.yaml"), (), cluster="1xL4", to=None, target="x", hours=None, image=None)
    for target in ("docker", "modal", "skypilot"):
        text = "".join(TARGETS[target](replace(made_for, packages=(package,))).values())
        assert f"--no-deps {package}" in text and f"--no-deps {package}" not in "".join(
            TARGETS[target](made_for).values()
        )


def test_a_dockerfile_keeps_the_rules_that_linters_have(project):
    """Of hadolint's: a tag that is no `latest`, no root at the end, JSON for commands, no lists of packages left."""
    folder = made("docker", cluster="4xL4")
    text = (folder / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "STOPSIGNAL", "ENTRYPOINT"}
    assert {name for name, _ in steps} == known and steps[0][0] == "FROM"
    assert ":" in steps[0][1] and not steps[0][1].endswith(":latest")
    assert [value for name, value in steps if name == "USER"][-1] != "root"
    assert all(isinstance(json.loads(value), list) for name, value in steps if name in ("ENTRYPOINT", "VOLUME"))
    (apt,) = [value for name, value in steps if name == "RUN" and "apt-get install" in value]
    assert "--no-install-recommends" in apt and "rm -rf /var/lib/apt/lists/*" in apt and "apt-get update" in apt
    assert all("--no-cache-dir" in value for name, value in steps if "pip install" in value)
    for value in (value for name, value in steps if name == "COPY"):
        sources = [part for part in value.split()[:-1] if not part.startswith("--")]
        assert all((project / source).exists() for source in sources)
    ignored = (folder / "Dockerfile.dockerignore").read_text().split()
    assert {"**/.git", "runs", "**/.env*"} <= set(ignored)


CHILD = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *ignored: (print("saved", flush=True), sys.exit(143)))
print("started", flush=True)
signal.pause()
"""
"""A run that saves when it is told to stop."""


def preempted(project, lines):
    """What is told by the body of Modal's function, once its process was sent SIGINT."""
    (project / "body.py").write_text(
        "import subprocess\n"
        f"CHILD = {CHILD!r}\n"
        "class runs:\n    commit = staticmethod(lambda: print('committed', flush=True))\n" + lines
    )
    process = subprocess.Popen([sys.executable, project / "body.py"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=30)
    return told.split()


def test_the_plan_is_that_of_the_recipe(project, monkeypatch):
    cells = [
        {"role": role, "devices": ["localhost/cpu:1" if role == "generate" else "localhost/cpu:0"]}
        for role in ("generate", "train", "reference")
    ]
    by_hand = {"placement": {"strategy": "separate", "cells": cells}, "algorithm__kl": {"coef": 0.1}}
    for name, changes, called in (
        ("named", {"placement__strategy": "separate"}, "separate"),
        ("hand", by_hand, "yours"),
    ):
        folder = made("slurm", written(project, name=name, **changes), cluster="2xcpu")
        assert json.loads((folder / "plan.json").read_text())["strategy"].startswith(called)
    monkeypatch.setattr(Candidate, "waits_for", lambda self, workload: iter(["pipelines"]))
    with pytest.raises(RecipeError, match="can be executed yet: pipelines"):
        made("docker", cluster="2xcpu")


def test_a_program_for_modal_is_python_and_names_what_is_there(project):
    folder = made("modal", cluster="8xH100", hours=100)
    tree = ast.parse((folder / "app.py").read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    told = {word.arg: ast.unparse(word.value) for word in function.decorator_list[0].keywords}
    program = (folder / "app.py").read_text()
    lines = program[program.index("    run = subprocess") : program.index("    if code:")]
    lines = textwrap.dedent(lines).replace("bash", sys.executable).replace('"/opt/train.sh"', '"-c", CHILD')
    assert preempted(project, lines) == ["saved", "committed"], "whoever takes the container away sends SIGINT"
    assert told["gpu"] == "'H100:8'" and told["timeout"] == str(24 * 3600), "a day is the most that Modal gives"
    pytest.importorskip("modal")
    subprocess.run([sys.executable, "-W", "error", folder / "app.py"], check=True, cwd=project)


@pytest.mark.parametrize("cluster", ["8xA100", "2x8xH100"])
def test_a_task_of_skypilot_is_yaml_with_scripts_that_are_there(project, cluster):
    folder = made("skypilot", cluster=cluster)
    task = yaml.safe_load((folder / "sky.yaml").read_text())
    hosts = 2 if cluster.startswith("2x8") else 1
    asked = {"8xA100": "A100-80GB:8", "2x8xH100": "H100:8"}.get(cluster)
    assert task["num_nodes"] == hosts and task["resources"].get("accelerators") == asked
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
        for word in script.replace('"', " ").replace("[", " ").split():
            assert "deploy/" not in word or (project / word).exists(), word
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml(str(folder / "sky.yaml")).num_nodes == hosts


def test_what_cannot_be_started_there_is_refused_with_what_to_do(project, tmp_path_factory):
    with pytest.raises(RecipeError, match="is none of them"):
        made("nomad", cluster="8xH100")
    with pytest.raises(RecipeError, match="2 machines with docker are not available yet"):
        made("docker", cluster="2x8xH100")
    with pytest.raises(RecipeError, match="machines that differ"):
        made("slurm", cluster="8xH800+8xH20")
    with pytest.raises(RecipeError, match="what Modal calls H20 is not known"):
        made("modal", cluster="8xH20")
    with pytest.raises(RecipeError, match="is set by the files"):
        made("slurm", cluster="8xH100", changes=["run.folder=x"])
    with pytest.raises(RecipeError, match="not below the working directory"):
        made("slurm", written(tmp_path_factory.mktemp("elsewhere")), cluster="8xH100")
    with pytest.raises(RecipeError, match="not below the working directory"):
        made("slurm", cluster="8xH100", to=Path("../out"))
    with pytest.raises(RecipeError, match="has no effect for kuberay"):
        made("kuberay", cluster="8xH100", hours=3)
    with pytest.raises(RecipeError, match="without quotes"):
        made("slurm", cluster="8xH100", to=Path("my run"))
    with pytest.raises(RecipeError, match=r"batch\.sample"):
        made("slurm", cluster="8xH100", changes=["batch.sample=4"])
    assert not (project / "deploy").exists()
