"""A cell of several devices that generates, as its caller sees it: who is asked, who answers, whose failure it is."""

import asyncio

import pytest
from torch.distributed import HashStore

from stretto.errors import DeadlineError, EngineError, LostTouchError, WorkerLost
from stretto.placement.build import plan_of
from stretto.recipe.schema import Placement
from stretto.types import Receipt
from stretto.workers.deadlines import CallDeadlines
from stretto.workers.worker_group import WorkerGroup

DEVICES = tuple(f"localhost/cpu:{index}" for index in range(4))
CELLS = (
    {"role": "generate", "devices": DEVICES[:2], "mesh": {"tp": 2}},
    {"role": "generate", "devices": DEVICES[2:3]},
    {"role": "train", "devices": DEVICES[3:]},
)
LOST = LostTouchError("lane-1: member 0 of 2 lost touch with another")
"""What those say that wait for one in which something has failed."""


class Answering:
    """A worker that notes what it is asked and answers with its device; `fails` is what becomes of its rounds."""

    def __init__(self, device):
        self.device, self.heard, self.fails, self.hangs = device, [], None, False
        self.key, self.stop = 0, "stop"  # as a completion of its own

    async def call(self, what, *arguments):
        self.heard.append((what, *arguments))
        if what == "generate" and self.hangs:
            await asyncio.sleep(60)
        if what == "generate" and self.fails is not None:
            raise self.fails
        return Receipt(version=0, manifest={"a": "0"}, shared=False) if what == "engine_weights" else [self]


class Answers:
    """Starts them, in this process."""

    awaited = "nothing"

    def __init__(self):
        self.meeting = HashStore()

    async def open(self):
        """Nothing to claim."""

    async def start(self, device):
        return Answering(device)

    def store(self):
        return self.meeting

    async def stacks(self):
        return []

    async def close(self):
        """Nothing is left."""


async def started(engine="native"):
    section = Placement(strategy="elastic", cells=CELLS)
    plan = plan_of(section, roles={"generate", "train"}, devices=DEVICES, engine=engine)
    patience = CallDeadlines(start=1, generate=0.1, train=1, publish=1)
    worker_group = WorkerGroup(plan, Answers(), lambda device, start_by: device, patience=patience)
    await worker_group.start()
    return worker_group


def test_all_devices_of_a_cell_hear_the_same_and_its_first_one_answers():
    async def scenario():
        worker_group = await started()
        asked = [worker_group.lanes[cell].generate([], [index], 0.25) for index, cell in enumerate(worker_group.lanes)]
        answers = await asyncio.gather(*asked)
        assert [[who.device for who in answer] for answer in answers] == [[DEVICES[0]], [DEVICES[2]]]
        return [member.heard for member in worker_group.members.values()]

    heard = asyncio.run(scenario())
    rounds = [[call for call in calls if call[0] == "generate"] for calls in heard]
    assert rounds == [[("generate", [], [0], 0.25)], [("generate", [], [0], 0.25)], [("generate", [], [1], 0.25)], []]
    meetings = [[call[2] for call in calls if call[:2] == ("meet", "lane generate-0")] for calls in heard]
    assert [[(each.rank, each.size) for each in found] for found in meetings] == [[(0, 2)], [(1, 2)], [], []]
    assert meetings[0][0].seconds == pytest.approx(0.09), "who waits says so before the deadline passes"


def test_an_engine_of_its_own_process_reaches_the_devices_of_its_cell_by_itself():
    async def scenario():
        worker_group = await started("vllm")
        ((who,),) = [await worker_group.lanes["generate-0"].generate([], [], 0.25)]
        return who.device, [{call[0] for call in member.heard} for member in worker_group.members.values()]

    first, heard = asyncio.run(scenario())
    assert first == DEVICES[0] and "generate" in heard[0] and "generate" not in heard[1]


@pytest.mark.parametrize(
    ("first", "second", "raised", "told"),
    [
        (LOST, WorkerLost(DEVICES[1], "it died"), WorkerLost, DEVICES[1]),
        (EngineError("no memory"), WorkerLost(DEVICES[1], "it died"), WorkerLost, DEVICES[1]),
        (LOST, None, DeadlineError, rf"^{DEVICES[1]} \(generate-0\): generate has not answered(?!.*lost touch)"),
        (EngineError("no memory"), None, DeadlineError, "(?s)has not answered.*another has failed: no memory$"),
        (EngineError("no memory"), LOST, EngineError, "no memory"),
        (LOST, EngineError("no memory"), EngineError, "^no memory$"),
        (LOST, LOST, EngineError, "lost touch"),
    ],
    ids=["died", "died of it", "hangs", "hangs because of it", "failed", "failed second", "nobody knows"],
)
def test_a_failure_is_told_of_the_device_that_it_comes_from(first, second, raised, told):
    async def scenario():
        worker_group = await started()
        one, other = (worker_group.members[device] for device in DEVICES[:2])
        one.fails, other.fails, other.hangs = first, second, second is None
        await worker_group.lanes["generate-0"].generate([], [], 0.0)

    with pytest.raises(raised, match=told):
        asyncio.run(scenario())


def test_the_devices_of_a_cell_meet_anew_once_one_of_them_is_back():
    async def scenario():
        worker_group = await started()
        before = {device: len(member.heard) for device, member in worker_group.members.items()}
        await worker_group.lane_calls.meet({DEVICES[1], DEVICES[3]})
        await worker_group.lane_calls.meet({DEVICES[2]})
        return [[c[0] for c in member.heard[before[device] :]] for device, member in worker_group.members.items()]

    assert asyncio.run(scenario()) == [["meet"], ["meet"], [], []]


@pytest.mark.parametrize("other", [DEVICES[0], DEVICES[3]], ids=["of the cell", "elsewhere"])
def test_a_cell_has_met_when_all_of_its_devices_are_back_whoever_else_is_missing(other):
    async def scenario():
        worker_group = await started()
        recovery = worker_group.recovery
        recovery._restart = lambda device: asyncio.sleep(0)  # the rest of a worker is not asked here
        recovery.lost = {DEVICES[1], other}
        met = []
        for device in (DEVICES[1], other):
            await recovery.restart_worker(device)
            heard = [member.heard for member in worker_group.members.values()]
            met.append([sum(call[:2] == ("meet", "lane generate-0") for call in calls) for calls in heard])
        return met

    once, twice = [1, 1, 0, 0], [2, 2, 0, 0]
    assert asyncio.run(scenario()) == ([once, twice] if other == DEVICES[0] else [twice, twice])


def test_an_answer_that_does_not_come_is_told_of_the_cell_with_its_devices():
    async def scenario():
        return (await started()).called("generate-0")

    assert asyncio.run(scenario()) == f"generate-0 ({DEVICES[0]}, {DEVICES[1]})"
