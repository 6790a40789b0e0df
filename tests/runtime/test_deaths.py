"""Processes that die while no step is under way: in an evaluation, before and after a step, and for a checkpoint."""

import pytest

from crewed import Fragile
from running import metrics, start, tensors
from stretto.errors import EngineError, TrainingError
from stretto.workers.launchers import inprocess
from stretto.workers.launchers.inprocess import ThreadLauncher
from stretto.workers.worker import Worker

CREW = {
    "placement": {"cluster": "2xcpu", "strategy": "elastic"},
    "model__dtype": "float64",
    "run__steps": 2,
    "evaluate__every": 1,
    "checkpoint__every": 1,
}

WHEN = [("generate", 1), ("begin", 1), ("begin", 2)]
"""A call, and which of its kind; the first to generate are for the evaluation before the first step."""


def run_with(launcher, folder, monkeypatch, **changes):
    monkeypatch.setattr(inprocess, "processes", lambda devices, **told: launcher)
    start(folder, **CREW, **changes)
    (run,) = folder.glob("run*")
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, of which nobody dies."""
    with pytest.MonkeyPatch.context() as patch:
        return run_with(ThreadLauncher(), tmp_path_factory.mktemp("whole"), patch)


@pytest.mark.parametrize(
    ("device", "what", "number"),
    [
        *(("localhost/cpu:0", *when) for when in WHEN),
        *(pytest.param("localhost/cpu:1", *when, marks=pytest.mark.slow) for when in WHEN),
        ("localhost/cpu:0", "save", 1),
        ("localhost/cpu:0", "save", 2),
        ("localhost/cpu:0", "saved", 1),
    ],
)
def test_a_death_outside_of_a_step_changes_nothing(device, what, number, whole, tmp_path, monkeypatch):
    launcher = Fragile(device, what, number)
    run = run_with(launcher, tmp_path, monkeypatch)
    assert launcher.died == {device}
    for row, same in zip(metrics(run), metrics(whole), strict=True):
        assert row == pytest.approx(same, rel=1e-9, abs=1e-12)
    found, wanted = (tensors(each / "checkpoints" / "step-000002") for each in (run, whole))
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) < 1e-10


def test_who_dies_again_at_once_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match=r"localhost/cpu:1: its process died again .*resume the run"):
        run_with(Fragile("localhost/cpu:1", "begin", deaths=2), tmp_path, monkeypatch)
    (run,) = tmp_path.glob("run*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000"]
    assert not (run / ".model.draft").exists()


class Broken(Worker):
    """Its engine fails."""

    def generate(self, new, unwanted, seconds):
        raise RuntimeError("no memory left")


def test_an_engine_that_fails_is_not_the_environments_failure(tmp_path, monkeypatch):
    with pytest.raises(EngineError, match="no memory left"):
        run_with(ThreadLauncher(Broken), tmp_path, monkeypatch)
