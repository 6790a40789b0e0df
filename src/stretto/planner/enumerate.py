"""Which choices there are: strategies, how many devices, how cells divide models, micro-batches, recomputing, sleeping.

Rules decide what is never worth a look: widths that do not divide, matrices cut across slow links, pipelines inside one
host, memory that is moved to the host although it is not short. What does not fit is kept in mind only as the nearest
miss of its strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stretto.errors import RecipeError
from stretto.placement.baselines import record_of
from stretto.placement.build import shares_of
from stretto.placement.partitions import Partition
from stretto.planner.candidate import Candidate
from stretto.planner.cost.memory_fit import FixedMemory, MemoryFit, MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.groups import GroupedCandidates
from stretto.planner.problem import ALONE, ModelSplit, PlanningProblem
from stretto.planner.splits import Splits

PARTS = 8
"""Parts into which devices are divided where some only generate; hosts and kinds of devices are other places to cut."""
FEW = 8
"""Of so many devices every number may be used, of more only all of them and round numbers."""
WORTH_A_LOOK = 1.2
"""A choice whose stages alone take this many times the best estimate so far is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A strategy as it is listed."""

    strategy: str
    """The strategy's name."""
    fractions: tuple[Fraction, ...] | Partition | None = None
    """The share of each model, or of groups of them, where the strategy gives them some."""
    groups: bool = False
    """Any groups of models, with any share each."""

    @property
    def label(self) -> str:
        """The variant's name, as `Candidate.label`; of any groups it is none of theirs."""
        return f"{self.strategy} in groups" if self.groups else record_of(self.strategy).label(self.fractions)

    def cannot(self, setting: PlanningProblem) -> str | None:
        """Why it is out of the question whatever its numbers, or none."""
        work = setting.workload
        return record_of(self.strategy).refusal(
            devices=len(setting.names),
            roles=work.roles,
            staleness=work.staleness,
            division=self.fractions,
        )


@dataclass(slots=True)
class NearMiss:
    """The choice that came nearest to fitting."""

    room: MemoryFit
    """The candidate's memory."""
    choice: Candidate
    """Itself."""


class Candidates:
    """Choices of a setting that fit."""

    def __init__(self, setting: PlanningProblem, prices: StageTimes, rooms: MemoryFits) -> None:
        self.setting, self.prices, self.rooms = setting, prices, rooms
        self.splits = Splits(setting)
        self.misses: dict[str, NearMiss] = {}
        self.weighed = 0
        work = setting.workload
        self.shortest = max(work.longest, 256)
        self.least = _power(self.shortest)
        self.groups = GroupedCandidates(prices, rooms, self.splits, self.shortest)
        own = setting.workload.roles - setting.workload.reading - {"generate", "train", "fit"}
        self.frozen = sorted(own)

    def sizes(self) -> list[int]:
        """How many devices may be used: all, or a round number of them; the most first."""
        count = len(self.setting.names)
        numbers = {2**i for i in range(20)} | {3 * 2**i for i in range(20)} | set(range(1, FEW + 1))
        return sorted({count, *(size for size in numbers if size < count)}, reverse=True)

    def choices(self, variant: Variant, size: int) -> Iterator[Candidate]:
        """Every layout of a strategy on so many devices, with its numbers of memory still open."""
        if variant.groups:
            base = Candidate(strategy=variant.strategy, devices=size, budget=self.budgets(size)[0])
            yield from self.groups.choices(base) if size > 1 else ()
            return
        for base, generating, training, frozen in self._shares(variant, size):
            if record_of(variant.strategy).gathers:
                whole = ModelSplit(dp=size)
                yield from [replace(base, lane=whole, train=whole, frozen=whole)] * (size == len(self.setting.names))
                continue
            host = self.setting.together(0, size)
            lanes, trains = self.splits.lanes(generating, host), self.splits.trains(training, host)
            others = self.splits.frozen(frozen, host) if self.frozen else [ALONE]
            for train in trains:
                for lane in lanes:
                    for other in others:
                        yield replace(base, lane=lane, train=train, frozen=other)

    def _shares(self, variant: Variant, size: int) -> Iterator[tuple[Candidate, int, int, int]]:
        """A choice without layouts, and how many devices generate, train, and serve a frozen model."""
        strategy, most = record_of(variant.strategy), self.budgets(size)[0]
        if size < strategy.least_devices:
            return
        # 0.33 of three devices is one of them, as in a run.
        fractions = None if variant.fractions is None else shares_of(variant.fractions, size)
        base = Candidate(strategy=variant.strategy, devices=size, fractions=fractions, budget=most)
        if strategy.generates_apart:
            for first in self.cuts(size):
                yield replace(base, generating=first), first, size - first, size - first
            return
        try:
            places = base.places(self.setting.workload.roles)
        except RecipeError:
            return
        counts = {role: count for role, (_, count) in places.items()}
        frozen = math.gcd(*(counts[role] for role in self.frozen)) if self.frozen else 1
        alike = ({"train", "fit"} & counts.keys()) | (self.setting.workload.reading - {"generate"})
        yield base, counts["generate"], math.gcd(*(counts[role] for role in alike)), frozen

    def cuts(self, size: int) -> list[int]:
        """How many of so many devices may generate."""
        places = {round(size * part / PARTS) for part in range(1, PARTS)}
        kinds = [device for _, device in self.setting.ordered[:size]]
        places |= {index for index in range(1, size) if kinds[index] != kinds[index - 1]}
        host = self.setting.together(0, size)
        whole = {round(place / host) * host for place in places} if size >= 2 * host else set()
        return sorted(place for place in places | whole if 0 < place < size)

    def fitting(self, choice: Candidate, variant: Variant) -> Iterator[tuple[Candidate, MemoryFit]]:
        """A choice with budgets that fit: the largest without recomputing, and with it.

        Copies share an optimizer only if memory is short, because a copy that dies takes its part with it; and only
        if that is not enough, something sleeps.
        """
        work = self.setting.workload
        places = choice.places(work.roles)
        _, training = places["train"]
        copies = training > choice.train.width and not work.adapter
        # What sleeps on a CPU stays where it was. Where stages flow, optimizers make room for caches beside them.
        beside = not choice.streamed or places["generate"] == places["train"]
        sleepy = beside and self.setting.ordered[0][1].kind.has_own_memory
        for sleeps in (False, True) if sleepy else (False,):
            for sharded in (False, True) if copies else (False,):
                done = False
                for found in self.budgeted(choice, variant, sleeps=sleeps, sharded=sharded):
                    yield found
                    done = done or self.prices.slots(found[0], found[1].pool) * choice.lanes(work.roles) >= work.answers
                if done:
                    return

    def budgeted(
        self, choice: Candidate, variant: Variant, *, sleeps: bool, sharded: bool
    ) -> Iterator[tuple[Candidate, MemoryFit]]:
        """With and without recomputing, as far as it fits and may be worth it."""
        work, still = self.setting.workload, None
        for recompute in (False, True) if work.recompute is None else (work.recompute,):
            tried = replace(choice, sleeps=sleeps, sharded=sharded, recompute=recompute)
            still = still or self.rooms.still(tried)
            found = self._largest(tried, still, variant)
            if found is not None:
                yield found
                if found[0].budget >= self.budgets(choice.devices)[0]:
                    return  # recomputing would only be slower

    def exactly(self, choice: Candidate, variant: Variant) -> tuple[Candidate, MemoryFit] | None:
        """A choice as it is, if it fits."""
        room = self.rooms.room(choice)
        if not room.fits:
            self._note_miss(choice, room, variant)
        return (choice, room) if room.fits else None

    def _note_miss(self, choice: Candidate, room: MemoryFit, variant: Variant) -> None:
        miss = self.misses.get(variant.label)
        if miss is None or room.over < miss.room.over:
            self.misses[variant.label] = NearMiss(room=room, choice=choice)

    def budgets(self, devices: int) -> Sequence[int]:
        """Tokens of a micro-batch on one rank, from the largest; each holds the longest answer."""
        work = self.setting.workload
        if work.budget is not None:
            return [max(work.budget, work.longest)]
        # A budget far above a cell's share would keep the scheduler from dealing work out evenly.
        share = max(1.0, work.load.tokens) / devices
        usual, fair = self.setting.ordered[0][1].kind.micro_batch, _power(math.ceil(share))
        most = max(self.least, min(usual, fair))
        rounded = [most >> i for i in range(20) if most >> i >= self.least]
        return rounded if rounded[-1] == self.shortest else [*rounded, self.shortest]

    def _largest(
        self, choice: Candidate, still: tuple[FixedMemory, ...], variant: Variant
    ) -> tuple[Candidate, MemoryFit] | None:
        """With the largest budget that fits, or none if not even the smallest does; it comes with the largest."""
        self.weighed += 1
        _, *smaller = self.budgets(choice.devices)
        room = self.rooms.room(choice, still)
        if room.fits:
            return choice, room
        smallest = replace(choice, budget=smaller[-1]) if smaller else choice
        least = self.rooms.room(smallest, still) if smaller else room
        if not least.fits:
            self._note_miss(smallest, least, variant)
            return None
        for budget in smaller[:-1]:
            between = replace(choice, budget=budget)
            if (found := self.rooms.room(between, still)).fits:
                return between, found
        return smallest, least


def _power(number: int) -> int:
    """The power of two that is not below it."""
    return 1 << (number - 1).bit_length()
