"""Several updates a step on several devices: what interrupts or breaks them leaves a run that can go on."""

import asyncio
import os
import signal

import pytest

from crewed import alone, dies, distance, together, with_parts, with_sleep
from running import lines, recipe_in, resume, start
from sleepy import Sleepy
from stretto.errors import TrainingError
from stretto.workers.launchers import inprocess
from stretto.workers.launchers.inprocess import ThreadLauncher, processes, worker_of
from stretto.workers.worker import Worker

CREW = {"placement": {"cluster": "2xcpu", "strategy": "elastic"}, "checkpoint__every": 100, "evaluate__every": 0}


def pressing(last):
    """A worker that presses Ctrl-C once, at an update of the second step: its last one, or one before."""
    pressed = []

    class Pressing(Worker):
        def apply(self, model, is_last):
            if self.trainer.version == 1 and is_last == last and not pressed:
                pressed.append(True)
                os.kill(os.getpid(), signal.SIGINT)
            return super().apply(model, is_last)

    return Pressing


@pytest.mark.parametrize("last", [True, False])
def test_ctrl_c_while_weights_move_ends_the_run_after_the_step(last, tmp_path, monkeypatch):
    monkeypatch.setattr(inprocess, "processes", lambda devices, **told: ThreadLauncher(pressing(last)))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, run__steps=3, batch__updates=2, **CREW, checkpoint__best=None)
    (run,) = tmp_path.glob("run*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.setattr(inprocess, "processes", lambda devices, **told: ThreadLauncher())
    resume(run)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3]


class Poisoned(Worker):
    """Its second gradient is no number."""

    reductions = 0

    def reduce(self, model, sums):
        super().reduce(model, sums)
        self.reductions += 1
        if self.reductions == 2:
            for tensors in self.trainer.total.values():
                next(iter(tensors.values())).fill_(float("nan"))


@pytest.mark.parametrize("updates", [2, 3])
def test_a_gradient_that_is_no_number_ends_the_step_without_a_checkpoint_of_half_of_it(updates, tmp_path):
    recipe = recipe_in(tmp_path, batch__updates=updates, guards__non_finite="stop")
    with pytest.raises(TrainingError, match="step 1 is not finite"):
        asyncio.run(together(recipe, tmp_path, "flatten", launcher=ThreadLauncher(Poisoned)))


@pytest.mark.parametrize("change", [with_sleep, with_parts])
def test_sleeping_models_and_a_shared_optimizer_change_nothing(change, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", optimizer__lr=1e-4, batch__updates=3)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, "flatten", launcher=ThreadLauncher(Sleepy), change=change))
    assert distance(single, weights) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("what", "number"), [("score", 1), ("accumulate", 2), ("apply", 1)])
def test_a_process_that_dies_at_an_update_changes_nothing(what, number, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", optimizer__lr=1e-4, batch__updates=3)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    devices = ("localhost/cpu:0", "localhost/cpu:1")
    launcher = processes(devices, seconds=300, make=worker_of)
    weights, *_ = asyncio.run(
        together(recipe, tmp_path, "elastic", launcher=launcher, hurt=dies(devices[1], what, number))
    )
    assert distance(single, weights) < 1e-10
