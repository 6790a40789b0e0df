"""Seconds of everything in a step under a choice, from the cost model: pieces, ticks, and what ends the step.

`StageTimes` answers for whole stages, which closed forms are made of; `PlanDurations` answers the scheduler on its
virtual clock, piece by piece and tick by tick. Verdicts that need no model take no time here: rewards run beside the
cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypedDict

from stretto.engines.native.admission import most_at_once, taken_by
from stretto.placement.plan import Plan
from stretto.planner.candidate import Candidate
from stretto.planner.cost.decode_time import Decoding
from stretto.planner.cost.memory import USABLE, generating
from stretto.planner.cost.mesh import Site
from stretto.planner.cost.shapes import ModelShape
from stretto.planner.cost.step_end import StepEnd, StepEnds
from stretto.planner.cost.token_load import TokenLoad
from stretto.planner.problem import PlanningProblem
from stretto.scheduler.records import UPDATE, MoveRollouts, RolloutId, StageWork, role_of


class Admitted(TypedDict):
    """What is asked of `engines.native.admission`."""

    samples: int
    prompt: int
    most: int
    recorded: bool


SLOTS = 1024
"""Most answers that one rank of an engine generates at a time."""
QUANTILES = 24
"""Lengths that stand for all of a lane's, in closed forms."""


class StageTimes:
    """Seconds of stages by choice; what choices have in common is counted once."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting, self.costs = setting, setting.costs
        self.known: dict[object, float] = {}
        self.ticks: dict[tuple[int, int], Decoding] = {}
        self.ends = StepEnds(setting)
        self.ranked = sorted(chain.from_iterable(setting.workload.drawn))
        self.total, self.most = float(setting.workload.tokens), self.ranked[-1]
        # An answer that is looked at in the middle of the work is longer than most, and half done on average.
        squares = math.fsum(tokens * tokens for tokens in self.ranked)
        # Where all are of one length, they began together and end together.
        done = self.most if self.ranked[0] == self.most else squares / self.total / 2
        self.live = setting.workload.prompt + done

    def slowest(self, choice: Candidate, stages: tuple[str, ...]) -> float:
        """These stages one after the other, on the side that takes longest for those that it serves."""
        roles = self.setting.workload.roles
        sides, places = choice.sides(roles), choice.places(roles)
        whitens = choice.whitens(self.setting.workload)
        key = (stages, choice.train, choice.frozen, choice.others, choice.recompute, choice.budget, sides, whitens)
        if key not in self.known:
            asked = [stage for stage in self.setting.workload.stages if stage in stages]
            served = {stage: self.stage(choice, places[role_of(stage)], stage) for stage in asked}
            self.known[key] = max(
                sum(seconds for stage, seconds in served.items() if role_of(stage) in side.roles) for side in sides
            )
        return self.known[key]

    def stage(self, choice: Candidate, place: tuple[int, int], stage: str) -> float:
        """A whole stage that is no generation, without the update, on the cells that serve it at a place."""
        work, role = self.setting.workload, role_of(stage)
        split = choice.split(role, work.reading)
        first, count = place
        cells = max(1, count // split.width)
        key = (stage, split, cells, choice.recompute, choice.budget, first, count, choice.whitens(work))
        if key not in self.known:
            site, parts = self.setting.site(split, first, count), work.parts if stage in UPDATE else 1
            portion = max(1 / cells, 1 / (work.prompts * work.samples)) / parts
            self.known[key] = self.piece(stage, site, work.load_of(stage).part(portion), choice) * parts
        return self.known[key]

    def piece(self, stage: str, site: Site, load: TokenLoad, choice: Candidate) -> float:
        """A forward, or a forward and a backward, of this much on one cell."""
        work, shape = self.setting.workload, self.setting.workload.shapes[role_of(stage)]
        precision = work.precision_of(stage)
        fixed = self.costs.rates.piece * shape.layers * self.costs.micro_batches(site, load, choice.budget)
        if stage not in UPDATE:
            return fixed + self.costs.forward(shape, site, load, precision=precision, budget=choice.budget)
        return fixed + self.costs.accumulate(
            shape, site, load, adapter=work.adapter_of(role_of(stage)), recompute=choice.recompute, precision=precision,
            budget=choice.budget, backwards=2 if stage == "train" and choice.whitens(work) else 1,
        )  # fmt: skip

    def prefill(self, site: Site, load: TokenLoad) -> float:
        """Reading prompts, or answers that go on elsewhere, into the caches of a lane."""
        work, shape = self.setting.workload, self.setting.workload.shapes["generate"]
        seconds = self.costs.prefill(shape, site, load, precision=work.precision_of("generate"))
        return self.costs.rates.piece * shape.layers + seconds

    def generate(self, choice: Candidate, pool: float) -> float:
        """The lane that has the longest answer and its share of the others, in one round after the other."""
        work = self.setting.workload
        first, count = choice.places(work.roles)["generate"]
        lanes = max(1, count // choice.lane.width)
        slots = min(math.ceil(max(work.rounds.sizes) * work.samples / lanes), self.slots(choice, pool))
        key = ("generate", choice.lane, lanes, slots, first, count)
        if key not in self.known:
            site = self.setting.site(choice.lane, first, count)
            self.known[key] = math.fsum(self._generate(site, groups, lanes, slots) for groups in work.rounds.sizes)
        return self.known[key]

    def slots(self, choice: Candidate, pool: float) -> int:
        """How many answers a lane may generate at a time: as many as its caches hold once they are in full swing; in
        the native engine, as many as there is room for however long they become."""
        lanes = choice.lane.mesh.dp
        if self.setting.workload.paged:
            return max(1, int(min(pool / self.live, SLOTS * lanes)))
        site = self._generating(choice)
        key = ("slots", site, min(pool, self._most(site)))
        if key not in self.known:
            self.known[key] = lanes * most_at_once(key[-1] / lanes, **self._asked(site))
        return int(self.known[key])

    def cached(self, choice: Candidate, answers: int, tokens: float) -> float:
        """Tokens of cache that a lane takes for so many answers, which have so many tokens together at most. What a CPU
        has set aside and does not use takes no memory."""
        work, lanes = self.setting.workload, choice.lane.mesh.dp
        if work.paged or not self.setting.ordered[0][1].kind.has_own_memory:
            return tokens
        return lanes * float(taken_by(-(-answers // lanes), **self._asked(self._generating(choice))))

    def _generating(self, choice: Candidate) -> Site:
        """One of the cells that generate."""
        return self.setting.site(choice.lane, *choice.places(self.setting.workload.roles)["generate"])

    def _most(self, site: Site) -> float:
        """Tokens that a lane has room for if nothing else is on its devices."""
        work, key = self.setting.workload, ("most", site)
        if key not in self.known:
            shape, precision = work.shapes["generate"], work.precision_of("generate")
            free = USABLE * site.device.memory - generating(shape, site, 0.0, precision=precision).total
            each = self.costs.cache_bytes(shape, site, 1.0, work.precision)
            self.known[key] = max(0.0, free) * site.mesh.dp / each
        return self.known[key]

    def _asked(self, site: Site) -> Admitted:
        """What the native engine is asked for."""
        work, recorded = self.setting.workload, self.costs.records(self.setting.workload.shapes["generate"], site)
        return {"samples": work.samples, "prompt": work.prompt, "most": work.lengths.cap, "recorded": recorded}

    def _generate(self, site: Site, groups: int, lanes: int, slots: int) -> float:
        """A round of so many groups."""
        work = self.setting.workload
        answers = math.ceil(groups * work.samples / lanes)
        slots = min(answers, slots)
        shape, precision = work.shapes["generate"], work.precision_of("generate")

        def tick(active: float, context: float) -> float:
            return self.costs.tick(shape, site, active, context, precision=precision, adapter=work.adapter)

        prompts = TokenLoad.sequence(float(work.prompt), count=math.ceil(groups / lanes))
        seconds = self.prefill(site, prompts)
        mean = self.total / work.answers
        waves = max(0, answers - slots) * mean / slots
        seconds += waves * tick(slots, work.prompt + mean / 2) if waves else 0.0
        marks = [self.ranked[(2 * i + 1) * len(self.ranked) // (2 * QUANTILES)] for i in range(QUANTILES)]
        before = 0
        for index, length in enumerate([*marks[1:], self.most]):
            active = max(1.0, slots * (1 - index / QUANTILES))
            seconds += (length - before) * tick(active, work.prompt + (length + before) / 2)
            before = length
        return seconds

    def ending(self, choice: Candidate) -> StepEnd:
        """What follows when everything is accumulated."""
        return self.ends.ending(choice)


class PlanDurations:
    """The durations of a plan, for the scheduler on its virtual clock."""

    def __init__(
        self, prices: StageTimes, choice: Candidate, plan: Plan, lone: Mapping[str, float] | None = None
    ) -> None:
        """`lone` is how much of its work each cell does alone on its host: nothing, if it is not said."""
        self.prices, self.choice, self.work, self.ticks = prices, choice, prices.setting.workload, prices.ticks
        self.ending = prices.ending(choice)
        drawn = self.work.drawn
        # With staleness, what a step trains on was made before, and counts before what it makes itself.
        carried = (drawn[index] for index in self.work.rounds.trained)
        self.lengths = (*carried, *drawn) if self.work.staleness else drawn
        self.sites: dict[str, Site] = {}
        for cell in plan.cells:
            first = prices.setting.index[cell.devices[0]]
            site = prices.setting.site(choice.split(cell.role, self.work.reading), first, len(cell.devices))
            self.sites[cell.name] = site
        saving = prices.costs.rates.lone
        self.takes = {cell.name: 1 - saving * (lone or {}).get(cell.name, 0.0) for cell in plan.cells}
        self.shape: ModelShape = self.work.shapes["generate"]
        self.precision = self.work.precision_of("generate")

    def tick(self, cell: str, active: int, context: float) -> float:
        """A decode step; what does not depend on contexts is worked out once per number of answers."""
        site, costs = self.sites[cell], self.prices.costs
        key = (id(site), active)
        if key not in self.ticks:
            self.ticks[key] = costs.decoding(
                self.shape, site, active, precision=self.precision, adapter=self.work.adapter
            )
        own = active / (site.mesh.dp * site.mesh.pp)
        seconds = self.ticks[key].seconds(own * costs.cache_bytes(self.shape, site, context, self.precision))
        return self.takes[cell] * seconds

    def prefill(self, cell: str, tokens: int) -> float:
        """Prompts of groups that join a lane."""
        prompt = max(1, self.work.prompt)
        return self._read(cell, TokenLoad.sequence(float(prompt), count=tokens / prompt))

    def piece(self, piece: StageWork) -> float:
        """A piece of any other stage."""
        seconds = self.prices.piece(piece.stage, self.sites[piece.cell], self.load(piece.items), self.choice)
        return self.takes[piece.cell] * seconds

    def judge(self, item: RolloutId) -> float:
        """Verdicts come in at once."""
        return 0.0

    def switch(self, move: MoveRollouts, tokens: int) -> float:
        """The moved answers are computed again where they go on."""
        each = max(1.0, tokens / len(move.items))
        return self.prices.costs.rates.far_delay + self._read(
            move.target, TokenLoad.sequence(each, count=float(len(move.items)))
        )

    def apply(self, *, last: bool) -> float:
        """An update; after the last one publish, and what changes sides."""
        each = self.ending.update / self.work.parts
        return each + (self.ending.publish + self.ending.switch if last else 0.0)

    def load(self, items: Sequence[RolloutId]) -> TokenLoad:
        """What a piece computes: a prompt once for all of its group that are in it."""
        prompt, groups = self.work.prompt, len({index for index, _ in items})
        sizes = [self.lengths[index][attempt] for index, attempt in items]
        tokens, squares = sum(sizes), sum(size * size for size in sizes)
        return TokenLoad(
            tokens=float(groups * prompt + tokens),
            pairs=groups * prompt * prompt / 2 + tokens * prompt + squares / 2,
            sequences=float(len(items)),
            longest=float(prompt + max(sizes)),
        )

    def _read(self, cell: str, load: TokenLoad) -> float:
        return self.takes[cell] * self.prices.prefill(self.sites[cell], load)


def typical(load: TokenLoad, tokens: float) -> TokenLoad:
    """A part of a load with so many tokens."""
    part = load.part(min(1.0, tokens / load.tokens))
    return replace(part, sequences=max(1.0, part.sequences))
