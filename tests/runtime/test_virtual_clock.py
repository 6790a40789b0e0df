"""Steps of a real run again on the virtual clock: with its durations and verdicts the simulator decides what it did."""

import asyncio
from bisect import bisect_right
from itertools import pairwise

import pytest

from running import recipe_in
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.runtime import schedule
from stretto.runtime.build import build_runtime
from stretto.runtime.spans import Clock
from stretto.scheduler.asyncio_driver import replay
from stretto.scheduler.records import ApplyUpdate, StageWork, StartRollouts
from stretto.scheduler.simulator import Simulation
from stretto.scheduler.state import StepState
from stretto.workers.launchers.inprocess import ThreadLauncher

GRAIN = 2.0**-18
"""Seconds are counted in these, so that sums of them are exact and what happened together stays together."""


class Kept(StepState):
    """A step that keeps what it was made with."""

    made: list

    def __init__(self, plan, terms, *, spread):
        super().__init__(plan, terms, spread=spread)
        self.made.append((plan, terms, spread))


async def taken(recipe, folder, strategy, devices):
    """(what a step was made with, its notes) of some steps on threads."""
    plan = plan_of(
        recipe.placement.model_copy(update={"strategy": strategy}),
        roles=roles_of(recipe),
        devices=tuple(f"localhost/cpu:{index}" for index in range(devices)),
    )
    parts = await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=ThreadLauncher())
    notes = []
    try:
        await parts.restored()
        for step in (1, 2):
            clock = Clock(devices=parts.devices)
            clock.begin()
            await schedule.take_step(parts, clock, step=step, noted=notes.append)
    finally:
        await parts.close()
    return notes


class Again(StepState):
    """A step on a virtual clock whose lanes make a tick per second: what ended in seconds is told in tokens."""

    def __init__(self, made, tokens):
        plan, terms, spread = made
        super().__init__(plan, terms, spread=spread)
        self.tokens, self.offers = tokens, []

    def ended(self, item, tokens, now):
        super().ended(item, self.tokens[item], now)

    def offer(self, now):
        works = super().offer(now)
        self.offers.append(tuple(works))
        return works


class Measured:
    """The durations and verdicts of a step that was taken. What was told between two offers happened together."""

    def __init__(self, notes):
        counts = [count for count, _, _ in notes.offers]
        moments = [round((now - notes.offers[0][1]) / GRAIN) * GRAIN for _, now, _ in notes.offers]
        assert all(before < after for before, after in pairwise(moments))
        self.tokens, self.attempts, self.rounds, self.parts, self.carried = {}, {}, [], [], ()
        done, ended, judged, updated, begun, pieces, updates = {}, {}, {}, [], {}, {}, []
        for number, event in enumerate(notes.told):
            at = moments[min(bisect_right(counts, number), len(moments) - 1)]
            match event.what, event.arguments:
                case "ended", (item, tokens, _):
                    self.tokens[item], ended[item] = tokens, at
                case "judged", (index, attempts):
                    self.attempts[index], judged[index] = attempts, at
                case "done", (piece,):
                    done[piece.number] = at
                case "launch", (groups,):
                    self.rounds.append(groups)
                case "carry", (groups,):
                    self.carried = groups
                case "divided", (parts,):
                    self.parts = parts
                case "updated", ():
                    updated.append(at)
        for at, (_, _, works) in zip(moments, notes.offers, strict=True):
            for work in works:
                match work:
                    case StartRollouts():
                        begun |= dict.fromkeys(work.items, at)
                    case StageWork():
                        pieces[work.number] = done[work.number] - at
                    case ApplyUpdate():
                        updates.append(at)
        self.pieces, self.seconds = pieces, {item: at - begun[item] for item, at in ended.items()}
        last = {index: max(at for (group, _), at in ended.items() if group == index) for index in judged}
        self.judging = {index: at - last[index] for index, at in judged.items()}
        self.updates = iter([after - at for at, after in zip(updates, updated, strict=False)] + [GRAIN])
        self.further = iter(self.rounds[1:])

    def tick(self, cell, active, context):
        return 1.0

    def prefill(self, cell, tokens):
        return 0.0

    def switch(self, move, tokens):
        return 0.0

    def piece(self, piece):
        return self.pieces[piece.number]

    def judge(self, item):
        return self.judging[item[0]]

    def apply(self, *, last):
        return next(self.updates)

    def more(self, missing):
        return next(self.further, ())

    def again(self, made):
        """The step on the virtual clock."""
        step = Again(made, self.tokens)
        simulation = Simulation(
            step, self, self.seconds, verdict=self.attempts.get, more=self.more, divide=lambda groups: self.parts
        )
        took = simulation.run(self.rounds[0] if self.rounds else (), self.carried)
        return took, step


LAGGING = {"cluster": "2xcpu", "strategy": "separate", "staleness": 1}
LAYOUTS = {
    "one device": ("flatten", 1, {}),
    "elastic": ("elastic", 3, {}),
    "separate, lagging": ("separate", 2, {"batch__updates": 1, "placement": LAGGING}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_rounds_and_updates_is_decided_again_on_the_virtual_clock(layout, tmp_path, monkeypatch):
    strategy, devices, changes = LAYOUTS[layout]
    monkeypatch.setattr(schedule, "StepState", Kept)
    monkeypatch.setattr(Kept, "made", [], raising=False)
    dapo = {"algorithm": {"name": "dapo"}, "batch__updates": 2, "batch__oversample": 1.25, **changes}
    notes = asyncio.run(taken(recipe_in(tmp_path, **dapo), tmp_path, strategy, devices))
    rounds = updates = 0
    for made, noted in zip(Kept.made[-len(notes) :], notes, strict=True):
        decided = [works for _, _, works in noted.offers if works]
        measured = Measured(noted)
        took, step = measured.again(made)
        assert [works for works in step.offers if works] == decided
        assert took.rounds == len(measured.rounds)
        assert replay(StepState(made[0], made[1], spread=made[2]), noted) == [works for _, _, works in noted.offers]
        rounds, updates = max(rounds, took.rounds), max(updates, len(took.updates))
    assert rounds > 1, "no step had a second round"
    assert updates == dapo["batch__updates"]
