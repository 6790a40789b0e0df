"""How long threads spin is bounded before torch loads, here and in processes that are started; a user's word stays."""

import json
import subprocess
import sys

import pytest

from stretto.openmp import BOUNDED, PASSIVE, USER, bound_spinning, sleeps_at_once, wait_passively

PROBE = "import json, os, sys, stretto; json.dump([dict(os.environ), 'torch' in sys.modules], sys.stdout)"


def environment_of(**given):
    """The environment of a program that has imported stretto."""
    done = subprocess.run([sys.executable, "-c", PROBE], env=given, capture_output=True, text=True, check=True)
    environment, torch_is_there = json.loads(done.stdout)
    assert not torch_is_there
    return environment


def test_importing_stretto_bounds_how_long_threads_spin(monkeypatch):
    path = {"PYTHONPATH": ":".join(sys.path)}
    assert BOUNDED.items() <= environment_of(**path).items()
    assert environment_of(GOMP_SPINCOUNT="7", **path)["GOMP_SPINCOUNT"] == "7"
    assert not set(BOUNDED) & set(environment_of(OMP_WAIT_POLICY="active", **path))


@pytest.mark.parametrize("name", USER)
def test_what_a_user_has_set_stays_and_is_not_added_to(name):
    environment = {name: "3"}
    bound_spinning(environment)
    assert environment == {name: "3"}


def test_it_is_too_late_once_torch_is_loaded():
    import torch  # noqa: F401

    environment = {}
    bound_spinning(environment)
    assert not wait_passively(environment)
    assert environment == BOUNDED


PASSIVELY = """
import json, os, sys
from stretto.openmp import wait_passively
json.dump([wait_passively(), dict(os.environ)], sys.stdout)
"""


@pytest.mark.parametrize(("given", "changes"), [({}, True), ({"GOMP_SPINCOUNT": "20000"}, False)])
def test_before_that_threads_can_be_told_to_sleep_at_once_but_not_against_the_user(given, changes):
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PASSIVELY], env=given | path, capture_output=True, text=True, check=True
    )
    changed, environment = json.loads(done.stdout)
    assert changed == changes
    assert (PASSIVE.items() <= environment.items()) == changes
    assert given.items() <= environment.items()


RELEASES = """
import os, torch
from stretto.openmp import release_threads
count = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
before, ones = count(), torch.ones(1 << 20)
grown = count()
release_threads()
print(grown - before, count() - before, (ones + ones).sum().item(), count() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp comes with torch on Linux")
def test_threads_that_have_computed_for_one_that_is_done_are_ended_and_come_again():
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", RELEASES], env=path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "0", str(2.0 * (1 << 20)), "2"]


@pytest.mark.parametrize(
    ("environment", "sleeps"),
    [
        ({}, False),
        (BOUNDED, False),
        (PASSIVE, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, True),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300"}, False),
    ],
)
def test_whether_threads_sleep_at_once_is_what_the_environment_says(environment, sleeps):
    assert sleeps_at_once(environment) == sleeps
