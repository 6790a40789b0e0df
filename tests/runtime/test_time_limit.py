"""A run is asked to end while there is time for what has to be done until then."""

import asyncio
import time

import pytest

from running import Quiet
from stretto.runtime.interrupt import StopRequest
from stretto.runtime.time_limit import TimeLimit


def asked_within(seconds, *, steps=(), saves=(), left=10.0):
    """Whether a run that has so many seconds left is asked to end within some, and what it says."""
    request, screen = StopRequest((time.monotonic() + left, "run.until")), Quiet()

    async def busy():
        request.task = asyncio.current_task()
        with TimeLimit(request, screen) as limit:
            for took in saves:
                limit.saved(took)
            for took in steps:
                limit.stepped(took)
            await asyncio.sleep(seconds)

    try:
        asyncio.run(busy())
    except asyncio.CancelledError:
        return request.why, screen.notes()
    return request.why, screen.notes()


def test_a_step_that_would_not_be_over_in_time_is_not_begun():
    assert asked_within(0.01, steps=[1.0, 2.0])[0] == ""
    why, told = asked_within(0.01, steps=[12.0, 2.0])
    assert why == "run.until"
    assert "too little for another step of 12 s and its checkpoint; stopping" in told


def test_what_checkpoints_take_is_kept_for_the_last():
    assert asked_within(0.01, steps=[5.0], saves=[0.1])[0] == ""
    assert asked_within(0.01, steps=[5.0], saves=[3.0])[0] == "run.until"


def test_a_step_that_takes_too_long_is_ended():
    begun = time.monotonic()
    assert asked_within(20, left=0.2)[0] == "run.until"
    assert time.monotonic() - begun < 5


def test_without_a_limit_nothing_happens():
    request = StopRequest()

    async def busy():
        with TimeLimit(request, Quiet()) as limit:
            limit.saved(1e9)
            limit.stepped(1e9)
            await asyncio.sleep(0)

    asyncio.run(busy())
    assert request.why == ""


def test_who_was_interrupted_before_is_asked_once():
    request = StopRequest()
    request.note(2)
    request.time_is_over("run.until")
    assert (request.why, request.exit_code) == ("SIGINT", 130)
    with pytest.raises(ValueError, match="999"):
        StopRequest().note(999)
