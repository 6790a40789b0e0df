"""The driver of real steps, with hands that only wait: what it decides can be decided again from its notes."""

import asyncio
import itertools

import pytest

from simulated import launches_of, plan_of, terms_of
from stretto.errors import TrainingError, WorkerLost
from stretto.placement.build import plan_of as placed
from stretto.recipe.schema import Placement
from stretto.scheduler.asyncio_driver import Driver, replay
from stretto.scheduler.state import StepState


class Waiting:
    """Everything takes some turns of the event loop; nothing is computed."""

    def __init__(self, lengths, *, dropped=(), extra=(), dies=None, fails=None):
        self.lengths, self.dropped, self.extra = lengths, dropped, iter(extra)
        self.dies, self.fails = dies, fails
        self.dead = set()
        self.applied, self.trained, self.moves, self.revived = None, [], [], []
        self.scored, self.parts, self.made = [], (), []

    async def turns(self, count):
        for _ in range(count):
            await asyncio.sleep(0)

    async def generate(self, item, cell):
        await self.turns(self.lengths[item[0]][item[1]])
        device = f"host/gpu:{cell.rpartition('-')[2]}"
        if self.dies in (cell, device):
            self.dead.add(self.dies)
            self.dies = None
        if self.dead & {cell, device}:
            raise WorkerLost(*self.dead, "its process ended")
        return self.lengths[item[0]][item[1]]

    def move(self, move):
        self.moves.append(move)

    async def judge(self, item):
        await self.turns(1)

    async def verdict(self, index):
        await self.turns(1)
        return () if index in self.dropped else tuple(range(len(self.lengths[index])))

    async def piece(self, piece):
        await self.turns(piece.tokens // 4 + 1)
        if self.fails == piece.stage:
            raise TrainingError("the device has no memory left")
        if self.dies == piece.cell:
            self.dies = None
            raise WorkerLost(piece.cell, "its process ended")
        if piece.stage == "train":
            self.trained += [(item, piece.cell) for item in piece.items]
        else:
            assert not self.made, "the policy is no longer the one that sampled"
            self.scored += piece.items

    async def divide(self, groups):
        items = [(index, attempt) for index in groups for attempt in range(len(self.lengths[index]))]
        self.parts = [items[0::3], items[1::3], items[2::3]]
        return self.parts

    async def apply(self, groups, *, last):
        await self.turns(2)
        self.made.append(sorted(item for item, _ in self.trained))
        self.applied = groups if last else None
        if not last:
            self.trained = []

    def more(self, missing):
        return list(itertools.islice(self.extra, missing))

    async def restart_worker(self, cell):
        await self.turns(3)
        self.dead.clear()
        self.revived.append(cell)
        self.trained = [(item, where) for item, where in self.trained if where != cell]


def clock():
    """Seconds that only grow."""
    return itertools.count().__next__


def drive(hands, plan, *, launches=None, **terms):
    step = StepState(plan, terms_of(plan, terms.pop("groups", len(hands.lengths)), **terms))
    notes = asyncio.run(
        Driver(step, hands, now=clock()).run(launches_of(hands.lengths)[: launches or len(hands.lengths)])
    )
    return step, notes


LENGTHS = [[3, 9, 4], [30, 2, 2], [5, 5, 5], [8, 1, 1]]


@pytest.mark.parametrize("strategy", ["flatten", "separate", "elastic"])
def test_a_step_runs_to_its_update(strategy):
    hands = Waiting(LENGTHS)
    drive(hands, plan_of(strategy, 2))
    assert hands.applied == (0, 1, 2, 3)
    assert sorted(item for item, _ in hands.trained) == [(g, a) for g in range(4) for a in range(3)]


@pytest.mark.parametrize("strategy", ["flatten", "separate", "elastic"])
def test_a_fresh_step_that_is_told_the_same_decides_the_same(strategy):
    plan = plan_of(strategy, 2, stages=("reference", "train"))
    step, notes = drive(
        Waiting(LENGTHS, dropped={1}), plan, stages=("reference", "train"), groups=3, drops=True, slots=2
    )
    assert replay(StepState(plan, step.terms), notes) == [works for _, _, works in notes.offers]
    assert sum(len(works) for _, _, works in notes.offers) > 10


def test_groups_that_were_dropped_are_made_up_for_until_there_are_no_more():
    extra = launches_of([[2, 2, 2], [4, 4, 4]])
    hands = Waiting([*LENGTHS, [2, 2, 2], [4, 4, 4]], dropped={1, 4}, extra=extra)
    drive(hands, plan_of("elastic", 2), launches=4, groups=4, drops=True)
    assert hands.applied == (0, 2, 3, 5)


@pytest.mark.parametrize("cell", ["train-0", "train-1", "generate-0", "generate-1", "host/gpu:0", "host/gpu:1"])
def test_a_cell_that_dies_comes_back_and_its_work_is_done_again(cell):
    hands = Waiting(LENGTHS, dies=cell)
    drive(hands, plan_of("elastic", 2, stages=("reference", "train")), stages=("reference", "train"))
    assert hands.revived == [cell]
    assert sorted(item for item, _ in hands.trained) == [(g, a) for g in range(4) for a in range(3)]


def test_a_device_without_cells_in_the_step_is_not_brought_back_in_it():
    class Elsewhere(Waiting):
        """While a device is brought back, one of another plan is found dead."""

        found = False

        async def restart_worker(self, device):
            if not self.found:
                self.found = True
                raise WorkerLost("host/gpu:7", "its process ended")
            await super().restart_worker(device)

    hands = Elsewhere(LENGTHS, dies="host/gpu:0")
    drive(hands, plan_of("elastic", 2))
    assert hands.revived == ["host/gpu:0"]


@pytest.mark.parametrize("other", ["host/gpu:0", "host/gpu:1"])
def test_another_that_dies_while_one_is_brought_back_comes_back_too(other):
    class Together(Waiting):
        """While a device is brought back, another one is found dead."""

        alive = True

        async def restart_worker(self, device):
            if self.alive:
                self.alive = False
                self.dead = {other}
                raise WorkerLost(other, "its process ended")
            await super().restart_worker(device)

    hands = Together(LENGTHS, dies="host/gpu:0")
    plan = plan_of("elastic", 2)
    if other == "host/gpu:0":
        with pytest.raises(TrainingError, match="host/gpu:0: its process died again"):
            drive(hands, plan)
        return
    drive(hands, plan)
    assert sorted(hands.revived) == ["host/gpu:0", "host/gpu:1"]
    assert sorted(item for item, _ in hands.trained) == [(g, a) for g in range(4) for a in range(3)]


@pytest.mark.parametrize("trains", [(0, 1), (2,)], ids=["where it generates", "elsewhere"])
def test_two_devices_of_a_cell_that_die_at_once_both_come_back_before_it_serves_again(trains):
    class Both(Waiting):
        """The second death is found while the first device is brought back."""

        killed, found = frozenset({"host/gpu:0", "host/gpu:1"}), False

        async def generate(self, item, cell):
            await self.turns(2)
            if self.killed:
                raise WorkerLost(min(self.killed), "its process ended")
            return self.lengths[item[0]][item[1]]

        async def restart_worker(self, device):
            await self.turns(3)
            if not self.found:
                self.found = True
                raise WorkerLost("host/gpu:1", "its process ended")
            self.killed -= {device}
            self.revived.append(device)

    devices = [f"host/gpu:{index}" for index in range(3)]
    cells = [{"role": "generate", "devices": tuple(devices[:2]), "mesh": {"tp": 2}}]
    cells += [{"role": "train", "devices": (devices[index],)} for index in trains]
    section = Placement(strategy="elastic", cells=tuple(cells))
    plan = placed(section, roles={"generate", "train"}, devices=devices)
    hands = Both(LENGTHS)
    step, notes = drive(hands, plan)
    assert sorted(hands.revived) == devices[:2]
    assert sorted(item for item, _ in hands.trained) == [(g, a) for g in range(4) for a in range(3)]
    assert [event.arguments for event in notes.told if event.what == "back"].count((plan.cells[0].name,)) == 1
    assert replay(StepState(plan, step.terms), notes) == [works for _, _, works in notes.offers]


def test_a_failure_ends_the_step_and_leaves_nothing_running():
    async def fail():
        plan = plan_of("elastic", 2)
        hands = Waiting(LENGTHS, fails="train")
        with pytest.raises(TrainingError, match="no memory"):
            await Driver(StepState(plan, terms_of(plan, 4)), hands, now=clock()).run(launches_of(LENGTHS))
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(fail())


STAGES = ("reference", "old", "train")


@pytest.mark.parametrize("strategy", ["flatten", "separate", "elastic"])
@pytest.mark.parametrize("dies", [None, "train-0", "train-1", "host/gpu:0", "host/gpu:1"])
def test_every_update_is_made_of_its_own_trajectories_and_of_nothing_else(strategy, dies):
    cells = 3 if strategy == "separate" else 2
    plan = plan_of(strategy, cells, stages=("reference", "train"))
    names = {cell.name for cell in plan.cells} | {device for cell in plan.cells for device in cell.devices}
    hands = Waiting(LENGTHS, dropped={2}, dies=dies if dies in names else None)
    step, notes = drive(hands, plan, stages=STAGES, groups=3, drops=True, divides=True)
    assert hands.made == [sorted(part) for part in hands.parts]
    assert hands.applied == (0, 1, 3)
    assert set(hands.scored) == {item for part in hands.parts for item in part}
    assert replay(StepState(plan, step.terms), notes) == [works for _, _, works in notes.offers]


@pytest.mark.parametrize("update", [1, 2, 3])
def test_a_cell_that_dies_in_an_update_does_only_that_one_again(update):
    class Late(Waiting):
        """A cell dies in its first piece of an update."""

        alive = True

        async def piece(self, piece):
            if piece.stage == "train" and len(self.made) == update - 1 and self.alive:
                self.alive, self.dies = False, piece.cell
            await super().piece(piece)

    hands = Late(LENGTHS)
    plan = plan_of("elastic", 2, stages=("reference", "train"))
    drive(hands, plan, stages=STAGES, divides=True)
    assert len(hands.revived) == 1
    assert hands.made == [sorted(part) for part in hands.parts]


def test_a_step_in_which_nothing_is_left_to_train_on_makes_its_one_update():
    hands = Waiting(LENGTHS, dropped={0, 1, 2, 3})
    hands.divide = lambda groups: asyncio.sleep(0, [[]])
    drive(hands, plan_of("elastic", 2), stages=("old", "train"), drops=True, divides=True)
    assert (hands.made, hands.applied) == ([[]], ())
