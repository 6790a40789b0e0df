"""The scheduler on the virtual clock: work is conserved, plans keep their order, and closed forms are met."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as given_by

from simulated import Clockwork, carried_of, launches_of, plan_of, simulate, terms_of
from stretto.scheduler.records import GroupStart, MoveRollouts, SpeedEstimate, StartRollouts
from stretto.scheduler.simulator import Simulation
from stretto.scheduler.state import StepState

ALL = ("reward", "reference", "value", "train", "fit")


def trained(step):
    """Every trajectory in a piece of training, as often as it was."""
    return sorted(
        item for pieces in step.ledger.values() for piece in pieces for item in piece.items if piece.stage == "train"
    )


def overlaps(plan, stretches):
    """Pairs of stretches that one device would do at the same time."""
    devices = {cell.name: set(cell.devices) for cell in plan.cells}
    found = []
    for number, a in enumerate(stretches):
        for b in stretches[number + 1 :]:
            if devices[a.cell] & devices[b.cell] and a.start < b.stop - 1e-9 and b.start < a.stop - 1e-9:
                found.append((a, b))
    return found


@settings(max_examples=60, deadline=None)
@given(
    strategy=given_by.sampled_from(["flatten", "I1", "separate", "elastic"]),
    devices=given_by.sampled_from([2, 4, 6]),
    stages=given_by.sampled_from([("train",), ("reference", "train"), ("reward", "reference", "train"), ALL]),
    seed=given_by.integers(0, 10**6),
    barrier=given_by.booleans(),
)
def test_everything_is_generated_scored_and_trained_once_and_a_device_does_one_thing_at_a_time(
    strategy, devices, stages, seed, barrier
):
    noise = random.Random(seed)
    lengths = [[noise.randint(1, 400) for _ in range(noise.randint(1, 5))] for _ in range(noise.randint(1, 12))]
    plan = plan_of(strategy, devices, stages=stages)
    speeds = SpeedEstimate(tick=1.0, tick_each=0.05, per_token=dict.fromkeys(stages, 0.5), switch=3.0)
    step, out = simulate(
        plan,
        lengths,
        prompt=noise.randint(0, 60),
        stages=stages,
        slots=noise.randint(1, 9),
        budget=noise.choice([100, 700, 10**6]),
        barrier=barrier,
        speeds=speeds,
        durations=Clockwork(
            tick_each=0.05, per_token=dict.fromkeys(stages, 0.5), judge_seconds=noise.choice([0.0, 4.0])
        ),
    )
    everything = sorted((g, a) for g, group in enumerate(lengths) for a in range(len(group)))
    assert trained(step) == everything
    assert out.accepted == tuple(range(len(lengths)))
    for role in stages:
        pieces = [stretch for stretch in out.stretches if stretch.stage == role]
        assert sum(stretch.tokens for stretch in pieces) >= sum(map(sum, lengths))
    generated = sum(stretch.tokens for stretch in out.stretches if stretch.stage == "generate")
    assert generated == sum(map(sum, lengths))
    assert not overlaps(plan, out.stretches)


def test_flatten_is_the_sum_of_its_stages():
    """T = G(N) + R(N) + U(N): 2 cells, each 2 groups of 2 x 10 tokens, a tick a second, then half the tokens each."""
    plan = plan_of("flatten", 2, stages=("reference", "train"))
    durations = Clockwork(per_token={"reference": 0.25, "train": 1.0}, apply_seconds=3.0)
    _, out = simulate(plan, [[10, 10]] * 4, stages=("reference", "train"), durations=durations)
    assert out.seconds == pytest.approx(10 + 40 * 0.25 + 40 * 1.0 + 3.0, rel=1e-9)


def test_interleaving_runs_the_two_frozen_models_side_by_side():
    """T = G(N) + max(R_r(N/2), R_w(N/2)) + U(N); here reward takes 0.5 s a token, the reference 0.25 s."""
    stages = ("reward", "reference", "train")
    durations = Clockwork(per_token={"reward": 0.5, "reference": 0.25, "train": 1.0})
    plan = plan_of("I1", 2, stages=stages)
    _, out = simulate(plan, [[10, 10]] * 4, stages=stages, durations=durations)
    assert out.seconds == pytest.approx(10 + max(80 * 0.5, 80 * 0.25) + 40 * 1.0, rel=1e-9)


def test_separation_is_a_pipeline_of_groups():
    """One group after the other: T = tau_g + tau_u + (k - 1) max(tau_g, tau_u)."""
    plan = plan_of("separate", 2)
    durations = Clockwork(per_token={"train": 2.0})
    _, out = simulate(plan, [[10, 10]] * 4, slots=2, budget=20, durations=durations)
    assert out.seconds == pytest.approx(10 + 40 + 3 * 40, rel=1e-9)


def test_elastic_trains_finished_groups_while_the_tail_is_decoded():
    """Cell 1 is done after 10 s and trains its 20 tokens while cell 0 decodes 100; then both share the rest."""
    plan = plan_of("elastic", 2)
    lengths = [[100, 100], [10, 10]]
    _, flat = simulate(plan_of("flatten", 2), lengths, expected=10, budget=400)
    _, out = simulate(plan, lengths, expected=10, budget=400)
    assert flat.seconds == pytest.approx(100 + 110, abs=10)
    assert out.seconds == pytest.approx(100 + 100)
    first = min((s for s in out.stretches if s.stage == "train"), key=lambda s: s.start)
    assert (first.start, first.tokens) == (pytest.approx(10), 20)


def test_a_tail_moves_when_the_step_ends_sooner():
    """Twenty short groups wait for training while each of two cells still decodes one long answer."""
    lengths = [[200, 5], [200, 5], *[[5, 5]] * 20]
    speeds = SpeedEstimate(tick=1.0, per_token={"train": 2.0}, switch=1.0)
    durations = Clockwork(per_token={"train": 2.0}, switch_seconds=1.0)
    plan, how = plan_of("elastic", 2), {"expected": 100, "speeds": speeds, "durations": durations, "budget": 20}
    _, out = simulate(plan, lengths, **how)
    _, stays = simulate(replace(plan, tail={"move": False, "gate": None}), lengths, **how)
    assert out.moved > 0
    assert out.seconds < stays.seconds


def test_what_begins_in_an_offer_does_not_move_in_it():
    """Whoever carries out a move asks where things run, and what is only about to begin runs nowhere."""
    plan, speeds = plan_of("elastic", 2), SpeedEstimate(tick=1.0, per_token={"train": 2.0}, switch=1.0)
    step = StepState(plan, terms_of(plan, groups=2, drops=True, slots=64, speeds=speeds, budget=10**6))
    step.launch([GroupStart(prompt="a", prompt_tokens=10, samples=2, expected=100.0)])
    step.offer(0.0)
    for attempt in range(2):
        step.ended((0, attempt), 1000, 100.0)
    step.judged(0, (0, 1))
    step.launch([GroupStart(prompt="b", prompt_tokens=10, samples=8, expected=100.0)])
    works = step.offer(100.0)
    assert sum(len(work.items) for work in works if isinstance(work, StartRollouts)) == 8
    assert [work for work in works if isinstance(work, MoveRollouts)] == []


@pytest.mark.parametrize(("prompt", "moves"), [(20, True), (20_000, False)])
def test_a_tail_stays_where_it_would_have_to_be_computed_again_at_length(prompt, moves):
    """Four long answers are left on each cell, each to a prompt of its own: those are what a move costs."""
    lengths = [*[[200, 5]] * 8, *[[5, 5]] * 20]
    speeds = SpeedEstimate(tick=1.0, per_token={"train": 2.0}, switch=1.0, again=0.01)
    plan, durations = plan_of("elastic", 2), Clockwork(prefill_seconds=0.01)
    _, out = simulate(plan, lengths, expected=100, prompt=prompt, speeds=speeds, durations=durations, budget=10**6)
    assert bool(out.moved) is moves


@pytest.mark.parametrize(("train", "moves"), [(8e-5, False), (1.6e-3, True)])
def test_of_many_cells_tails_move_where_work_ends_the_step_and_stay_where_a_tail_does(train, moves):
    """Sixteen cells decode 96 answers each; training them takes 8 s of each cell, or two and a half minutes."""
    noise = random.Random(0)
    lengths = [[min(16384, round(noise.lognormvariate(6.4, 1.0))) for _ in range(8)] for _ in range(16 * 12)]
    speeds = SpeedEstimate(tick=0.012, tick_each=1.5e-5, per_token={"train": train}, switch=1.0, again=2e-5)
    durations = Clockwork(
        tick_seconds=0.012, tick_each=1.5e-5, prefill_seconds=2e-5, per_token={"train": train}, switch_seconds=1.0
    )
    plan = plan_of("elastic", 16)
    how = {"prompt": 512, "speeds": speeds, "durations": durations, "slots": 256, "budget": 16384, "longest": 16384}
    _, out = simulate(plan, lengths, expected=1000, **how)
    _, stays = simulate(replace(plan, tail={"move": False, "gate": None}), lengths, expected=1000, **how)
    assert bool(out.moved) is moves
    assert out.seconds < stays.seconds if moves else out.seconds == stays.seconds


def test_dropped_groups_make_room_in_the_order_of_launch():
    """Three of five launched groups are trained on. The last to finish is the first launched, and is accepted."""
    plan = plan_of("elastic", 2)
    lengths = [[90, 90], [10, 10], [20, 20], [5, 5], [6, 6]]
    step, out = simulate(
        plan, lengths, groups=3, drops=True, verdict=lambda index: () if index == 1 else (0, 1), expected=10
    )
    assert out.accepted == (0, 2, 3)
    assert {group for group, _ in trained(step)} == {0, 2, 3}


def test_a_group_that_may_be_dropped_is_scored_no_further_before_its_reward_model_has_spoken():
    stages = ("reward", "reference", "train")
    plan = plan_of("elastic", 2, stages=stages)
    durations = Clockwork(per_token={"reward": 3.0, "reference": 1.0, "train": 1.0})
    _, out = simulate(plan, [[10]], stages=stages, drops=True, durations=durations, budget=20)
    stops = {stage: [each.stop for each in out.stretches if each.stage == stage] for stage in stages}
    starts = [each.start for each in out.stretches if each.stage == "reference"]
    assert min(starts) >= max(stops["reward"])


def test_a_group_is_not_trained_before_it_is_certain():
    """Two of three are wanted; the third has finished at once, and waits until one before it is dropped at 90."""
    plan = plan_of("elastic", 2)
    lengths = [[90, 90], [10, 10], [5, 5]]
    _, out = simulate(plan, lengths, groups=2, drops=True, verdict=lambda i: () if i == 0 else (0, 1), expected=10)
    trains = sorted((s.start, s.tokens) for s in out.stretches if s.stage == "train")
    assert out.accepted == (1, 2)
    assert sum(tokens for start, tokens in trains if start < 90) == 20
    assert sum(tokens for start, tokens in trains if start >= 90) == 10


def test_another_round_is_launched_for_dropped_groups():
    lengths = [[10, 10]] * 5
    extra = iter([launches_of([[10, 10]]), launches_of([[10, 10]])])
    asked = []

    def more(missing):
        asked.append(missing)
        return next(extra) * missing if missing else ()

    step, out = simulate(
        plan_of("elastic", 2),
        lengths,
        groups=3,
        launched=3,
        drops=True,
        more=more,
        verdict=lambda i: () if i in (0, 3) else (0, 1),
    )
    assert asked == [1, 1]
    assert out.accepted == (1, 2, 4)
    assert {group for group, _ in trained(step)} == {1, 2, 4}


def test_algorithms_that_need_the_whole_batch_wait_for_it_by_themselves():
    plan = plan_of("elastic", 2)
    _, out = simulate(plan, [[100, 100], [10, 10]], barrier=True, expected=10)
    assert min(s.start for s in out.stretches if s.stage == "train") == pytest.approx(100)


def test_groups_stay_on_one_cell_and_the_last_are_split():
    plan = plan_of("flatten", 3)
    step, _ = simulate(plan, [[10] * 8] * 8)
    placed = {}
    step2 = StepState(plan, step.terms)
    step2.launch(launches_of([[10] * 8] * 8))
    for join in step2.offer(0.0):
        for index, _ in join.items:
            placed.setdefault(index, set()).add(join.cell)
        assert 21 <= len(join.items) <= 22
    assert sum(len(cells) > 1 for cells in placed.values()) == 2


def test_a_cell_that_dies_has_its_work_done_again():
    plan = plan_of("elastic", 2)
    lengths = [[40, 40], [40, 40], [5, 5], [5, 5]]

    step = StepState(plan, terms_of(plan, 4))
    true = {(g, a): tokens for g, group in enumerate(lengths) for a, tokens in enumerate(group)}
    simulation = Simulation(step, Clockwork(), true)
    done, deaths = step.done, []

    def dies(piece):
        done(piece)
        if piece.cell == "train-1" and not deaths:
            deaths.append(piece)
            step.lost("train-1")
            step.back("train-1")

    step.done = dies
    out = simulation.run(launches_of(lengths, expected=10))
    assert out.accepted == (0, 1, 2, 3)
    assert deaths and trained(step) == sorted(true)


SIDES = [([[30, 30], [10, 40]], [[5, 6], [7, 9]]), ([[3, 3], [2, 4]], [[50, 60], [70, 90]])]
"""(what is generated, what was carried over): generation takes longer in the first, training in the second."""


@pytest.mark.parametrize(("made", "carried"), SIDES)
@pytest.mark.parametrize("barrier", [False, True])
def test_where_samplers_lag_a_step_takes_the_longer_of_generating_and_training(made, carried, barrier):
    plan = plan_of("separate", 2, staleness=1)
    step, out = simulate(
        plan, made, carried=carried, barrier=barrier, durations=Clockwork(apply_seconds=7), budget=10**6
    )
    generating = max(tokens for group in made for tokens in group)
    training = sum(tokens for group in carried for tokens in group)
    assert out.seconds == pytest.approx(max(generating, training) + 7)
    assert trained(step) == [(group, attempt) for group in range(2) for attempt in range(2)]
    assert (step.trained, out.accepted) == ((0, 1), (2, 3))


def test_a_step_that_carries_nothing_generates_and_trains_on_nothing():
    step, out = simulate(plan_of("separate", 2, staleness=1), [[4, 5]], durations=Clockwork(apply_seconds=7))
    assert (step.trained, out.accepted, trained(step), out.seconds) == ((), (0,), [], 12)


def test_what_is_carried_is_scored_before_it_is_trained_on():
    stages = ("reference", "train")
    step, out = simulate(
        plan_of("separate", 2, staleness=1, stages=stages), [[1]], carried=[[5, 0], [3, 4]], stages=stages
    )
    assert [s.stage for s in out.stretches if s.stage != "generate"] == ["reference", "train"]
    assert trained(step) == [(0, 0), (1, 0), (1, 1)]  # a trajectory without a token has nothing to train


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("barrier", [False, True])
def test_what_the_next_step_trains_on_is_scored_by_the_weights_that_sampled_it(barrier, drops):
    """Before this step's update, and with `old` for nothing that was carried, which was scored in its own step."""
    stages = ("reference", "old", "train")
    plan = plan_of("separate", 2, staleness=1, stages=("reference", "train"))
    terms = {"stages": stages, "barrier": barrier, "drops": drops, "durations": Clockwork(apply_seconds=7)}
    step, out = simulate(plan, [[5, 0], [40, 3]], carried=[[5, 6], [7]], **terms)
    told = [(s.stage, s.tokens) for s in out.stretches if s.stage != "generate"]
    assert sum(tokens for stage, tokens in told if stage == "old") == 5 + 40 + 3
    assert sum(tokens for stage, tokens in told if stage == "reference") == 5 + 6 + 7
    assert trained(step) == [(0, 0), (0, 1), (1, 0)]
    assert out.seconds == pytest.approx(max(s.stop for s in out.stretches) + 7)


def test_the_last_of_lagging_steps_scores_nothing_more():
    stages = ("old", "train")
    plan = plan_of("separate", 2, staleness=1)
    step = StepState(plan, terms_of(plan, 1, stages=stages))
    step.carry(carried_of([[5, 6]]))
    step.close()
    (piece,) = step.offer(0.0)
    assert piece.stage == "train"
    step.done(piece)
    assert [type(work).__name__ for work in step.offer(1.0)] == ["ApplyUpdate"]


def test_a_group_that_failed_is_scored_no_more_and_holds_up_nothing():
    stages = ("old", "train")
    plan = plan_of("separate", 2, staleness=1)
    step = StepState(plan, terms_of(plan, 1, stages=stages))
    step.carry(carried_of([[5]]))
    step.launch([GroupStart(prompt="a", prompt_tokens=1, samples=1, expected=2.0)])
    (join, piece) = step.offer(0.0)
    assert (type(join), piece.stage) == (StartRollouts, "train")
    step.ended((1, 0), 4, 1.0)
    step.judged(1, ())
    step.close()
    step.done(piece)
    assert [type(work).__name__ for work in step.offer(1.0)] == ["ApplyUpdate"]


def test_a_cell_that_dies_scores_again_what_the_next_step_needs():
    stages = ("old", "train")
    plan = plan_of("separate", 2, staleness=1)
    step = StepState(plan, terms_of(plan, 1, stages=stages))
    step.carry(carried_of([[5]]))
    step.launch([GroupStart(prompt="a", prompt_tokens=1, samples=1, expected=2.0)])
    (_, piece) = step.offer(0.0)
    step.ended((1, 0), 4, 1.0)
    step.judged(1, (0,))
    step.close()
    step.done(piece)
    (old,) = step.offer(1.0)
    assert (old.stage, old.items) == ("old", ((1, 0),))
    step.lost("train")
    step.back("train")
    again = step.offer(2.0)
    assert sorted(work.stage for work in again) == ["old"], "one cell, one piece at a time"
    step.done(again[0])
    (train,) = step.offer(3.0)
    assert train.stage == "train"
    step.done(train)
    assert [type(work).__name__ for work in step.offer(4.0)] == ["ApplyUpdate"]


def test_a_cell_that_dies_does_what_was_carried_again():
    plan = plan_of("separate", 2, staleness=1)
    step = StepState(plan, terms_of(plan, 1))
    step.carry(carried_of([[5, 6], [7]]))
    step.close()
    (piece,) = step.offer(0.0)
    step.done(piece)
    assert [type(work).__name__ for work in step.offer(1.0)] == ["ApplyUpdate"]
    step.lost("train")
    step.back("train")
    (again,) = step.offer(2.0)
    assert sorted(again.items) == sorted(piece.items)
