"""How many threads CPU devices compute with: what the cluster says, what a user has set, or what is free."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from running import recipe_in, resume, start
from stretto.runtime import cpu_threads
from stretto.runtime.cpu_threads import threads_of
from stretto.runtime.inputs import NAME, read_record
from stretto.runtime.plans import make_plan


@pytest.fixture
def machine(monkeypatch):
    """A machine of four cores, of which others use some."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(cpu_threads, "cores", lambda: 4)

    def others(busy):
        monkeypatch.setattr(cpu_threads, "busy_cores", lambda: busy)

    return others


def threads(folder, cluster, before=None):
    """Threads by device, and what is said of them."""
    told = []
    recipe = recipe_in(folder, placement={"cluster": cluster})
    return dict(threads_of(recipe, make_plan(recipe), told.append, before=before)), told


def test_an_idle_machine_is_used_whole_and_nothing_is_said(tmp_path, machine):
    machine(0.2)
    assert threads(tmp_path, "1xcpu") == ({"localhost/cpu:0": 4}, [])


def test_cores_in_use_are_left_and_that_is_said(tmp_path, machine):
    machine(1.1)
    chosen, (said,) = threads(tmp_path, "1xcpu")
    assert chosen == {"localhost/cpu:0": 3}
    assert said == "3 threads on 4 cores: other programs keep 1 of them busy"


def test_a_user_s_number_wins(tmp_path, machine, monkeypatch):
    machine(1.1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads(tmp_path, "1xcpu") == ({"localhost/cpu:0": 4}, [])
    chosen, (said,) = threads(tmp_path, "1xcpu", before=2)
    assert chosen == {"localhost/cpu:0": 4}
    assert said == "this run began with 2 threads and goes on with 4: its numbers may differ in the last bits"


@pytest.mark.parametrize("busy", [0.0, 1.1, 4.0])
def test_a_run_keeps_to_the_threads_that_it_began_with(tmp_path, machine, busy):
    machine(busy)
    assert threads(tmp_path, "1xcpu", before=3) == ({"localhost/cpu:0": 3}, [])


def test_a_machine_with_fewer_cores_cannot_keep_to_them_and_that_is_said(tmp_path, machine):
    machine(0.0)
    chosen, (said,) = threads(tmp_path, "1xcpu", before=6)
    assert chosen == {"localhost/cpu:0": 4}
    assert said.startswith("this run began with 6 threads and goes on with 4")


def test_a_resume_on_a_busy_machine_computes_with_the_threads_of_before(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu_threads, "cores", lambda: 3)
    monkeypatch.setattr(cpu_threads, "busy_cores", lambda: 1.0)
    run = start(tmp_path, run__steps=1, checkpoint__every=1).folder
    assert read_record(run).threads == json.loads((run / NAME).read_text())["threads"] == 2
    monkeypatch.setattr(cpu_threads, "busy_cores", lambda: 0.0)
    resume(run, changes=["run.steps=2"], allow=["run.steps"])
    assert read_record(run).threads == 2


def test_devices_have_the_threads_that_the_cluster_says(tmp_path, machine):
    machine(3.0)
    assert threads(tmp_path, "1xcpu+1xcpu2") == ({"localhost/cpu:1": 2}, [])
    assert threads(tmp_path, "1xcpu3") == ({"localhost/cpu:0": 3}, [])
    file = tmp_path / "cluster.yaml"
    file.write_text("hosts: [{device: cpu, devices: 2, threads: [2, 1]}]\n")
    assert threads(tmp_path, str(file))[0] == {"localhost/cpu:0": 2, "localhost/cpu:1": 1}


def seen_by_a_new_thread():
    """The number that a thread begins with; those that have computed already keep theirs."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_a_run_hands_the_number_of_threads_back(tmp_path):
    before, during = seen_by_a_new_thread(), []
    start(tmp_path, at=lambda *_: during.append(seen_by_a_new_thread()), placement__cluster=f"1xcpu{before + 1}")
    assert max(during) == before + 1
    assert seen_by_a_new_thread() == before
