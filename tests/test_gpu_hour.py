"""The first hour of a GPU, tried without one: each part is on the page once it ends, and a second call goes on."""

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_hour"


@pytest.fixture(scope="module")
def hour():
    """The script as a module, which finds its parts beside it."""
    sys.path.insert(0, str(SCRIPT.parent))
    loader = SourceFileLoader("gpu_hour", str(SCRIPT))
    module = module_from_spec(spec_from_loader("gpu_hour", loader))
    loader.exec_module(module)
    sys.path.remove(str(SCRIPT.parent))
    return module


def test_correctness_comes_first(hour):
    parts = hour.part_names(tiny=False)
    assert tuple(parts[:4]) == hour.TOGETHER == ("gradients", "engine", "resume", "tests")
    assert len(parts) == len(set(parts))
    assert {part.split()[0] for part in parts} == set(hour.PARTS)
    assert {part.split()[0] for part in hour.part_names(tiny=True)} == set(hour.PARTS)


def test_the_page_says_what_was_found_what_was_not_and_what_is_left(hour):
    about = {"device": "a GPU", "memory": "80 GB", "versions": "torch 2"}
    rows = [
        {"part": "gradients", "right": True, "seconds": 3.0, "lines": ["1e-9 apart"]},
        {"part": "engine", "right": False, "seconds": 4.0, "lines": ["3 of 4"]},
        {"part": "resume", "right": None, "seconds": 240.0, "lines": ["it was not done within 4.0 minutes"]},
    ]
    page = hour.page_of(rows, about, left=["plan"], tiny=False)
    assert "## gradients: right, 3 s\n\n- 1e-9 apart" in page
    assert "## engine: **WRONG**, 4 s" in page
    assert "## resume: **no result**, 240 s" in page
    assert page.endswith("Not reached: plan.\n")


def called(page, *options):
    command = [sys.executable, str(SCRIPT), "--tiny", "--page", str(page), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=580)


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_without_time_nothing_begins(tmp_path):
    import torch

    if not torch.cuda.is_available():
        done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, "--tiny" in done.stderr) == (2, True)
    assert called(tmp_path / "page.md", "--minutes", "0").returncode == 0
    assert not (tmp_path / "page.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_parts_run_on_a_cpu_and_a_second_call_goes_on(tmp_path):
    page = tmp_path / "page.md"
    done = called(page, "--only", "gradients")
    assert done.returncode == 0, done.stdout + done.stderr
    done = called(page, "--only", "gradients", "engine", "step")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradients" not in done.stdout.split("written to")[0]
    text = page.read_text()
    assert [text.count(f"## {part}") for part in ("gradients", "engine", "step scratch full 43")] == [1] * 3
    assert "gradient norm on the same tokens" in text
    assert "WRONG" not in text
