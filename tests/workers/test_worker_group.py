"""Workers that only say what they were asked: deadlines, and who is asked after one has fallen silent."""

import asyncio
import threading
import time
from dataclasses import dataclass, replace

import pytest
from torch.distributed import HashStore

from stretto.errors import DeadlineError, StrettoError, TrainingError, WorkerLost
from stretto.placement.build import plan_of
from stretto.recipe.schema import Placement
from stretto.threads import beside, left_behind, run
from stretto.types import Receipt
from stretto.workers import checkpoints
from stretto.workers import deadlines as patience
from stretto.workers import worker_group as worker_groups
from stretto.workers.deadlines import CallDeadlines, opened
from stretto.workers.launchers.inprocess import ThreadLauncher, ThreadWorker
from stretto.workers.model_updates import ModelUpdates
from stretto.workers.process_group import ProcessGroup, reach
from stretto.workers.shared_folder import SavedFiles
from stretto.workers.stacks import ProcessStacks
from stretto.workers.worker_group import WorkerGroup
from tiny import CPU

DEVICES = ("localhost/cpu:0", "localhost/cpu:1")


NOTHING = SavedFiles(fetched=[], hashes={})
"""What a worker has written that sees the driver's folder and hashes nothing."""


class Saying:
    """A worker that answers with its device, unless it hangs."""

    def __init__(self, device):
        self.device, self.hangs = device, False

    async def call(self, what, *arguments):
        if self.hangs:
            await asyncio.sleep(60)
        if what == "save":
            _, folder, *_ = arguments
            (folder / "state").mkdir()
            (folder / "state" / "from").write_text(self.device)
        said = {
            "engine_weights": Receipt(version=0, manifest={"a": "0"}, shared=False),
            "unreachable": {},
            "saved": NOTHING,
        }
        return said.get(what, self.device)

    async def close(self):
        """Nothing to end."""


class Sayings:
    """Starts them."""

    awaited = "nothing"

    async def open(self):
        """Nothing to claim."""

    async def start(self, device):
        return Saying(device)

    def store(self):
        return ("nowhere", 0)

    async def stacks(self):
        return [ProcessStacks(who="the other", answers=False, text="it does not answer; process 7 is stopped")]

    async def close(self):
        """Nothing is left."""


def crew_of(launcher, *, folder=None, **changes):
    plan = plan_of(Placement(strategy="flatten"), roles={"generate", "train"}, devices=DEVICES)
    plan = replace(plan, **changes)
    patience = CallDeadlines(start=1, generate=0.05, train=0.05, publish=0.05)
    return WorkerGroup(plan, launcher, lambda device, start_by: device, patience=patience, folder=folder)


async def saved_by(worker_group, folder):
    """The device that has written the state."""
    await worker_group.save(folder / "draft")
    return (folder / "draft" / "state" / "from").read_text()


async def started(**changes):
    worker_group = crew_of(Sayings(), **changes)
    await worker_group.start()
    return worker_group


def test_after_a_worker_fell_silent_another_one_gives_the_state_of_the_last_checkpoint(tmp_path):
    async def scenario():
        worker_group = await started()
        assert await saved_by(worker_group, tmp_path) == DEVICES[0]
        worker_group.members[DEVICES[0]].hangs = True
        with pytest.raises(DeadlineError, match=r"localhost/cpu:0 \(.*\): begin has not answered for 0\.05 s"):
            await worker_group.begin()
        assert await saved_by(worker_group, tmp_path) == DEVICES[1]

    asyncio.run(scenario())


def test_a_worker_that_was_just_started_is_not_asked_for_what_it_does_not_have_yet(tmp_path):
    async def scenario():
        worker_group = await started()
        worker_group.recovery.lost.add(DEVICES[0])
        return await saved_by(worker_group, tmp_path)

    assert asyncio.run(scenario()) == DEVICES[1]


def test_where_the_optimizer_is_shared_there_is_no_last_checkpoint_without_all_of_its_parts(tmp_path):
    async def scenario():
        worker_group = await started(optimizer="sharded")
        worker_group.silent.add(DEVICES[1])
        with pytest.raises(TrainingError, match=f"no whole optimizer is left to ask, because {DEVICES[1]} does not"):
            await worker_group.save(tmp_path)

    asyncio.run(scenario())


def test_a_deadline_says_who_does_not_answer_and_where_all_processes_stand(tmp_path):
    async def scenario():
        worker_group = await started()
        worker_group.seen.folder = tmp_path
        worker_group.members[DEVICES[1]].hangs = True
        with pytest.raises(DeadlineError) as caught:
            await worker_group.begin()
        return str(caught.value)

    text = asyncio.run(scenario())
    stacks = tmp_path / "stacks-begin-000001.txt"
    assert "the other: it does not answer; process 7 is stopped\n" in text
    assert str(stacks) in text
    written = stacks.read_text()
    assert "=== this process\n" in written
    assert "in scenario" in written, "what the tasks of this process wait for"
    assert written.endswith("=== the other\nit does not answer; process 7 is stopped\n")


def test_without_a_worker_that_answers_there_is_no_last_checkpoint_and_no_second_wait(tmp_path):
    async def scenario():
        worker_group = await started()
        for member in worker_group.members.values():
            member.hangs = True
        with pytest.raises(DeadlineError):
            await worker_group.begin()
        with pytest.raises(TrainingError, match=rf"no whole optimizer .* {', '.join(DEVICES)} does not answer"):
            await worker_group.save(tmp_path)

    asyncio.run(scenario())


def test_the_last_checkpoint_is_given_little_time(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "HURRY", 0.01)

    async def scenario():
        worker_group = await started()
        worker_group.silent.add(DEVICES[0])
        worker_group.members[DEVICES[1]].hangs = True
        with pytest.raises(DeadlineError, match=r"save has not answered for 0\.01 s"):
            await worker_group.save(tmp_path)

    asyncio.run(scenario())


def test_a_start_of_several_workers_says_what_it_waits_for_and_one_of_one_nothing():
    async def scenario(devices):
        told = []
        plan = plan_of(Placement(strategy="flatten"), roles={"generate", "train"}, devices=devices)
        late = CallDeadlines(start=1, generate=1, train=1, publish=1)
        await WorkerGroup(plan, Sayings(), lambda device, start_by: device, patience=late, note=told.append).start()
        return told

    told = asyncio.run(scenario(DEVICES))
    assert [line.partition(" s: ")[2] for line in told] == [
        "waiting for nothing",
        "waiting for 2 workers to load their models",
        "waiting until the workers have found each other",
        "comparing their weights",
    ]
    assert all(line.startswith("start, 0") for line in told)
    assert asyncio.run(scenario(DEVICES[:1])) == []


class Full(Saying):
    """A worker whose device has no room for a row."""

    async def call(self, what, *arguments):
        return False if what == "try_row" else await super().call(what, *arguments)


def test_where_a_row_fits_one_device_of_a_cell_and_not_another_memory_is_what_is_told():
    async def scenario():
        worker_group = await started()
        cell = next(name for name, role in worker_group.role.items() if role == "train")
        worker_group.devices[cell] = DEVICES
        worker_group.members[DEVICES[1]] = Full(DEVICES[1])
        assert not await worker_group.rehearsal.try_row(cell, [], 64, again=False)
        worker_group.members[DEVICES[0]].hangs = True  # for the other's part of a layer
        await worker_group.rehearsal.try_row(cell, [], 64, again=False)

    with pytest.raises(TrainingError, match=rf"^memory: a row of 64 tokens does not fit {DEVICES[1]}, for which"):
        asyncio.run(scenario())


class Failing(Saying):
    """A worker in which a row finds no memory."""

    async def call(self, what, *arguments):
        if what == "accumulate":
            raise TrainingError("too little memory")
        return await super().call(what, *arguments)


def test_where_one_device_of_a_cell_fails_the_others_are_not_waited_for_until_a_deadline(monkeypatch):
    monkeypatch.setattr(worker_groups, "GRACE", 0.02)

    async def scenario():
        worker_group = await started()
        worker_group.patience = replace(worker_group.patience, train=60)
        cell = next(name for name, role in worker_group.role.items() if role == "train")
        worker_group.devices[cell] = DEVICES
        worker_group.members[DEVICES[1]] = Failing(DEVICES[1])
        worker_group.members[DEVICES[0]].hangs = True  # until the other has its part of a layer
        with pytest.raises(TrainingError, match=r"^too little memory$"):
            await worker_group.accumulate(cell, [])
        assert len(asyncio.all_tasks()) == 1
        return worker_group.silent

    begun = time.monotonic()
    assert asyncio.run(scenario()) == {DEVICES[0]}
    assert time.monotonic() - begun < 20


class Slowly(Saying):
    """Writes until it is told that it may end, and answers everything else."""

    def __init__(self, device):
        super().__init__(device)
        self.asked, self.may_end = [], False

    async def call(self, what, *arguments):
        self.asked.append(what)
        if what == "saved" and not self.hangs:
            return NOTHING if self.may_end else None
        return await super().call(what, *arguments)


def test_a_worker_that_writes_answers_other_calls_and_an_update_waits_for_it(tmp_path):
    async def scenario():
        worker_group = await started()
        slow = worker_group.members[DEVICES[0]] = Slowly(DEVICES[0])
        saving = asyncio.ensure_future(worker_group.save(tmp_path / "draft"))
        await asyncio.sleep(0.02)
        await worker_group.begin()
        assert "begin" in slow.asked
        updating = asyncio.ensure_future(worker_group.apply())
        await asyncio.sleep(0.02)
        assert not {"loss_counters", "reduce", "apply"} & set(slow.asked), "weights would change under who writes them"
        slow.may_end = True
        await saving
        await asyncio.sleep(0.02)
        assert "loss_counters" in slow.asked
        await asyncio.gather(updating, return_exceptions=True)

    asyncio.run(scenario())


def test_an_update_that_has_not_begun_when_its_step_is_told_to_end_never_does(monkeypatch):
    async def scenario():
        worker_group = await started()
        monkeypatch.setattr(ModelUpdates, "_reduce", lambda *_: asyncio.sleep(0))
        monkeypatch.setattr(ModelUpdates, "_update", lambda *_: pytest.fail("it began"))
        assert not worker_group.updates.begun()
        with pytest.raises(asyncio.CancelledError):
            await worker_group.apply()
        assert not worker_group.applying
        worker_group.applying = True
        assert worker_group.updates.begun() and not worker_group.updates.stopped

    asyncio.run(scenario())


def test_who_falls_silent_while_it_writes_is_not_waited_for_and_another_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "LOOK", 0.01)

    async def scenario():
        worker_group = await started()
        slow = worker_group.members[DEVICES[0]] = Slowly(DEVICES[0])
        saving = asyncio.ensure_future(saved_by(worker_group, tmp_path))
        await asyncio.sleep(0.005)
        slow.hangs = True
        worker_group.silent.add(DEVICES[0])
        slow.asked.clear()
        assert await saving == DEVICES[1]
        assert not worker_group.recovery.lost, "it may come back, and what it holds is not old yet"

    asyncio.run(scenario())


def test_no_two_meetings_of_a_process_have_one_name():
    async def scenario():
        heard = []
        first, second = await started(), await started()
        for worker_group in (first, second):
            for member in worker_group.members.values():

                async def call(what, *arguments):
                    heard.append((arguments[1].name, arguments[1].rank))

                member.call = call
        await first.meet()
        await second.meet()
        return heard

    heard = asyncio.run(scenario())
    assert len(heard) == 8
    assert len(set(heard)) == 8


def test_a_run_whose_processes_do_not_reach_each_other_says_which(monkeypatch):
    async def scenario():
        worker_group = await started()
        for member in worker_group.members.values():

            async def call(what, *arguments, member=member):
                if what == "unreachable":
                    return {DEVICES[1]: "10.0.0.2 port 7: timed out"} if member.device == DEVICES[0] else {}
                return ("10.0.0.1", 7)

            member.call = call
        await worker_group.reach(DEVICES)

    with pytest.raises(StrettoError, match=f"{DEVICES[0]} -> {DEVICES[1]} at 10.0.0.2 port 7: timed out\n"):
        asyncio.run(scenario())


def test_who_answers_again_is_silent_no_longer(tmp_path):
    async def scenario():
        worker_group = await started()
        worker_group.members[DEVICES[0]].hangs = True
        with pytest.raises(DeadlineError):
            await worker_group.begin()
        worker_group.members[DEVICES[0]].hangs = False
        await worker_group.begin()
        return await saved_by(worker_group, tmp_path)

    assert asyncio.run(scenario()) == DEVICES[0]


class Meets:
    """A worker that really meets the others, unless its process has died."""

    def __init__(self, device, *, dead=False):
        self.device, self.dead, self.waits = device, dead, False

    async def call(self, what, kind, meeting):
        if self.dead:
            raise WorkerLost(self.device, "its process has died")
        self.waits = True
        try:
            # Kept: one that is gone at once would disturb those that still connect.
            self.group = await asyncio.to_thread(ProcessGroup, meeting, CPU)
        finally:
            self.waits = False


class OneStore(Sayings):
    """Workers meet in this process."""

    def __init__(self):
        self.meeting = HashStore()

    def store(self):
        return self.meeting


@pytest.mark.parametrize("dead", range(3))
def test_who_waits_for_one_that_died_is_called_off(dead):
    async def scenario():
        devices = (*DEVICES, "localhost/cpu:2")
        plan = plan_of(Placement(strategy="flatten"), roles={"generate", "train"}, devices=devices)
        patience = CallDeadlines(start=20, generate=20, train=20, publish=20)
        worker_group = WorkerGroup(plan, OneStore(), lambda device, start_by: device, patience=patience)
        worker_group.members = {device: Meets(device, dead=index == dead) for index, device in enumerate(devices)}
        with pytest.raises(WorkerLost, match=f"{devices[dead]}: its process has died"):
            await worker_group.meet()
        assert not any(member.waits for member in worker_group.members.values())
        worker_group.members[devices[dead]].dead = False
        await worker_group.meet()
        return worker_group.silent

    begun = time.monotonic()
    assert asyncio.run(scenario()) == set()
    assert time.monotonic() - begun < 10


class HangsWithoutTheOthers(Meets):
    """A worker whose calls end only when they are called off, as those of NCCL: it does not notice who has died."""

    async def call(self, what, *arguments):
        if what == "meet":
            if arguments[0] == "train":
                self.store = await asyncio.to_thread(reach, arguments[1])
        elif what == "reduce":
            if self.dead:
                raise WorkerLost(self.device, "its process has died")
            while self.store.get("decided") == b"all have come":
                await asyncio.sleep(0.01)
            raise TrainingError("called off")
        return {}


def test_who_adds_up_with_one_that_died_is_called_off():
    async def scenario():
        plan = plan_of(Placement(strategy="elastic"), roles={"generate", "train"}, devices=DEVICES)
        patience = CallDeadlines(start=20, generate=20, train=20, publish=20)
        worker_group = WorkerGroup(plan, OneStore(), lambda device, start_by: device, patience=patience)
        worker_group.members = {device: HangsWithoutTheOthers(device, dead=device == DEVICES[1]) for device in DEVICES}
        await worker_group.meet()
        for meeting in worker_group.meetings["train"]:
            reach(meeting).set("decided", "all have come")
        with pytest.raises(WorkerLost, match=f"{DEVICES[1]}: its process has died"):
            await worker_group.apply()

    begun = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - begun < 10


class Stuck(Sayings):
    """A launcher that blocks in a thread when it is opened, or when it is closed."""

    def __init__(self, at, how):
        self.at, self.how, self.over, self.closed = at, how, threading.Event(), False

    async def _block(self, at):
        if at == self.at:
            await self.how(self.over.wait)

    async def open(self):
        await self._block("open")

    async def close(self):
        self.closed = True
        await self._block("close")


@pytest.mark.parametrize("how", [beside, asyncio.to_thread])
@pytest.mark.parametrize("at", ["open", "close"])
def test_a_launcher_that_blocks_in_a_thread_is_left_behind(at, how, monkeypatch, tmp_path):
    monkeypatch.setattr(patience, "SAYS_SO", 0.01)
    monkeypatch.setattr(worker_groups, "CLOSING", 0.01)
    launcher = Stuck(at, how)

    async def scenario():
        worker_group = crew_of(launcher, folder=tmp_path)
        try:
            await opened(launcher.open(), 0.01, worker_group)
        finally:
            await worker_group.close()

    if at == "open":
        with pytest.raises(
            DeadlineError, match=r"start: the devices were not there after 0 s, since (.|\n)*stacks-start"
        ):
            run(scenario())
        assert "threads.py" in (tmp_path / "stacks-start-000001.txt").read_text()
    else:
        run(scenario())
    assert launcher.closed
    launcher.over.set()


class Deaf(Sayings):
    """A launcher that knows itself why nobody comes, at once or when time is up."""

    def __init__(self, after):
        self.after = after

    async def open(self):
        await asyncio.sleep(self.after)
        raise DeadlineError("start: nobody answers")


@pytest.mark.parametrize(("by", "hangs"), [(60.0, False), (0.0, True)])
def test_stacks_are_only_kept_of_what_hangs(by, hangs, tmp_path):
    async def scenario():
        await crew_of(Deaf(0.02), folder=tmp_path).start(by=time.monotonic() + by)

    with pytest.raises(DeadlineError, match=r"^start: nobody answers") as caught:
        run(scenario())
    assert ("where every process stands" in str(caught.value)) is hangs
    assert len(list(tmp_path.iterdir())) == hangs


def test_a_worker_that_blocks_in_its_thread_is_left_behind_when_its_crew_is_closed(monkeypatch):
    monkeypatch.setattr(worker_groups, "CLOSING_LATE", 0.01)
    over = threading.Event()

    class Blocks:
        def __init__(self, device):
            self.device = device

        def begin(self, model):
            over.wait()

        def close(self):
            """Never reached."""

    async def scenario():
        worker_group = await started()
        worker_group.members = {device: ThreadWorker(Assigned(device), Blocks) for device in DEVICES}
        with pytest.raises(DeadlineError, match=r"begin has not answered for 0\.05 s"):
            await worker_group.begin()
        await worker_group.close()

    run(scenario())
    assert [name for name in left_behind() if name.startswith("localhost/")] != []
    over.set()


@dataclass
class Assigned:
    """As much of an assignment as a thread needs."""

    device: str
    torch_device = CPU


def test_a_worker_that_nobody_waits_for_any_more_is_closed_when_it_is_made():
    """What it has started elsewhere, such as an engine's process, would go on otherwise."""
    made, closed = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, assignment):
            made.wait(20)

        def close(self):
            closed.set()

    async def scenario():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ThreadLauncher(Slow).start(Assigned(DEVICES[0])), 0.05)

    asyncio.run(scenario())
    assert not closed.is_set()
    made.set()
    assert closed.wait(20)
