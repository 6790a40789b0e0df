"""Who generates what: groups wait, longest expected first; cells take them as they have room; tails move together.

A group stays on one cell, so that its prompt is computed once, unless that would leave other cells with less to do:
then the last groups are split. Cells of unequal speed are given as much as they do in the same time, of which a part is
the same however few answers a cell has: it takes as many decode steps as its longest has tokens. A group that finds
less room than it needs begins, and the rest of it waits on that cell; a cell with nothing left of its own takes over
what waits elsewhere.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.scheduler.length_predictor import likely_longest, remaining
from stretto.scheduler.records import GroupStart, MoveRollouts, RolloutId, SpeedEstimate, StartRollouts

TAIL = 8
"""A tail may move once no more than this fraction of a cell's trajectories are left."""


@dataclass(slots=True)
class GenerationQueue:
    """What one generate cell has."""

    slots: int
    """How many trajectories it takes at once."""
    speeds: SpeedEstimate
    """How fast it is."""
    speed: float = 1.0
    """The same, beside the mean of the cells."""
    active: dict[RolloutId, tuple[float, float]] = field(default_factory=dict)
    """Being generated: (tick at which it would have begun here, expected tokens)."""
    backlog: deque[tuple[RolloutId, float]] = field(default_factory=deque)
    """Rest of a group that began here: (trajectory, expected tokens)."""
    load: float = 0.0
    """Expected tokens of both."""
    fixed: float = 0.0
    """What its decode steps take however few join in them, as tokens; counted where cells differ in speed."""
    ticks: float = 0.0
    """Decode steps so far, as far as the clock tells."""
    seen: float = 0.0
    """When that was last brought up to date."""
    opened: set[int] = field(default_factory=set)
    """Groups whose prompt it has computed or will."""
    computing: float = 0.0
    """Seconds of forwards over what was given to it that are still to pass before it decodes."""

    @property
    def due(self) -> float:
        """What it has to do, as tokens of a cell of the mean speed."""
        return (self.load + self.fixed) / self.speed

    @property
    def room(self) -> int:
        """Trajectories that may join now."""
        return self.slots - len(self.active)

    @property
    def turning(self) -> bool:
        """True when few are left and their number has halved, to none in the end: it may close or its tail move."""
        few = len(self.active)
        return not few & (few - 1) and few <= max(1, self.slots // TAIL)

    def pass_time(self, now: float) -> None:
        """Counts the decode steps since the last look."""
        elapsed, self.seen = now - self.seen, now
        if not self.active or not elapsed:
            return
        if self.computing:
            computed = min(self.computing, elapsed)
            self.computing -= computed
            elapsed -= computed
        self.ticks += elapsed / self.speeds.tick_of(len(self.active))

    def join(self, item: RolloutId, expected: float, now: float, *, prompt: int, done: float = 0.0) -> None:
        """A trajectory begins, or goes on after `done` tokens elsewhere; the first of a group brings the prompt."""
        self.pass_time(now)
        self.computing += self.speeds.again * (done if item[0] in self.opened else prompt + done)
        self.opened.add(item[0])
        self.active[item] = (self.ticks - done, expected)

    def leave(self, item: RolloutId, now: float) -> None:
        """A trajectory has ended."""
        self.pass_time(now)
        self.load -= self.active.pop(item)[1]

    def left(self, spread: float, longest: int) -> float:
        """Seconds until the last active trajectory is expected to end."""
        alike = set(self.active.values())  # siblings that began together
        most = max((remaining(e, spread, self.ticks - begun, longest) for begun, e in alike), default=0.0)
        return self.computing + most * self.speeds.tick_of(max(1, len(self.active)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWork:
    """What there is to do beside generation."""

    ready: float
    """Seconds of work on one cell that could start now."""
    free: int
    """Cells that are free for it."""
    cells: int
    """Cells that will share it once nothing is generated any more."""


class GenerationQueues:
    """Every lane, and what waits for one."""

    def __init__(self, slots: Mapping[str, int], *, speeds: SpeedEstimate, longest: int, spread: float = 1.0) -> None:
        """`spread` is the deviation of log-lengths."""
        self.lanes = {
            cell: GenerationQueue(slots=count, speeds=speeds.on(cell), speed=speeds.relative.get(cell, 1.0))
            for cell, count in slots.items()
        }
        self.speeds, self.longest, self.spread = speeds, longest, spread
        self.waiting: list[tuple[float, int, tuple[RolloutId, ...]]] = []
        self.waiting_items = 0
        self.waiting_tokens = 0.0
        self.place: dict[RolloutId, str] = {}
        self.prompts: dict[int, int] = {}
        self.behind: list[tuple[int, int, str]] = []
        self.order = {cell: index for index, cell in enumerate(self.lanes)}
        # Number of active trajectories -> the cells that have so many: nobody looks through a thousand for a target.
        # Kept from the first tail on; until then it would cost every event and be of no use.
        self.having: defaultdict[int, dict[str, None]] | None = None

    def add(self, index: int, launch: GroupStart, attempts: Iterable[int] | None = None) -> None:
        """A group waits, or what is left of one."""
        items = tuple((index, attempt) for attempt in (range(launch.samples) if attempts is None else attempts))
        self.prompts[index] = launch.prompt_tokens
        heapq.heappush(self.waiting, (-launch.expected, index, items))
        self.waiting_items += len(items)
        self.waiting_tokens += len(items) * launch.expected

    @property
    def work(self) -> bool:
        """True if a cell with room would find something to do."""
        return bool(self.waiting or self._behind())

    def dispatch(self, cells: Sequence[str], now: float) -> list[StartRollouts]:
        """Fills these cells; returns what starts on each."""
        joins: dict[str, list[RolloutId]] = {}
        for cell in cells:
            self._begin(cell, joins, now)
        roomy = [cell for cell in cells if self.lanes[cell].room > 0]
        fixed = self._fixed()
        for cell in roomy:
            self.lanes[cell].fixed = fixed
        heap = [(self.lanes[cell].due, self.order[cell], cell) for cell in roomy]
        heapq.heapify(heap)
        room = sum(self.lanes[cell].room for cell in roomy)
        fair = float("inf")
        if len(roomy) > 1 and self.waiting_items <= room:
            speed = sum(self.lanes[cell].speed for cell in roomy)
            fair = (sum(self.lanes[cell].load + fixed for cell in roomy) + self.waiting_tokens) / speed
        while self.waiting and heap:
            expected, _, items = heapq.heappop(self.waiting)
            self.waiting_items -= len(items)
            self.waiting_tokens += len(items) * expected
            due, _, cell = heap[0]
            whole = due - len(items) * expected / self.lanes[cell].speed <= fair * (1 + 1e-9)
            for part in [items] if whole else [(item,) for item in items]:
                self._give(part, -expected, heap, joins, now)
        for cell in roomy:
            while self.lanes[cell].room > 0 and (poorer := self._behind()) is not None:
                self._take_over(cell, poorer)
                self._begin(cell, joins, now)
        return [StartRollouts(cell=cell, items=tuple(items)) for cell, items in joins.items() if items]

    def _fixed(self) -> float:
        """What a cell of the mean speed takes for its decode steps beside their answers, as tokens of these."""
        speeds = self.speeds
        if not (speeds.relative and speeds.tick_each and self.waiting):
            return 0.0
        each = max(1, self.waiting_items // len(self.lanes))
        return (speeds.tick / speeds.tick_each - 1) * likely_longest(
            -self.waiting[0][0], self.spread, each, self.longest
        )

    def ended(self, item: RolloutId, now: float) -> str:
        """A trajectory has ended; returns its cell."""
        cell = self.place.pop(item)
        lane = self.lanes[cell]
        lane.leave(item, now)
        self._counted(cell, before=len(lane.active) + 1)
        return cell

    def lost(self, cell: str) -> tuple[RolloutId, ...]:
        """A cell has died; returns what it had."""
        lane = self.lanes[cell]
        items = (*lane.active, *(item for item, _ in lane.backlog))
        for item in lane.active:
            del self.place[item]
        self.lanes[cell] = GenerationQueue(slots=lane.slots, speeds=lane.speeds, speed=lane.speed)
        self._counted(cell, before=len(lane.active))
        return items

    def tail(self, cell: str, room: OtherWork, *, gate: float, spread: float, now: float) -> MoveRollouts | None:
        """Moves what is left on a cell onto another, if that pays.

        Other work gains the seconds for which the cell would have gone on, as far as there is work that the free cells
        will not have done by the end of the tail anyway. The other lane loses what it takes to compute again what comes
        to it, `gate` times over because that is a guess, and gets slower. All cells share what is gained; what is lost,
        too, while there is other work to the end, else the step ends that much later.
        """
        mine, few = self.lanes[cell], len(self.lanes[cell].active)
        mine.pass_time(now)
        switch = gate * self._switch(mine)
        if room.ready <= switch:
            return None
        worth = mine.left(spread, self.longest)
        target = self._poorest(cell, few) if worth > switch else None
        if target is None:
            return None
        lane = self.lanes[target]
        lane.pass_time(now)
        goes_on = lane.left(spread, self.longest)
        together = self.speeds.tick_of(len(lane.active) + few) / self.speeds.tick_of(len(lane.active))
        lost = switch + (together - 1) * goes_on
        meanwhile = (room.free + room.cells - 1) / 2  # those that are free now, and all but the target in the end
        spare = max(0.0, room.ready - meanwhile * goes_on)
        if min(spare, worth) <= (lost if spare > worth + lost else lost * room.cells):
            return None
        items = tuple(mine.active)
        for item, (begun, expected) in mine.active.items():
            lane.join(item, expected, now, prompt=self.prompts[item[0]], done=mine.ticks - begun)
            lane.load += expected
            self.place[item] = target
        mine.active, mine.load = {}, 0.0
        self._counted(cell, before=few)
        self._counted(target, before=len(lane.active) - few)
        return MoveRollouts(source=cell, target=target, items=items)

    def _poorest(self, cell: str, few: int) -> str | None:
        """Another cell with at least as many active as this one, room for its few, and otherwise as few as any."""
        if self.having is None:
            self.having = defaultdict(dict)
            for other, lane in self.lanes.items():
                self.having[len(lane.active)][other] = None
        for count in range(few, max(self.having) + 1):
            for other in self.having.get(count, ()):
                if other != cell and self.lanes[other].room >= few:
                    return other
        return None

    def _counted(self, cell: str, *, before: int) -> None:
        """Notes that a cell has another number of active trajectories than before."""
        now = len(self.lanes[cell].active)
        if self.having is not None and now != before:
            del self.having[before][cell]
            self.having[now][cell] = None

    def _switch(self, lane: GenerationQueue) -> float:
        """Seconds to go on elsewhere with all that is generated on a lane: the prompts and what came of them so far."""
        prompts = sum(self.prompts[index] for index in {index for index, _ in lane.active})
        done = sum(lane.ticks - begun for begun, _ in lane.active.values())
        return self.speeds.switch + self.speeds.again * (prompts + done)

    def _give(
        self,
        items: tuple[RolloutId, ...],
        expected: float,
        heap: list[tuple[float, int, str]],
        joins: dict[str, list[RolloutId]],
        now: float,
    ) -> None:
        """Hands items to the cell with the least to do; it stays in the heap while it has room."""
        _, order, cell = heapq.heappop(heap)
        lane = self.lanes[cell]
        lane.backlog.extend((item, expected) for item in items)
        lane.load += len(items) * expected
        self._begin(cell, joins, now)
        if lane.room > 0:
            heapq.heappush(heap, (lane.due, order, cell))

    def _begin(self, cell: str, joins: dict[str, list[RolloutId]], now: float) -> None:
        """Lets what waits on a cell begin, as far as there is room."""
        lane = self.lanes[cell]
        before = len(lane.active)
        while lane.backlog and lane.room > 0:
            item, expected = lane.backlog.popleft()
            lane.join(item, expected, now, prompt=self.prompts[item[0]])
            self.place[item] = cell
            joins.setdefault(cell, []).append(item)
        self._counted(cell, before=before)
        if lane.backlog:
            heapq.heappush(self.behind, (-len(lane.backlog), self.order[cell], cell))

    def _behind(self) -> str | None:
        """The cell on which most waits. Entries of the heap may be out of date; those are dropped here."""
        while self.behind:
            count, order, cell = self.behind[0]
            now = len(self.lanes[cell].backlog)
            if now == -count:
                return cell
            heapq.heappop(self.behind)
            if now:
                heapq.heappush(self.behind, (-now, order, cell))
        return None

    def _take_over(self, cell: str, poorer: str) -> None:
        """Takes half of what waits on another cell, the last of it first."""
        mine, theirs = self.lanes[cell], self.lanes[poorer]
        for _ in range((len(theirs.backlog) + 1) // 2):
            item, expected = theirs.backlog.pop()
            theirs.load -= expected
            mine.load += expected
            mine.backlog.appendleft((item, expected))
