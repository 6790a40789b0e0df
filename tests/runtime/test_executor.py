"""What carries a step out, without a model: trajectories that only wait, and rewards that only sleep."""

import asyncio
from types import SimpleNamespace

from stretto.runtime import executor as carrying
from stretto.runtime.executor import StepExecutor
from stretto.runtime.spans import REWARD_WORKERS, Clock
from stretto.scheduler.length_predictor import LengthPredictor
from stretto.scheduler.speed_estimator import SpeedEstimator


def hands_with():
    """Of a step of two groups with one trajectory each, on two cells."""
    recipe = SimpleNamespace(engine=SimpleNamespace(temperature=1.0), environment=SimpleNamespace(deadline=60))
    lanes = {cell: SimpleNamespace(running=0, whereabouts=None) for cell in "ab"}
    parts = SimpleNamespace(
        recipe=recipe,
        worker_group=SimpleNamespace(version=0, lanes=lanes),
        lengths=LengthPredictor(longest=8),
        addresses=None,
        environment=None,
        renderer=None,
        sampling=lambda **told: None,
        algorithm=SimpleNamespace(min_samples=1),
        rewards=None,
    )
    clock = Clock(devices={"a": "localhost/cpu:0", "b": "localhost/cpu:1"})
    executor = StepExecutor(parts, speed=SpeedEstimator(round_seconds=0.1), clock=clock, step=1)
    executor.asked = [[None], [None]]
    executor.trajectories = {(0, 0): None, (1, 0): None}
    return executor


def begun_again(monkeypatch):
    """A trajectory is cut off on one cell and begins on another; what happened, and which lanes are open then."""

    async def scenario():
        told = []

        async def run_trajectory(launch, **given):
            told.append("begins")
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(5):  # its environment tidies up
                    await asyncio.sleep(0)
                told.append("has left")

        monkeypatch.setattr(carrying, "run_trajectory", run_trajectory)
        executor = hands_with()
        first = asyncio.create_task(executor.generate((0, 0), "a"))
        await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(executor.generate((0, 0), "b"))
        await asyncio.sleep(0.01)
        lanes = list(executor.lanes)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        return told, lanes

    return asyncio.run(scenario())


def test_what_was_cut_off_has_left_before_it_begins_again(monkeypatch):
    told, _ = begun_again(monkeypatch)
    assert told == ["begins", "has left", "begins", "has left"]


def test_what_was_cut_off_leaves_the_lane_that_it_was_in(monkeypatch):
    _, lanes = begun_again(monkeypatch)
    assert lanes == ["b"]


def test_verdicts_at_once_are_one_span_beside_the_cells(monkeypatch):
    async def judge(trajectory, rewards):
        await asyncio.sleep(0.02)
        return {"right": 1.0}

    async def scenario():
        executor = hands_with()
        await asyncio.gather(executor.judge((0, 0)), executor.judge((1, 0)))
        return executor.clock.spans, [executor.verdicts[index, 0].result() for index in (0, 1)]

    monkeypatch.setattr(carrying, "judge", judge)
    (span,), verdicts = asyncio.run(scenario())
    assert (span.stage, span.cell, span.groups) == ("reward", REWARD_WORKERS, 2)
    assert span.seconds >= 0.02
    assert verdicts == [{"right": 1.0}] * 2
