"""Cells of unequal speed: how fast each is follows from what it did, and each gets what it does in the same time."""

import pytest

from stretto.placement.build import plan_of
from stretto.recipe.schema import Placement
from stretto.scheduler.generation_queues import GenerationQueues
from stretto.scheduler.records import GroupStart, SpeedEstimate, StageWork, StartRollouts, StepSpec
from stretto.scheduler.speed_estimator import ALIKE, SpeedEstimator, relative_speeds
from stretto.scheduler.state import StepState

SLOW, FAST = "slow", "fast"


def groups(count, samples=4, expected=10.0):
    return [
        GroupStart(prompt=str(number), prompt_tokens=5, samples=samples, expected=expected) for number in range(count)
    ]


def shares(queues, now=0.0):
    """Cell -> trajectories that are dispatched to it."""
    joins = queues.dispatch(list(queues.lanes), now)
    return {join.cell: len(join.items) for join in joins}


def test_equal_cells_are_taken_to_be_equal_whatever_noise_says():
    assert relative_speeds({SLOW: (1.0, 1.0), FAST: (1.0, 0.95)}) == {}
    assert relative_speeds({SLOW: (1.0, 1.0), FAST: (1.0, 1 / (1.01 * ALIKE))}) != {}
    assert relative_speeds({SLOW: (1.0, 1.0)}) == {}


def test_speeds_of_cells_are_found_again_from_what_they_did():
    speed = SpeedEstimator(round_seconds=0.25)
    for longest, tokens in ((10, 30), (40, 45), (7, 200), (100, 100)):
        seconds = 0.03 * longest + 0.002 * (tokens - longest)
        speed.lane(seconds=seconds, longest=longest, tokens=tokens, context=0, cell=SLOW)
        speed.lane(seconds=seconds / 2, longest=longest, tokens=tokens, context=0, cell=FAST)
        speed.piece("train", seconds=3.0, tokens=100, cell="train-0")
        speed.piece("train", seconds=1.0, tokens=100, cell="train-1")
    speeds = speed.speeds()
    assert speeds.relative[FAST] / speeds.relative[SLOW] == pytest.approx(2.0)
    assert speeds.relative["train-1"] / speeds.relative["train-0"] == pytest.approx(3.0)
    assert speeds.on(FAST).tick * 2 == pytest.approx(speeds.on(SLOW).tick)
    assert speeds.on("another") == speeds


@pytest.mark.parametrize(("times", "wanted"), [(1.0, (24, 24)), (2.0, (16, 32)), (3.0, (12, 36))])
def test_lanes_are_given_as_much_as_they_decode_in_the_same_time(times, wanted):
    relative = {} if times == 1.0 else {SLOW: 2 / (1 + times), FAST: 2 * times / (1 + times)}
    queues = GenerationQueues({SLOW: 64, FAST: 64}, speeds=SpeedEstimate(relative=relative), longest=20)
    for number, group in enumerate(groups(12)):
        queues.add(number, group)
    told = shares(queues)
    assert (told[SLOW], told[FAST]) == wanted


@pytest.mark.parametrize(("times", "samples"), [(1.5, 8), (2.0, 8), (3.0, 8), (2.0, 3), (4.0, 16)])
def test_what_decode_steps_take_however_few_answers_they_have_is_counted(times, samples):
    """On two cores a step of SmolLM2 takes as long as 25 answers add to it."""
    tick, each, longest = 0.025, 0.001, 40
    relative = {SLOW: 2 / (1 + times), FAST: 2 * times / (1 + times)}
    speeds = SpeedEstimate(tick=tick, tick_each=each, relative=relative)
    queues = GenerationQueues({SLOW: 999, FAST: 999}, speeds=speeds, longest=longest, spread=0.3)
    for number, group in enumerate(groups(8, samples, expected=20.0)):
        queues.add(number, group)
    told = shares(queues)

    def seconds(slow, fast):
        ends = [tick - each + each * 20.0 / 37.0 * count if count else 0.0 for count in (slow, fast)]
        return max(ends[0] * times, ends[1])

    every = 8 * samples
    best = min(seconds(slow, every - slow) for slow in range(every + 1))
    assert sum(told.values()) == every
    assert seconds(told.get(SLOW, 0), told[FAST]) <= 1.05 * best


def trained(times, samples=12):
    """Tokens that each of two cells is given to train on in a step, where the second is so many times as fast."""
    roles, devices = {"generate", "train"}, ("localhost/cpu:0", "localhost/cpu:1")
    plan = plan_of(Placement(strategy="flatten", cluster="2xcpu"), roles=roles, devices=devices)
    slow, fast = (cell.name for cell in plan.cells if cell.role == "train")
    relative = {} if times == 1 else {slow: 2 / (1 + times), fast: 2 * times / (1 + times)}
    terms = StepSpec(
        groups=8,
        drops=False,
        barrier=False,
        stages=("train",),
        slots={cell.name: 99 for cell in plan.cells if cell.role == "generate"},
        budgets={slow: 1024, fast: 1024},
        longest=20,
        speeds=SpeedEstimate(relative=relative),
    )
    step, given, now = StepState(plan, terms), {slow: 0, fast: 0}, 0.0
    step.launch(groups(8, samples))
    step.close()
    coming = step.offer(now)
    for join in (work for work in coming if isinstance(work, StartRollouts)):
        for item in join.items:
            step.ended(item, 10, now)
    for number in range(8):
        step.judged(number, range(samples))
    while pieces := [work for work in step.offer(now) if isinstance(work, StageWork)]:
        for piece in pieces:
            given[piece.cell] += piece.tokens
        for piece in pieces:
            step.done(piece)
    return given[slow], given[fast]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_training_is_shared_out_within_a_tenth_of_the_ideal(times):
    slow, fast = trained(times)
    assert max(slow, fast / times) <= 1.1 * (slow + fast) / (1 + times)


def test_equal_shares_would_not_be():
    slow, fast = trained(1)
    assert max(slow, fast / 2) > 1.3 * (slow + fast) / 3
