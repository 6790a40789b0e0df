"""What a lane counts while its clock runs."""

import pytest

from stretto.scheduler.generation_queues import GenerationQueue
from stretto.scheduler.records import SpeedEstimate


def test_decode_steps_are_counted_from_the_end_of_the_forward_over_the_prompts():
    """Two siblings share 100 tokens of prompt, a third comes with 20 of its own answer: 12 s before the first tick."""
    lane = GenerationQueue(slots=4, speeds=SpeedEstimate(tick=1.0, again=0.1))
    lane.join((0, 0), 10, 0.0, prompt=100)
    lane.join((0, 1), 10, 0.0, prompt=100)
    lane.join((0, 2), 10, 0.0, prompt=100, done=20)
    lane.pass_time(12.0)
    assert lane.ticks == 0
    lane.pass_time(15.0)
    assert lane.ticks == pytest.approx(3)
