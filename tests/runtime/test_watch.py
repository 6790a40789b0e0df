"""A stage that overruns is interrupted with a message that helps, and a process that cannot be interrupted ends."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from stretto.errors import DeadlineError
from stretto.recipe.schema import Deadlines, Recipe, VllmEngineSection
from stretto.runtime.host_watch import HostWatch
from stretto.runtime.interrupt import unbroken
from stretto.runtime.user_functions import Callbacks
from stretto.runtime.watch import PATIENCE, SIGNAL, LoopWatch, StageLimit, StageWatch, limits

STUBBORN = """
import sys, time
from pathlib import Path
from stretto.runtime.watch import StageLimit, StageWatch
watch = StageWatch(
    limits={"train": StageLimit(seconds=0.05, key="deadlines.train")},
    folder=Path(sys.argv[1]),
    last_words=lambda: Path(sys.argv[1], "said").touch(),
    patience=0.5,
)
with watch.stage("train", 7, "the last to finish was reward"):
    while True:
        try:
            time.sleep(60)
        except Exception:
            print("interrupted", flush=True)
"""


def watch(folder, seconds):
    return StageWatch(limits={"train": StageLimit(seconds=seconds, key="deadlines.train")}, folder=folder)


def overrun():
    time.sleep(60)


def test_a_stage_that_overruns_is_interrupted_and_says_what_since_when_and_what_was_last(tmp_path):
    with pytest.raises(DeadlineError) as caught, watch(tmp_path, 0.05).stage("train", 7, "reward was last"):
        overrun()
    stacks = tmp_path / "stacks-train-000007.txt"
    text = str(caught.value)
    assert text.startswith("train: step 7 is not finished after 0.05 s, since ")
    assert "; reward was last; " in text
    assert str(stacks) in text
    assert text.endswith("or raise deadlines.train")
    assert caught.value.exit_code == 3
    assert "in overrun" in stacks.read_text()
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL


def test_a_deadline_may_pass_before_the_stage_has_begun(tmp_path):
    for _ in range(30):
        with pytest.raises(DeadlineError), watch(tmp_path, 1e-9).stage("train", 1, ""):
            overrun()
        assert signal.getsignal(SIGNAL) is signal.SIG_DFL
    for thread in threading.enumerate():
        if thread.name == "watch-train":
            thread.join(PATIENCE / 2)
            assert not thread.is_alive(), "it would end the process"


def test_a_stage_goes_on_while_the_processes_that_judge_do(tmp_path):
    moves = []

    def moved():
        moves.append(time.monotonic())
        return moves[-1] if len(moves) < 4 else moves[0] - 1.0

    judging = StageWatch(
        limits={"reward": StageLimit(seconds=0.05, key="deadlines.reward")}, folder=tmp_path, moved=moved
    )
    with pytest.raises(DeadlineError), judging.stage("reward", 1, ""):
        overrun()
    assert len(moves) == 4
    with judging.stage("reward", 2, ""):
        pass


def test_an_interruption_that_is_lost_comes_again(tmp_path):
    swallowed = []
    brief = StageWatch(limits={"train": StageLimit(seconds=0.02, key="k")}, folder=tmp_path, patience=5.0)
    with pytest.raises(DeadlineError), brief.stage("train", 1, ""):
        try:
            overrun()
        except DeadlineError as error:
            swallowed.append(error)
        overrun()
    assert len(swallowed) == 1


def test_a_stage_that_ends_at_its_deadline_disturbs_no_later_one(tmp_path):
    """Whether the first one is interrupted is a matter of chance; the second one has all the time it needs."""
    both = {"train": StageLimit(seconds=0.001, key="k"), "publish": StageLimit(seconds=60.0, key="k")}
    for _ in range(100):
        with suppress(DeadlineError), StageWatch(limits=both, folder=tmp_path).stage("train", 1, ""):
            time.sleep(0.0009)
        with StageWatch(limits=both, folder=tmp_path).stage("publish", 1, ""):
            sum(range(10_000))


def test_a_stage_that_computes_is_interrupted_too(tmp_path):
    with pytest.raises(DeadlineError), watch(tmp_path, 0.05).stage("train", 1, ""):
        while True:
            sum(range(100))


def test_a_stage_in_time_leaves_nothing_and_its_own_errors_pass(tmp_path):
    before = {*threading.enumerate()}  # a test that ended a run may have left its own
    with watch(tmp_path, 60.0).stage("train", 1, ""):
        assert [thread.name for thread in {*threading.enumerate()} - before] == ["watch-train"]
    with pytest.raises(KeyError), watch(tmp_path, 60.0).stage("train", 1, ""):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL


def test_a_signal_that_comes_too_late_harms_nobody(tmp_path):
    with watch(tmp_path, 60.0).stage("train", 1, ""):
        pass
    signal.raise_signal(SIGNAL)


def test_what_has_no_limit_or_runs_elsewhere_is_not_watched(tmp_path):
    with watch(tmp_path, 1e-9).stage("checkpoint", 1, ""):
        time.sleep(0.02)
    seen = []

    def elsewhere():
        with watch(tmp_path, 1e-9).stage("train", 1, ""):
            time.sleep(0.02)
            seen.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_cannot_be_interrupted_ends_with_the_same_message_and_3(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert set(done.stdout.splitlines()) == {"interrupted"}
    assert done.stderr.startswith("train: step 7 is not finished after 0.05 s")
    assert "\x1b" not in done.stderr, "it is not a terminal"
    assert (tmp_path / "said").exists()
    assert "File" in (tmp_path / "stacks-train-000007.txt").read_text()


def spin():
    while True:
        pass


async def spins():
    spin()


async def spins_once():
    try:
        spin()
    except DeadlineError:
        await asyncio.sleep(0)
    spin()


def in_loop(folder, *coroutines, notes=None, **loop):
    """Runs coroutines as tasks of a watched loop."""

    async def run():
        with HostWatch() as host:
            notes_of = [] if notes is None else notes
            beat = LoopWatch(turned=lambda: host.turned, note=notes_of.append, **{"quiet": 0.2, "grace": 0.1} | loop)
            limits = {"step": StageLimit(seconds=60.0, key="k")}
            with StageWatch(limits=limits, folder=folder, loop=beat).stage("step", 3, ""):
                await asyncio.gather(*coroutines)

    asyncio.run(run())


@pytest.mark.parametrize("environments", [(spins,), (spins,) * 20, (spins_once,)])
def test_environments_that_block_the_loop_are_named_and_interrupted(tmp_path, environments):
    notes = []
    with pytest.raises(DeadlineError) as caught:
        in_loop(tmp_path, *(each() for each in environments), notes=notes, deadline=0.3)
    assert len(notes) == 1 and notes[0].startswith(f"{__file__}, line ") and "in spin has blocked the run" in notes[0]
    assert str(caught.value).startswith(f"step: {__file__}, line ") and "in spin has blocked step 3" in str(
        caught.value
    )
    assert "past environment.deadline (0.3 s)" in str(caught.value) and "environment.hosts=2" in str(caught.value)
    assert "in spin" in (tmp_path / "stacks-step-000003.txt").read_text()


def test_an_environment_that_blocks_the_loop_ends_when_the_run_is_asked_to(tmp_path):
    with pytest.raises(DeadlineError, match="in spin has blocked step 3"):
        in_loop(tmp_path, spins(), deadline=3600.0, asked=lambda: True)


def test_code_that_is_no_environment_is_named_and_not_interrupted(tmp_path):
    notes = []

    async def run():
        await unbroken(slow())

    async def slow():
        return None

    def callback():
        time.sleep(0.6)

    async def called():
        Callbacks([lambda event: callback()], strict=False, note=notes.append)(None)

    in_loop(tmp_path, called(), run(), notes=notes, deadline=0.0)
    assert len(notes) == 1 and "in callback has blocked the run" in notes[0]


def test_an_environment_that_blocks_for_less_than_its_deadline_goes_on(tmp_path):
    async def slow():
        time.sleep(0.6)

    notes = []
    in_loop(tmp_path, slow(), notes=notes, deadline=60.0)
    assert len(notes) == 1 and "in slow has blocked the run" in notes[0]


def test_rounds_that_an_algorithm_never_makes_do_not_lengthen_a_step():
    def seconds(**more):
        return limits(Recipe.model_validate({"algorithm": {"name": more.pop("name")}, "batch": more}))["step"].seconds

    assert seconds(name="grpo", max_rounds=9) == seconds(name="grpo", max_rounds=1)
    assert seconds(name="dapo", max_rounds=9) > 3 * seconds(name="dapo", max_rounds=1)


def test_the_limits_of_this_process_are_longer_than_the_deadlines_inside_them():
    given, found = Deadlines(), limits(Recipe())
    assert found["start"].seconds > given.start
    assert found["evaluate"].seconds > given.generate + given.reward
    assert found["step"].seconds > given.generate + given.reward + 2 * given.train + given.publish
    assert {limit.key for limit in found.values()} <= {f"deadlines.{name}" for name in Deadlines.model_fields}
    apart = limits(Recipe(engine=VllmEngineSection()))
    assert apart["evaluate"].seconds >= found["evaluate"].seconds + given.start, "in which an engine may come back"
    assert apart["step"].seconds >= found["step"].seconds + 3 * given.start
