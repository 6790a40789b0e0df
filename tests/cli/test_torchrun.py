"""Under a launcher that starts a command once per device: one copy explains, the others are silent, nothing hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from running import written
from stretto.api.torchrun import first_of
from stretto.cli.main import main
from stretto.errors import RecipeError

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_command_that_was_started_once_goes_on():
    assert first_of({}, command="train r.yaml")
    assert first_of(LAUNCHED | {"WORLD_SIZE": "1"}, command="train r.yaml")
    assert first_of({"WORLD_SIZE": "2", "RANK": "1"}, command="train r.yaml")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("word", ["", "two", "-1", "²"])
def test_variables_that_are_no_numbers_are_no_launcher(name, word):
    assert first_of(LAUNCHED | {name: word}, command="train r.yaml")


def test_the_first_of_several_says_what_to_do_and_the_others_end():
    with pytest.raises(RecipeError, match="started 2 copies") as error:
        first_of(LAUNCHED, command="train r.yaml")
    assert "run `stretto train r.yaml` once" in error.value.problems[0].fix
    assert not first_of(LAUNCHED | {"RANK": "1"}, command="train r.yaml")


@pytest.mark.parametrize("command", [("train",), ("resume",), ("train", "engine.kind=vllm")], ids=" ".join)
@pytest.mark.parametrize(("rank", "code"), [("0", 2), ("1", 0)])
def test_the_command_line_ends_at_once(tmp_path, monkeypatch, capsys, command, rank, code):
    monkeypatch.chdir(tmp_path)
    for name, value in (LAUNCHED | {"RANK": rank}).items():
        monkeypatch.setenv(name, value)
    name, *changes = command
    assert main([name, str(written(tmp_path)), *changes]) == code
    out, error = capsys.readouterr()
    assert out == ""
    assert ("without the launcher" in error) == (rank == "0")
    assert error.count("fix:") == (rank == "0")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_one_copy_under_a_launcher_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in (LAUNCHED | {"WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(written(tmp_path)), "run.steps=1"]) == 0
    assert "step 1/1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("launcher", "copies", "changes"),
    [
        ("torchrun --standalone --nproc_per_node 1", 1, ()),
        ("torchrun --standalone --nproc_per_node 2", 2, ()),
        ("torchrun --standalone --nproc_per_node 2", 2, ("engine.kind=vllm",)),
        ("accelerate launch --cpu --num_processes 2 --no_python", 1, ()),  # without GPUs it starts one
        ("accelerate launch --multi_gpu --num_processes 2 --no_python", 2, ("engine.kind=vllm",)),
    ],
)
def test_a_launcher_does_not_hang(tmp_path, launcher, copies, changes):
    programs = Path(sys.executable).parent
    first, *options = launcher.split()
    if not (programs / first).exists():
        pytest.skip(f"{first} is not installed")
    written(tmp_path, run__steps=1)
    done = subprocess.run(
        [programs / first, *options, programs / "stretto", "train", "tiny.yaml", *changes],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == (copies > 1), done.stderr
    assert done.stderr.count("started 2 copies of this command") == (copies == 2)
    if first == "torchrun":
        assert "Traceback" not in done.stderr.partition("ChildFailedError")[0].partition("torch/distributed")[0]
    assert (tmp_path / "runs").exists() == (copies == 1)
