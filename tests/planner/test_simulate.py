"""On fixed lengths the simulation is the closed forms; on any lengths it neither makes nor loses work."""

from dataclasses import replace
from itertools import pairwise

import pytest

from interleaved import interleave_frozen, interleave_pairs
from stretto.engines.native.admission import CACHE_SHARE
from stretto.placement import closed_forms as closed
from stretto.placement.closed_forms import Stages
from stretto.placement.cluster import parse_cluster
from stretto.placement.strategies import PRESETS
from stretto.placement.validate import problems
from stretto.planner.candidate import Candidate
from stretto.planner.cost.decode_time import decode
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import PlanDurations, StageTimes
from stretto.planner.cost.token_load import TokenLoad
from stretto.planner.forecast import forecast_of, with_caches
from stretto.planner.problem import ModelSplit, PlanningProblem
from stretto.planner.simulate import run_step, simulate
from stretto.planner.workload import StepWorkload
from stretto.recipe.schema import Placement
from stretto.scheduler.records import role_of

SMALL = named_shape("qwen2.5-0.5b")
PPO = ("generate", "train", "reference", "reward", "value", "fit")
EXACT = {"rel": 1e-9}
PROMPT = 4000
"""So long that the scheduler never cuts a group, because its prompt would then be computed twice."""
GROUP = PROMPT + 4 * 100
"""Tokens of a group; with budgets of two, four cells have equal shares of eight groups."""


def workload(roles=("generate", "train"), **changes):
    """A step of eight groups of four answers of 100 tokens each."""
    told = {
        "shapes": dict.fromkeys(roles, SMALL),
        "prompts": 8,
        "samples": 4,
        "updates": 1,
        "prompt": PROMPT,
        "lengths": LengthDistribution(mean=100.0, sigma=0.0, cap=100),
        "adapter": 0,
        "reading": frozenset({"generate", "value"} & set(roles)),
        "precision": "bfloat16",
        "base": "bfloat16",
    }
    return StepWorkload(**(told | changes))


def prices_of(work, cluster):
    return StageTimes(PlanningProblem.of(work, parse_cluster(cluster)))


def stages_of(prices, lanes, cells, choice):
    """What each stage takes by itself, with whole groups dealt out evenly over so many cells."""
    work, site = prices.setting.workload, prices.setting.site(ModelSplit(), 0, 1)
    shape, costs = work.shapes["generate"], prices.costs

    def tick(active, context):
        return costs.tick(shape, site, active, context)

    def prefill(tokens):
        return prices.prefill(site, TokenLoad.sequence(float(PROMPT), count=tokens / PROMPT / work.samples))

    def stage(role):
        if role not in ("generate", *work.stages):
            return 0.0
        groups = work.prompts // cells[role_of(role)]
        load = TokenLoad.groups(PROMPT, ((100,) * work.samples,) * groups, shared=True)
        return prices.piece(role, site, load, choice)

    answers = [100] * (work.answers // lanes)
    ending = prices.ending(choice)
    return Stages(
        generate=decode(answers, PROMPT, tick, slots=len(answers), pool=1e12, prefill=prefill).seconds,
        old=stage("old"),
        reference=stage("reference"),
        reward=stage("reward"),
        value=stage("value"),
        train=stage("train") + ending.update,
        fit=stage("fit"),
        publish=ending.publish,
        switch=ending.switch / 2,
    )


def step_of(prices, choice):
    return simulate(prices, choice, MemoryFits(prices.setting).room(choice)).step


@pytest.mark.parametrize("roles", [("generate", "train"), PPO], ids=["policy alone", "four models"])
@pytest.mark.parametrize("strategy", ["flatten", "elastic"])
def test_everything_on_all_devices_takes_the_sum_of_the_stages(strategy, roles):
    prices = prices_of(workload(roles), "4xH100")
    choice = Candidate(strategy=strategy, devices=4, budget=2 * GROUP)
    at = stages_of(prices, 4, dict.fromkeys(roles, 4), choice)
    assert step_of(prices, choice) == pytest.approx(closed.flatten(at), **EXACT)
    even = closed.elastic(at, ranks=4, moved=0, tail=0.0, slower_tail=0.0, ready=1.0, costs=0.0)
    assert even == pytest.approx(closed.flatten(at), **EXACT)


@pytest.mark.parametrize(("reward", "alike"), [("qwen2.5-0.5b", True), ("qwen2.5-1.5b", False)])
def test_frozen_models_side_by_side_take_as_long_as_the_slower_one(reward, alike):
    shapes = dict.fromkeys(PPO, SMALL) | {"reward": named_shape(reward)}
    prices = prices_of(workload(PPO, shapes=shapes), "4xH100")
    choice = Candidate(strategy="interleave", devices=4, fractions=PRESETS["I1"], budget=2 * GROUP)
    cells = dict.fromkeys(PPO, 4) | {"reference": 2, "reward": 2}
    at = stages_of(prices, 4, cells, choice)
    took, told = step_of(prices, choice), interleave_frozen(at)
    if alike:
        assert took == pytest.approx(told, **EXACT)
    else:  # devices that are done with the smaller model begin with the values, which the closed form does not know
        assert told - (at.reward - at.reference) <= took < told


def test_pairs_side_by_side_take_as_long_as_the_slower_pair():
    prices = prices_of(workload(PPO), "4xH100")
    choice = Candidate(strategy="interleave", devices=4, fractions=PRESETS["I2"], budget=2 * GROUP)
    at = stages_of(prices, 2, dict.fromkeys(PPO, 2), choice)
    ending = prices.ending(choice)
    pairs = replace(at, train=at.train - ending.update)
    told = interleave_pairs(pairs) + ending.update
    assert step_of(prices, choice) == pytest.approx(told, **EXACT)


def test_groups_that_arrive_one_by_one_are_a_pipeline():
    work = workload()
    prices = prices_of(work, "2xH100")
    choice = Candidate(strategy="separate", devices=2, generating=1, budget=GROUP)
    plan = choice.plan(prices.setting)
    took = run_step(prices, choice, plan, PlanDurations(prices, choice, plan), slots=4)
    one = stages_of(prices, 8, {"train": 8}, choice)
    ending = prices.ending(choice)
    told = closed.pipeline([8 * one.generate, 8 * (one.train - ending.update)], 8, ending.seconds)
    assert took.seconds == pytest.approx(told, **EXACT)


def test_one_step_off_takes_the_longer_side():
    prices = prices_of(workload(staleness=1), "2xH100")
    choice = Candidate(strategy="separate", devices=2, generating=1)
    at = stages_of(prices, 1, {"train": 1}, choice)
    ending = prices.ending(choice)
    # Nothing ends before both sides have, and what was generated meanwhile is scored by the weights that sampled it.
    told = max(at.generate, at.train - ending.update) + at.old + ending.seconds
    assert step_of(prices, choice) == pytest.approx(told, **EXACT)


def test_rounds_and_updates_follow_each_other():
    rounds = {"acceptance": 0.5, "oversample": 1.5, "max_rounds": 3, "seed": 3}
    work = workload(samples=1, updates=3, **rounds)
    assert (work.rounds.sizes, len(work.rounds.trained)) == ((12, 5, 2), 8)
    prices = prices_of(work, "1xH100")
    choice = Candidate(strategy="flatten", devices=1)
    forecast = simulate(prices, choice, MemoryFits(prices.setting).room(choice))
    made = [stages_of(prices_of(replace(work, prompts=n, **ONCE), "1xH100"), 1, ONE, choice) for n in (12, 5, 2)]
    parts = [stages_of(prices_of(replace(work, prompts=n, **ONCE), "1xH100"), 1, ONE, choice) for n in (3, 3, 2)]
    once = replace(work, updates=1, acceptance=None)
    ending, update = prices.ending(choice), prices_of(once, "1xH100").ending(choice).update
    old = prices.piece("old", prices.setting.site(ModelSplit(), 0, 1), work.load, choice)
    generated, trained = sum(each.generate for each in made), sum(each.train - update for each in parts)
    assert ending.update == pytest.approx(3 * update, **EXACT)
    assert forecast.step == pytest.approx(generated + old + trained + ending.seconds, **EXACT)
    assert (forecast.rounds, forecast.launched, len(forecast.updates)) == (3, 19, 3)
    assert forecast.stages["old"] == pytest.approx(old, **EXACT)
    assert [stop - start for start, stop in forecast.updates] == pytest.approx(
        [update, update, update + ending.publish + ending.switch], rel=1e-6
    )


def test_epochs_train_all_of_it_again():
    work = workload(samples=1, updates=2, epochs=3)
    prices = prices_of(work, "1xH100")
    choice = Candidate(strategy="flatten", devices=1)
    forecast = simulate(prices, choice, MemoryFits(prices.setting).room(choice))
    once = simulate(*(p := prices_of(replace(work, epochs=1), "1xH100"), choice, MemoryFits(p.setting).room(choice)))
    assert (work.parts, len(forecast.updates), len(once.updates)) == (6, 6, 2)
    assert forecast.stages["train"] == pytest.approx(3 * once.stages["train"], **EXACT)
    assert work.load_of("train").tokens == pytest.approx(3 * replace(work, epochs=1).load_of("train").tokens)


ONE, ONCE = dict.fromkeys(PPO, 1), {"updates": 1, "acceptance": None, "oversample": 1.0}


LAYOUTS = [
    Candidate(strategy="flatten", devices=8),
    Candidate(
        strategy="flatten",
        devices=8,
        train=ModelSplit(dp=4),
        lane=ModelSplit(tp=2),
        frozen=ModelSplit(dp=2),
        sleeps=True,
    ),
    Candidate(strategy="interleave", devices=8, fractions=PRESETS["I1"], train=ModelSplit(tp=2), lane=ModelSplit(tp=2)),
    Candidate(strategy="interleave", devices=8, fractions=PRESETS["I2"], train=ModelSplit(dp=4), recompute=True),
    Candidate(strategy="interleave", devices=8, fractions=PRESETS["I1"], sharded=True, sleeps=True),
    Candidate(strategy="separate", devices=8, generating=2, train=ModelSplit(dp=3), lane=ModelSplit(tp=2)),
    Candidate(strategy="elastic", devices=6, train=ModelSplit(dp=2), lane=ModelSplit(), budget=4096),
]


@pytest.mark.parametrize("choice", LAYOUTS, ids=lambda choice: choice.label)
def test_a_choice_makes_a_plan_without_problems_that_says_the_same(choice):
    work = workload(PPO)
    setting = PlanningProblem.of(work, parse_cluster("8xH100"))
    plan = choice.plan(setting)
    assert problems(plan, roles=work.roles, devices=setting.names) == []
    places = choice.places(work.roles)
    for role in work.roles:
        cells = [cell for cell in plan.cells if cell.role == role]
        assert {cell.weights.partition(":")[0] for cell in cells} == {choice.source(role, work)}
        used = [device for cell in cells for device in cell.devices]
        assert used == list(setting.names[places[role][0] : sum(places[role])])


def test_what_sleeps_waits_for_nothing():
    work = workload(("generate", "reward", "train"))
    choice = Candidate(strategy="interleave", devices=4, fractions=PRESETS["I1"], sleeps=True)
    plan = choice.plan(PlanningProblem.of(work, parse_cluster("4xH100")))
    assert list(choice.waits_for(work)) == []
    told = {(cell.role, cell.devices[0][-1]): cell.sleeps for cell in plan.cells}
    assert (told["train", "0"], told["train", "3"]) == (("generate",), ("generate", "reward"))


@pytest.mark.parametrize("choice", LAYOUTS, ids=lambda choice: choice.label)
def test_every_token_is_generated_scored_and_trained_once(choice):
    lengths = LengthDistribution(mean=200.0, sigma=1.2, cap=2000)
    prices = prices_of(workload(PPO, lengths=lengths, prompts=24), "8xH100")
    work = prices.setting.workload
    forecast = simulate(prices, choice, MemoryFits(prices.setting).room(choice))
    answers = work.tokens
    by_stage = dict.fromkeys(PPO, 0)
    for stretch in forecast.stretches:
        by_stage[stretch.stage] += stretch.tokens
    assert by_stage.pop("generate") == answers
    for tokens in by_stage.values():
        prompts, rest = divmod(tokens - answers, PROMPT)
        assert rest == 0 and 24 <= prompts <= 24 * 4


@pytest.mark.parametrize("choice", LAYOUTS, ids=lambda choice: choice.label)
def test_a_device_works_for_one_cell_at_a_time_and_idle_and_busy_make_up_the_step(choice):
    lengths = LengthDistribution(mean=200.0, sigma=1.2, cap=2000)
    prices = prices_of(workload(PPO, lengths=lengths), "8xH100")
    forecast = simulate(prices, choice, MemoryFits(prices.setting).room(choice))
    on = {cell.name: cell.devices for cell in forecast.plan.cells}
    spans = {name: [] for name in prices.setting.names}
    for stretch in forecast.stretches:
        for device in on[stretch.cell]:
            spans[device].append((stretch.start, stretch.stop))
    for times in spans.values():
        times.sort()
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(times))
    worked = sum(stop - start for times in spans.values() for start, stop in times)
    worked += sum(forecast.ending.seconds for times in spans.values() if times)
    assert forecast.idle == pytest.approx(1 - worked / (8 * forecast.step), abs=1e-9)


def test_answers_wait_for_room_in_the_caches():
    lengths = LengthDistribution(mean=3000.0, sigma=1.0, cap=16000)
    work = workload(shapes=dict.fromkeys(("generate", "train"), named_shape("llama-7b")), lengths=lengths, samples=32)
    prices = prices_of(work, "2xH100")
    choice = Candidate(strategy="separate", devices=2, generating=1, budget=16384, recompute=True)
    room = MemoryFits(prices.setting).room(choice)
    forecast = simulate(prices, choice, room)
    assert forecast.slots < work.answers
    assert 0.5 * room.pool < forecast.cached <= room.pool


def test_the_native_engine_has_room_for_the_longest_answer_of_each_that_it_lets_in():
    lengths = LengthDistribution(mean=1500.0, sigma=1.0, cap=8192)
    shapes = dict.fromkeys(("generate", "train"), named_shape("qwen2.5-7b"))
    work = workload(shapes=shapes, lengths=lengths, prompts=64, samples=16, prompt=300, adapter=16)
    work = replace(work, paged=False, recorded="alone")
    choice = Candidate(strategy="flatten", devices=1, budget=16384, recompute=True)
    said = {}
    for name, asked in {
        "paged": replace(work, paged=True, recorded="all"),
        "native": work,
        "not recorded": replace(work, recorded="none"),
        "told": replace(work, share=CACHE_SHARE),
    }.items():
        prices = prices_of(asked, "1xH100")
        said[name] = simulate(prices, choice, MemoryFits(prices.setting).room(choice))
    native, paged = said["native"], said["paged"]
    assert said["told"].slots == 32  # 80 GB / 4 / 57 kB a token / 8192, and places by two sizes for each doubling
    assert paged.slots > 4 * native.slots > 4 * said["told"].slots
    assert paged.step < native.step < min(said["told"].step, said["not recorded"].step)
    # Caches lie there while it trains: what a plan says has room beside every phase.
    (side,) = native.room.sides
    (cell,) = (cell for cell in native.plan.cells if cell.role == "generate")
    most = max(held.total for held in side.phases.values())
    assert cell.memory_share == native.room.share == pytest.approx((side.usable - most) / side.device.memory, abs=1e-3)
    assert native.cached * side.token <= native.room.share * side.device.memory
    assert [cell.memory_share for cell in said["told"].plan.cells] == [None, None]
    # A run of a strategy takes it over, and without it goes on with the usual share.
    setting = prices_of(work, "1xH200").setting
    plain = choice.plan(setting)
    room = with_caches(plain, setting, Placement(), budget=8192)
    share = next(cell.memory_share for cell in room.cells if cell.role == "generate")
    assert share is not None and share > CACHE_SHARE
    steps = [forecast_of(plan, setting, Placement(), budget=8192).step for plan in (room, plain)]
    assert steps[0] < steps[1]
    on_cpu = prices_of(work, "1xcpu").setting
    assert with_caches(plain, on_cpu, Placement(), budget=4096) == plain
