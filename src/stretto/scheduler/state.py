"""One step as a state machine: what is launched, generated, judged and accepted decides what may run, and a plan where.

It does no I/O and knows neither clock nor strategy: a driver tells it what has happened and asks what may start
(`offer`). Drivers exist for the real world and for a simulated one; told the same, it decides the same. Strategies
are the plan's cells, priorities and flow, nothing else.

Why nothing here changes a gradient: weights stand still until an update, and gradients are sums. Why nothing changes
who is trained: groups are accepted in the order of their launch, and one is trained only when it is certain to be
accepted, that is, when fewer than `groups` of those before it are alive or undecided.

Where the plan lets samplers lag behind (`staleness`), a step trains on groups that the step before has made (`carry`),
and makes and scores (*old*) what the next one trains on. It ends when all is done: a batch is of one version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from stretto.placement.plan import Plan
from stretto.scheduler.device_locks import CellLocks
from stretto.scheduler.generation_queues import GenerationQueues, OtherWork
from stretto.scheduler.microbatches import ReadyGroup, StageQueue
from stretto.scheduler.progress import GroupProgress, by_group
from stretto.scheduler.records import (
    FORWARD,
    UPDATE,
    ApplyUpdate,
    BufferedGroup,
    GroupStart,
    RolloutId,
    SplitUpdates,
    StageWork,
    StepSpec,
    Work,
    role_of,
)

GATE = 1.5
"""What a move must save, in switch costs, where the plan does not say."""


class StepState:
    """The state of one step."""

    def __init__(self, plan: Plan, terms: StepSpec, *, spread: float = 1.0) -> None:
        self.plan, self.terms, self.spread = plan, terms, spread
        self.ahead, self.phased = plan.staleness > 0, plan.flow == "phased"
        self.carried = 0
        self.cells = CellLocks(plan)
        self.lanes = GenerationQueues(terms.slots, speeds=terms.speeds, longest=terms.longest, spread=spread)
        self.forward = [stage for stage in FORWARD if stage in terms.stages]
        self.update = [stage for stage in UPDATE if stage in terms.stages]
        self.queues = {stage: StageQueue(in_order=self.phased) for stage in (*self.forward, *self.update)}
        self.roles = {stage: role_of(stage) for stage in self.queues}
        self.served = {role: [s for s in self.queues if self.roles[s] == role] for role in self.roles.values()}
        self.groups: list[GroupProgress] = []
        self.certain = self.alive = self.handed = self.undecided = self.unfinished = self.pieces = 0
        self.coming = 0.0
        self.running: dict[int, StageWork] = {}
        self.ledger: dict[str, list[StageWork]] = {}
        self.closed = self.applied = False
        # Trajectories of the updates to come, once they are divided.
        self.parts: deque[Sequence[RolloutId]] | None = None
        self.touched: set[str] = set()

    # What has happened ------------------------------------------------------------------------------------------------

    def carry(self, groups: Sequence[BufferedGroup]) -> None:
        """Groups that were made before the step, in the order of their launch; told before anything is launched.

        Reward models have judged them by then. Where there are any, the step trains on these and on no others.
        """
        self.certain = self.carried = len(groups)
        self.ahead = self.ahead or bool(groups)
        for index, group in enumerate(groups):
            made = GroupProgress(launch=group.launch, unfinished=0, judged=True, scores={"reward": 0, "old": 0})
            made.attempts = frozenset(attempt for attempt, _ in group.sizes)
            made.sizes = {attempt: tokens for attempt, tokens in group.sizes if tokens}
            self.groups.append(made)
            self._advance(index)

    def launch(self, groups: Sequence[GroupStart]) -> None:
        """Groups to make, in launch order."""
        for launch in groups:
            self.lanes.add(len(self.groups), launch)
            self.groups.append(GroupProgress(launch=launch, unfinished=launch.samples))
            self.coming += launch.prompt_tokens + launch.samples * launch.expected
            self.undecided += 1
            self.unfinished += launch.samples
        self._extend()
        self.touched.update(self.lanes.lanes)

    def close(self) -> None:
        """No group will be launched any more."""
        self.closed = True

    def ended(self, item: RolloutId, tokens: int, now: float) -> None:
        """A trajectory was generated; 0 tokens if it failed and cannot be trained on."""
        cell = self.lanes.ended(item, now)
        if self.lanes.work or self.lanes.lanes[cell].turning:
            self.touched.add(cell)
        group = self.groups[item[0]]
        group.unfinished -= 1
        self.unfinished -= 1
        if tokens:
            group.sizes[item[1]] = tokens
        if not group.unfinished:
            self.coming -= group.launch.prompt_tokens + group.launch.samples * group.launch.expected
            self._advance(item[0])

    def judged(self, index: int, attempts: Sequence[int]) -> None:
        """The verdict on a group: the attempts to train on, or none if it is dropped."""
        group = self.groups[index]
        group.judged, group.attempts = True, frozenset(attempts)
        self.undecided -= 1
        if group.gone:
            for queue in self.queues.values():
                queue.forget(index)
            if index < self.certain:
                self.alive -= 1
                self._extend()
        self._advance(index)

    def done(self, piece: StageWork) -> None:
        """A piece is finished."""
        del self.running[piece.number]
        self.touched.update(cell for cell in self.cells.release(piece.cell) if cell in self.lanes.lanes)
        if piece.stage in UPDATE:
            self.ledger.setdefault(piece.cell, []).append(piece)
            return
        for index, _ in piece.items:
            group = self.groups[index]
            group.scores[piece.stage] -= 1
            if not any(group.scores.values()):
                self._advance(index)

    def divided(self, parts: Sequence[Sequence[RolloutId]]) -> None:
        """Of which trajectories each update is made; at least one update."""
        self.parts = deque(parts)
        self.updated()

    def updated(self) -> None:
        """The next update may begin; what made the one before, if there was one, is done with."""
        assert self.parts is not None
        self.ledger.clear()
        for index, attempts in by_group(self.parts.popleft()).items():
            self._queue(self.update, index, attempts)
        self.applied = False

    def lost(self, cell: str) -> None:
        """A cell has died: what it had is done again, and it gets nothing until it is `back`."""
        self.cells.kill(cell)
        if cell in self.lanes.lanes:
            for index, attempts in by_group(self.lanes.lost(cell)).items():
                self.lanes.add(index, self.groups[index].launch, attempts)
            self.touched.update(self.lanes.lanes)
        broken = [piece for piece in self.running.values() if piece.cell == cell]
        for piece in (*broken, *self.ledger.pop(cell, ())):
            self.running.pop(piece.number, None)
            for index, attempts in by_group(piece.items).items():
                self._queue((piece.stage,), index, attempts, first=True)
        self.applied = False

    def back(self, cell: str) -> None:
        """A cell that had died serves again."""
        self.cells.revive(cell)
        if cell in self.lanes.lanes:
            self.touched.add(cell)

    # What may start ---------------------------------------------------------------------------------------------------

    def offer(self, now: float) -> list[Work]:
        """Everything that may start now. Ask again after each event."""
        works: list[Work] = []
        if self.touched:
            works += self._generate(now)
        for stage, queue in self.queues.items():
            if queue.groups and self.cells.idle[self.roles[stage]]:
                works += self._pieces(stage)
        if self.finished and not self.applied:
            self.applied = True
            undivided = self.terms.divides and self.parts is None
            works.append(
                SplitUpdates(groups=self.trained)
                if undivided
                else ApplyUpdate(groups=self.trained, last=not self.parts)
            )
        return works

    @property
    def missing(self) -> int | None:
        """Groups that another round would have to make up for; none while any is undecided."""
        return None if self.undecided else max(0, self.terms.groups - self.alive)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Groups of this step that are trained on, by it or by the next one, in launch order; final once finished."""
        return tuple(i for i in range(self.carried, self.certain) if self.groups[i].attempts)

    @property
    def trained(self) -> tuple[int, ...]:
        """Groups that this step trains on: those that it has made itself, or those that were carried into it."""
        return tuple(range(self.carried)) if self.ahead else self.accepted

    @property
    def finished(self) -> bool:
        """True when everything that was accepted is accumulated."""
        waits = self.undecided or self.running or self.cells.dead
        return self.closed and not waits and self._gathered and not any(queue.groups for queue in self.queues.values())

    @property
    def _gathered(self) -> bool:
        """True once it is known who is trained on, and all of them were handed to training."""
        if self.ahead:
            return self.handed == self.carried
        return self.closed and not self.undecided and self.handed == self.alive

    # How it is decided ------------------------------------------------------------------------------------------------

    def _extend(self) -> None:
        """Makes groups certain to be accepted, as far as those before them leave room."""
        while self.certain < len(self.groups) and self.alive < self.terms.groups:
            index, self.certain = self.certain, self.certain + 1
            if not self.groups[index].gone:
                self.alive += 1
                self._advance(index)

    def _advance(self, index: int) -> None:
        """Hands a group to the stages that it has become ready for."""
        group = self.groups[index]
        if group.unfinished or group.handed or group.gone:
            return
        certain = index < self.certain and (group.judged or not self.terms.drops)
        ours = certain and (not self.ahead or index < self.carried)
        due = self.forward if ours else ("reward", "old") if certain else ("reward",)
        stages = [stage for stage in self.forward if stage in due and stage not in group.scores]
        scored = ours and group.judged and not any(group.scores.values())
        if not (stages or scored):
            return
        chosen = group.sizes.keys() & group.attempts if group.judged else group.sizes.keys()
        group.scores.update(dict.fromkeys(stages, len(chosen)))
        if scored and not (stages and chosen):
            group.handed = True
            self.handed += 1
            stages += [] if self.terms.divides else self.update
        self._queue(stages, index, sorted(chosen))

    def _queue(self, stages: Iterable[str], index: int, attempts: Sequence[int], *, first: bool = False) -> None:
        """Trajectories of a group wait for these stages."""
        group = self.groups[index]
        if attempts:
            sizes = tuple((attempt, group.sizes[attempt]) for attempt in attempts)
            ready = ReadyGroup.of(index, group.launch.prompt_tokens, sizes)
            for stage in stages:
                self.queues[stage].put(ready, first=first)

    def _generate(self, now: float) -> list[Work]:
        """Lanes get more, move, or close."""
        lanes, works = self.lanes.lanes, list[Work]()
        touched = sorted(self.touched, key=self.lanes.order.__getitem__)
        self.touched.clear()
        able = [c for c in touched if c in self.cells.lanes or (not self.cells.blocked[c] and self._turn(c))]
        begun = set()
        for join in self.lanes.dispatch(able, now) if self.lanes.work else ():
            self.cells.take(join.cell, lane=True)
            works.append(join)
            begun.add(join.cell)
        if self.plan.tail["move"] and not self.phased and not self.lanes.work:
            for cell in touched:
                if cell not in begun:  # whoever carries out a move must have begun what moves
                    works += self._tail(cell, now)
        for cell in touched:
            if cell in self.cells.lanes and not lanes[cell].active:
                self.cells.release(cell)
        return works

    def _tail(self, cell: str, now: float) -> list[Work]:
        """Looks each time the number of a cell's trajectories has halved whether they had better go elsewhere."""
        lane = self.lanes.lanes[cell]
        if not lane.active or not lane.turning:
            return []
        per_token = self.terms.speeds.per_token
        stages = [stage for stage in self.queues if self._tokens(stage)]
        if not stages:
            return []
        room = OtherWork(
            ready=sum(self._tokens(stage) * per_token.get(stage, 0.0) for stage in stages),
            free=min(self.cells.serving[self.roles[stage]] for stage in stages),
            cells=max(self.cells.count[self.roles[stage]] for stage in stages),
        )
        gate = float(self.plan.tail["gate"] or GATE)
        move = self.lanes.tail(cell, room, gate=gate, spread=self.spread, now=now)
        return [move] if move else []

    def _pieces(self, stage: str) -> list[Work]:
        """Pieces of a stage for the cells whose turn it is."""
        queue, works, role = self.queues[stage], list[Work](), self.roles[stage]
        if not self._tokens(stage):
            return works
        serving, count = self.cells.serving[role], self.cells.count[role]
        if self.phased or self.ahead or not self.unfinished:
            cells = max(1, serving)
            share = queue.tokens / cells
        else:  # Others get what comes: no group is cut for them.
            cells, share = 1, (queue.tokens + self.coming) / (2 * max(1, count))
        for cell in self.cells.free_for(role, self._has_work):
            # One that is alone takes all at once: there is nobody to share with, and nothing else to begin sooner.
            budget = queue.tokens if count == 1 and self.phased else self.terms.budgets[cell]
            speed = self.terms.speeds.relative.get(cell, 1.0)
            items, tokens = queue.cut(budget=budget, share=share * speed, cells=cells)
            self.pieces += 1
            piece = StageWork(number=self.pieces, cell=cell, stage=stage, items=items, tokens=tokens)
            self.running[piece.number] = piece
            self.cells.take(cell)
            works.append(piece)
            if not queue.groups:
                break
        return works

    def _tokens(self, stage: str) -> int:
        """Tokens that wait for a stage, if its turn has come: between phases stands a barrier."""
        if stage in FORWARD:
            waits = self.unfinished or (self.terms.drops and self.undecided and stage != "reward")  # itself a verdict
            return 0 if self.phased and waits else self.queues[stage].tokens
        together = self.phased or self.terms.barrier
        return 0 if together and not self._gathered else self.queues[stage].tokens

    def _has_work(self, role: str) -> bool:
        if role == "generate":
            return self.lanes.work
        return any(self._tokens(stage) for stage in self.served.get(role, ()))

    def _turn(self, cell: str) -> bool:
        return self.cells.turn(cell, self._has_work)
