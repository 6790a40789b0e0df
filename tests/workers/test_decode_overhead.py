"""The share of decoding that does not grow is that of each device, not of devices of unequal speed thrown together."""

import pytest

from stretto.engines.native.decode_times import DecodeTimes
from stretto.workers.decode_overhead import DecodeOverhead


def measured(counts, *, slower=1.0):
    """What an engine tells whose steps take 20 ms and 1 ms for each answer."""
    times = DecodeTimes()
    times.note(max(counts), 9.0)  # the first after a publish, with what it has to prepare
    for count in counts:
        times.note(count, slower * (0.020 + 0.001 * count))
    return times.take()


def test_a_slow_device_with_few_answers_does_not_hide_what_answers_take():
    overhead = DecodeOverhead()
    slow, fast = list(range(20, 0, -1)), list(range(40, 0, -1))
    overhead.add("slow", measured(slow, slower=2.0))
    overhead.add("fast", measured(fast))
    overhead.add("vllm", ())
    fixed = 2 * 0.020 * len(slow) + 0.020 * len(fast)
    grows = 2 * 0.001 * sum(slow) + 0.001 * sum(fast)
    assert overhead.share() == pytest.approx(fixed / (fixed + grows))


def test_several_publishes_of_a_step_add_up_and_the_next_step_begins_anew():
    overhead = DecodeOverhead()
    assert overhead.share() is None
    for counts in (range(8, 4, -1), range(4, 0, -1)):
        overhead.add("one", measured(counts))
    assert overhead.share() == pytest.approx(8 * 0.020 / (8 * 0.020 + 0.001 * 36))
    overhead.forget()
    assert overhead.share() is None
