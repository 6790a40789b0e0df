"""Drives a step on a virtual clock: a heap of events, and durations from a model of the cells instead of cells.

The state machine is the one that runs real steps; only what takes time is made up here. Between two events of a lane
nothing happens but decoding, so its progress is integrated: with c trajectories active every one of them gains a token
per decode step of c. Decisions never see the true lengths, which only this driver knows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from stretto.scheduler.records import (
    ApplyUpdate,
    BufferedGroup,
    GroupStart,
    MoveRollouts,
    RolloutId,
    SplitUpdates,
    StageWork,
    StartRollouts,
)
from stretto.scheduler.state import StepState


class Durations(Protocol):
    """How long things take; the seam that a cost model fills."""

    def tick(self, cell: str, active: int, context: float) -> float:
        """A decode step of so many trajectories with so many tokens of context on average."""
        ...

    def prefill(self, cell: str, tokens: int) -> float:
        """Computing contexts before the first token; it holds up the lane."""
        ...

    def piece(self, piece: StageWork) -> float:
        """A piece."""
        ...

    def judge(self, item: RolloutId) -> float:
        """A verdict, beside the cells."""
        ...

    def switch(self, move: MoveRollouts, tokens: int) -> float:
        """Going on with trajectories of so many tokens on another cell; it holds up the lane there."""
        ...

    def apply(self, *, last: bool) -> float:
        """Reduction and update; publishing after the last one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySpan:
    """Something that took time on a cell."""

    cell: str
    """The cell's name."""
    stage: str
    """generate for an open lane, or the stage of a piece."""
    start: float
    """When it began."""
    stop: float
    """When it ended."""
    tokens: int
    """Tokens generated or computed in it."""
    groups: int
    """Groups that it worked on."""


@dataclass(slots=True)
class _Lane:
    """A lane as it truly is."""

    begun: dict[RolloutId, float] = field(default_factory=dict)
    """Active trajectory -> tick of its first token."""
    base: float = 0.0
    """Sum over them of the prompt's tokens less that tick, so that contexts need not be added up at every look."""
    ends: list[tuple[float, RolloutId]] = field(default_factory=list)
    """Heap of (tick of the last token, trajectory)."""
    ticks: float = 0.0
    """Decode steps so far."""
    clock: float = 0.0
    """Until when they are counted; later than now while the lane computes contexts."""
    pace: float = 0.0
    """Seconds of a decode step as it is now."""
    alarm: int = 0
    """Number of the event that will look at it next; earlier ones are out of date."""
    opened: float | None = None
    """Since when it is open."""
    tokens: int = 0
    """Generated since then."""
    groups: set[int] = field(default_factory=set)
    """Groups that the cell worked on since then."""
    most: float = 0.0
    """Most tokens that its trajectories held at once."""
    active: int = 0
    """Most of them that there were at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of a step."""

    seconds: float
    """How long it took."""
    stretches: tuple[BusySpan, ...]
    """What each cell did."""
    updates: tuple[tuple[float, float], ...]
    """When each update began and ended, the last one with its publish."""
    rounds: int
    """How often groups were launched."""
    launched: int
    """How many of them."""
    accepted: tuple[int, ...]
    """The groups it trained on."""
    moved: int
    """Trajectories that went on elsewhere."""
    contexts: Mapping[str, float]
    """Generate cell -> most tokens that its trajectories held at once, a shared prompt counted for each."""
    active: int
    """Most trajectories that a generate cell had at once."""


class Simulation:
    """One step on the virtual clock."""

    def __init__(
        self,
        step: StepState,
        durations: Durations,
        lengths: Mapping[RolloutId, int],
        *,
        verdict: Callable[[int], Sequence[int]] | None = None,
        more: Callable[[int], Sequence[GroupStart]] | None = None,
        divide: Callable[[Sequence[int]], Sequence[Sequence[RolloutId]]] | None = None,
    ) -> None:
        """`verdict` gives the attempts of a group to train on, `more` another round, `divide` what makes each update;
        by default every group counts, there is one round, and all make one update."""
        self.step, self.durations, self.lengths = step, durations, lengths
        self.verdict = verdict or (lambda index: range(step.groups[index].launch.samples))
        self.more = more or (lambda missing: ())
        self.divide = divide or (lambda groups: [[(i, a) for i in groups for a in step.groups[i].sizes]])
        self.now = 0.0
        # (when, 0 for a look at a lane, else 1, the order in which work was started, what happens then)
        self.events: list[tuple[float, int, int, Callable[[], None]]] = []
        self.count = 0
        self.started: dict[RolloutId, int] = {}
        self.lanes: dict[str, _Lane] = {cell: _Lane() for cell in step.terms.slots}
        self.known: dict[str, set[int]] = {cell: set() for cell in step.terms.slots}
        self.unjudged: dict[int, int] = {}
        self.stretches: list[BusySpan] = []
        self.updates: list[tuple[float, float]] = []
        self.rounds = self.launched = self.moved = 0
        self.over: float | None = None

    def run(self, launches: Sequence[GroupStart], carried: Sequence[BufferedGroup] = ()) -> Simulated:
        """From the first launch to the update."""
        if carried:
            self.step.carry(carried)
        self._launch(launches)
        self._start()
        while self.events and self.over is None:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now:
                # What happens at one moment is told in the order in which it was started, before anything is offered.
                heapq.heappop(self.events)[3]()
            self._start()
        self.events.clear()  # they refer to this object, and it to them
        if self.over is None:
            raise RuntimeError("the step came to a stand: nothing runs, and it is not finished")
        return Simulated(
            seconds=self.over,
            stretches=tuple(self.stretches),
            updates=tuple(self.updates),
            rounds=self.rounds,
            launched=self.launched,
            accepted=self.step.accepted,
            moved=self.moved,
            contexts={cell: lane.most for cell, lane in self.lanes.items()},
            active=max(lane.active for lane in self.lanes.values()),
        )

    def _at(self, when: float, event: Callable[[], None], *, started: int | None = None, look: bool = False) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, not look, started or self.count, event))

    def _start(self) -> None:
        """Starts what the step offers."""
        for work in self.step.offer(self.now):
            match work:
                case StartRollouts():
                    self._join(work)
                case MoveRollouts():
                    self._move(work)
                case StageWork():
                    self._at(self.now + self.durations.piece(work), self._finisher(work, self.now))
                case SplitUpdates():
                    self._at(self.now, partial(self.step.divided, self.divide(work.groups)))
                case ApplyUpdate():
                    seconds = self.durations.apply(last=work.last)
                    self._at(self.now + seconds, partial(self._applied, self.now, last=work.last))

    def _launch(self, groups: Sequence[GroupStart]) -> None:
        """A round, or the end of them."""
        if not groups:
            self.step.close()
            return
        self.rounds += 1
        self.launched += len(groups)
        self.step.launch(groups)

    def _applied(self, start: float, *, last: bool) -> None:
        self.updates.append((start, self.now))
        if last:
            self.over = self.now
        else:
            self.step.updated()

    def _finisher(self, piece: StageWork, start: float) -> Callable[[], None]:
        def finish() -> None:
            groups = dict.fromkeys(index for index, _ in piece.items)
            self._note(piece.cell, piece.stage, start, piece.tokens, len(groups))
            self.step.done(piece)
            if piece.stage == "reward":
                for index in groups:
                    self._decide(index)

        return finish

    def _note(self, cell: str, stage: str, start: float, tokens: int, groups: int) -> None:
        self.stretches.append(
            BusySpan(cell=cell, stage=stage, start=start, stop=self.now, tokens=tokens, groups=groups)
        )

    # Lanes ------------------------------------------------------------------------------------------------------------

    def _join(self, join: StartRollouts) -> None:
        lane, known = self.lanes[join.cell], self.known[join.cell]
        self._pass(lane)
        if lane.opened is None:
            lane.opened = self.now
        new = {index for index, _ in join.items} - known
        known |= new
        prefill = sum(self.step.groups[index].launch.prompt_tokens for index in new)
        if prefill:
            lane.clock += self.durations.prefill(join.cell, prefill)
        for item in join.items:
            self.count += 1
            self.started[item] = self.count
            self._enter(lane, item, 0.0)
        self._set(join.cell, lane)

    def _move(self, move: MoveRollouts) -> None:
        source, target = self.lanes[move.source], self.lanes[move.target]
        self._pass(source)
        self._pass(target)
        source.most = max(source.most, source.base + len(source.begun) * source.ticks)
        done = {item: max(0.0, source.ticks - self._exit(source, item)) for item in move.items}
        source.ends = [entry for entry in source.ends if entry[1] in source.begun]
        heapq.heapify(source.ends)
        prompts = {index: self.step.groups[index].launch.prompt_tokens for index, _ in move.items}
        target.clock += self.durations.switch(move, round(sum(done.values())) + sum(prompts.values()))
        for item in move.items:
            self._enter(target, item, done[item])
        self.moved += len(move.items)
        self._set(move.source, source)
        self._set(move.target, target)

    def _enter(self, lane: _Lane, item: RolloutId, done: float) -> None:
        begun = lane.ticks - done
        lane.begun[item] = begun
        lane.base += self.step.groups[item[0]].launch.prompt_tokens - begun
        lane.groups.add(item[0])
        heapq.heappush(lane.ends, (begun + self.lengths[item], item))

    def _exit(self, lane: _Lane, item: RolloutId) -> float:
        """The tick at which it had begun."""
        begun = lane.begun.pop(item)
        lane.base -= self.step.groups[item[0]].launch.prompt_tokens - begun
        return begun

    def _pass(self, lane: _Lane) -> None:
        """Counts the decode steps until now."""
        if self.now > lane.clock:
            if lane.begun:
                lane.ticks += (self.now - lane.clock) / lane.pace
            lane.clock = self.now

    def _set(self, cell: str, lane: _Lane) -> None:
        """Sets the lane's pace until its next trajectory ends; closes it if none is left."""
        if lane.ends:
            ticks, active = lane.ends[0][0] - lane.ticks, len(lane.begun)
            lane.active = max(lane.active, active)
            # Contexts grow by a token per tick; those half-way are right on average.
            lane.pace = self.durations.tick(cell, active, lane.ticks + ticks / 2 + lane.base / active)
            lane.alarm = self.count + 1
            self._at(lane.clock + ticks * lane.pace, partial(self._ring, cell, lane, lane.alarm), look=True)
        elif lane.opened is not None:
            lane.alarm = 0
            self._note(cell, "generate", lane.opened, lane.tokens, len(lane.groups))
            lane.opened, lane.tokens, lane.groups = None, 0, set()

    def _ring(self, cell: str, lane: _Lane, alarm: int) -> None:
        """The trajectories that end now leave."""
        if lane.alarm != alarm:
            return
        lane.ticks, lane.clock = lane.ends[0][0], self.now
        lane.most = max(lane.most, lane.base + len(lane.begun) * lane.ticks)  # contexts only grow until one ends
        while lane.ends and lane.ends[0][0] <= lane.ticks + 1e-6:
            _, item = heapq.heappop(lane.ends)
            self._exit(lane, item)
            lane.tokens += self.lengths[item]
            self._at(self.now, partial(self._ended, item), started=self.started[item])
        self._set(cell, lane)

    def _ended(self, item: RolloutId) -> None:
        self.step.ended(item, self.lengths[item], self.now)
        self._judge(item)

    # Verdicts ---------------------------------------------------------------------------------------------------------

    def _judge(self, item: RolloutId) -> None:
        """A verdict on a trajectory comes in; a group is decided with its last one, a reward model's included."""
        seconds = self.durations.judge(item)
        if seconds:
            self._at(self.now + seconds, lambda: self._judged(item[0]))
        else:
            self._judged(item[0])

    def _judged(self, index: int) -> None:
        left = self.unjudged.get(index, self.step.groups[index].launch.samples) - 1
        self.unjudged[index] = left
        self._decide(index)

    def _decide(self, index: int) -> None:
        if self.unjudged.get(index, 1) or self.step.groups[index].scores.get("reward"):
            return
        self.step.judged(index, self.verdict(index))
        missing = self.step.missing
        if missing is not None and not self.step.closed:
            self._launch(self.more(missing) if missing else ())
