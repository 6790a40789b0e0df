import json
import mmap
from dataclasses import asdict

import pytest

from stretto.bench import worker
from stretto.bench.cases import BenchCase
from stretto.bench.jobs import SIDES, Job, JobResult, job_from, measured_from, run_apart
from stretto.bench.machine import PeakMemory, describe, matmul_rate, threads
from stretto.errors import StrettoError


def job(folder, side="prepare", **changes):
    case = BenchCase(name="tiny", prompt=1, dtype="float32", prompts=2, samples=2)
    return Job(**({"side": side, "case": case, "model": "scratch", "folder": str(folder), "threads": 1} | changes))


def test_jobs_and_results_survive_being_written(tmp_path):
    asked = job(tmp_path, batch=8)
    assert job_from(json.loads(json.dumps(asdict(asked)))) == asked
    measured = JobResult(name="x", seconds=(1.0, 2.0), stages={"train": 1.0}, facts={"a": [1]})
    assert measured_from(json.loads(json.dumps(asdict(measured)))) == measured
    assert measured.best == 1.0


def test_every_side_is_a_function_in_a_module_of_the_room():
    for target in SIDES.values():
        module, _, name = target.partition(":")
        assert module.startswith("stretto.bench.")
        assert name.isidentifier()


def worked(tmp_path, asked):
    """What the worker wrote for a job."""
    files = tmp_path / "job.json", tmp_path / "result.json"
    files[0].write_text(json.dumps(asdict(asked)))
    assert worker.main([str(file) for file in files]) == 0
    return json.loads(files[1].read_text())


@pytest.fixture
def threads_kept():
    """The worker sets torch's threads for its process; this one's are put back."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_worker_does_the_job_and_adds_its_memory(tmp_path, threads_kept):
    found = measured_from(worked(tmp_path, job(tmp_path / "tiny")))
    assert found.name == "prepare"
    assert found.memory >= 0
    assert (tmp_path / "model-float32" / "config.json").exists()
    assert len(json.loads((tmp_path / "tiny" / "prompts.json").read_text())) == 4


def test_a_failure_that_is_ours_is_written_into_the_result(tmp_path, threads_kept):
    (tmp_path / "tiny").mkdir()
    found = worked(tmp_path, job(tmp_path / "tiny", model="./nothing.gguf"))
    assert "nothing.gguf" in found["error"]


def test_a_process_that_breaks_is_an_error_that_quotes_it(tmp_path):
    with pytest.raises(StrettoError, match=r"no such side of tiny ended with exit code 1: KeyError: 'no such side'"):
        run_apart(job(tmp_path, side="no such side"))


def test_memory_that_is_taken_is_seen():
    memory = PeakMemory("cpu")
    block = mmap.mmap(-1, 64 << 20)  # never what another test has freed
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    gained = memory.gained()
    del block
    assert 60 << 20 <= gained < 200 << 20
    assert memory.gained() >= 60 << 20, "a peak is not forgotten when the memory is given back"


def test_the_rate_of_products_is_measured():
    assert matmul_rate({(8, 16): 2, (4, 8): 1}, dtype="float32", device="cpu") > 0


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads() >= 1
    about = describe(threads=2)
    assert about["threads"] == 2
    assert about["cpu"]
    assert json.dumps(about)
