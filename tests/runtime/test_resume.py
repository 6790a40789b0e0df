"""A run that stops after any step, in whatever way, and goes on is, to the bit, the run that never stopped."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from running import assert_same_checkpoint, assert_same_run, lines, metrics, recipe_in, resume, samples, start
from stretto.engines.native.engine import NativeEngine
from stretto.errors import CheckpointError, RecipeError, StateLostError
from stretto.recipe.load import load_recipe
from stretto.runtime import loop
from stretto.runtime.runtime import Runtime
from stretto.storage.checkpoint import metrics_of
from tiers import slow_but

STEPS = 8
KINDS = {
    "full": {"algorithm__name": "grpo", "optimizer__weight_decay": 0.1},
    "lora": {
        "model__adapter": {"kind": "lora", "rank": 2, "alpha": 4.0},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1, "where": "reward"}},
        "optimizer__lr": 0.05,
    },
    "two updates": {
        "algorithm": {"name": "rloo", "kl": {"coef": 0.1}},
        "batch__updates": 2,
        "batch__token_budget": 40,
        "optimizer__schedule": "cosine",
        "optimizer__warmup": 3,
        "evaluate__pass_k": 2,
        "evaluate__every": 3,
    },
}
FEWER = {"changes": ["checkpoint.every=100"], "allow": ["checkpoint"]}
"""A resume that saves no time but writes fewer checkpoints, so that the tests save some."""


@pytest.fixture(scope="module", params=list(KINDS))
def whole(request, tmp_path_factory):
    """The folder of a run that was never interrupted."""
    return start(tmp_path_factory.mktemp("whole"), run__steps=STEPS, **KINDS[request.param]).folder


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a run of four steps that was never interrupted."""
    return start(tmp_path_factory.mktemp("short"), run__steps=4).folder


def stopped(whole, folder, *, after):
    """A copy of a run as a kill leaves it: everything is there but the checkpoints after a step.

    Before its first checkpoint it was killed in its first step, or its metrics would tell of more.
    """
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name[5:]) > after:
            shutil.rmtree(path)
    if after < 1:
        for name in ("metrics.jsonl", "events.jsonl"):
            begun = [line for line in (folder / name).read_text().splitlines(keepends=True) if '"step": 0' in line]
            (folder / name).write_text("".join(begun))
    return folder


def test_the_runs_learn_something_so_that_equality_means_something(whole):
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert sum(row["grad_norm"] > 0 for row in rows[1:]) >= STEPS - 3
    assert sum(name.startswith("step-") for name in samples(whole)) == STEPS


@pytest.mark.parametrize("after", slow_but(0, 2, of=range(STEPS + 1)))
def test_stopping_after_any_step_and_resuming_is_the_same_run(whole, tmp_path, after):
    run = stopped(whole, tmp_path / "run", after=after)
    resume(run, **FEWER)
    assert_same_run(run, whole, step=STEPS)


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize(
    "place", slow_but(("evaluated", 2), ("step", 4), of=[("evaluated", 0), ("step", 1), ("evaluated", 2), ("step", 4)])
)
def test_a_run_that_died_within_a_step_is_the_same_run_after_a_resume(short, tmp_path, place):
    def die(name, *told):
        if (name, told[0]) == place:
            raise Killed

    with pytest.raises(Killed):
        start(tmp_path, at=die, run__steps=4)
    (run,) = tmp_path.glob("run*")
    resume(run)
    assert_same_run(run, short, step=4)


def test_a_run_can_stop_many_times(short, tmp_path):
    def die(name, *told):
        if name == "step":
            raise Killed

    with pytest.raises(Killed):
        start(tmp_path, at=die, run__steps=4, checkpoint__every=1)
    (run,) = tmp_path.glob("run*")
    for _ in range(2):
        with pytest.raises(Killed):
            resume(run, at=die)
        assert not (run / "checkpoints").exists(), "it never reached a checkpoint, so it begins anew each time"
    resume(run)
    assert_same_run(run, short, step=4)


def interrupting(at):
    """Presses Ctrl-C once, when the run says `at`."""
    pressed = []

    def told(name, *values):
        if (name, *values[:1]) == at and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    return told


class Interrupted(NativeEngine):
    """Presses Ctrl-C in the middle of its n-th step."""

    left = 0

    def step(self, budget_seconds):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)  # the engine's thread is not the one that is told
        return super().step(budget_seconds)


@pytest.mark.parametrize(
    "at",
    slow_but(
        ("start", 4),
        ("step", 3),
        of=[("start", 4), ("evaluated", 0), ("step", 1), ("step", 2), ("evaluated", 2), ("step", 3)],
    ),
)
def test_an_interrupted_run_writes_a_checkpoint_and_goes_on_as_the_same_run(short, tmp_path, at):
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, at=interrupting(at), run__steps=4, checkpoint__every=100)
    (run,) = tmp_path.glob("run*")
    done = [path.name for path in (run / "checkpoints").iterdir()]
    assert done == [f"step-{0 if at[0] == 'start' else at[1]:06d}"]
    resume(run)
    assert_same_run(run, short, step=4)


@pytest.mark.parametrize("step", slow_but(1, 6, of=[1, 3, 6, 8, 10, 13]))
def test_an_interruption_while_tokens_are_generated_loses_nothing(short, tmp_path, step):
    def engine(policy):
        made = Interrupted(policy)
        made.left = step
        return made

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, engine=engine, run__steps=4, checkpoint__every=100)
    (run,) = tmp_path.glob("run*")
    (saved,) = (run / "checkpoints").iterdir()
    held = {path.name: path for path in (short / "checkpoints").iterdir()}
    if saved.name in held:
        assert_same_checkpoint(saved, held[saved.name])
    resume(run)
    assert_same_run(run, short, step=4)


def test_an_interrupted_evaluation_is_made_up_for_before_the_next_step(tmp_path):
    """The checkpoint that the interruption wrote learns its accuracy, so that it can still be the best."""
    usual = {"run__steps": 3, "evaluate__every": 1, "checkpoint": {"every": 100, "keep": 1, "best": "eval/accuracy"}}

    class InEvaluation(NativeEngine):
        """Presses Ctrl-C when the second evaluation begins."""

        evaluations = 0

        def submit(self, requests):
            fresh = bool(requests) and requests[0].temperature == 0 and not self.waiting and not self.active
            self.evaluations += fresh
            if fresh and self.evaluations == 2:
                os.kill(os.getpid(), signal.SIGINT)
            super().submit(requests)

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, engine=InEvaluation, **usual)
    (run,) = tmp_path.glob("run*")
    (saved,) = (run / "checkpoints").iterdir()
    assert saved.name == "step-000001"
    assert "eval/accuracy" not in metrics_of(saved)
    assert [row["step"] for row in metrics(run)] == [0]

    def kill(name, *told):
        if name == "step":
            raise Killed

    with pytest.raises(Killed):
        resume(run, at=kill)
    assert metrics_of(saved)["eval/accuracy"] == metrics(run)[1]["eval/accuracy"]
    resume(run)
    (tmp_path / "whole").mkdir()
    assert_same_run(run, start(tmp_path / "whole", **usual).folder, step=3)


def test_a_finished_run_has_nothing_left_to_do(short, tmp_path):
    run = stopped(short, tmp_path / "run", after=4)
    finished = resume(run)
    assert (finished.evaluations, finished.model) == ((), run / "checkpoints" / "step-000004")
    assert_same_run(run, short, step=4)


def test_a_run_may_be_made_longer_and_remembers_that(short, tmp_path):
    run = stopped(short, tmp_path / "run", after=4)
    with pytest.raises(RecipeError) as caught:
        resume(run, changes=["run.steps=6"])
    assert [problem.field for problem in caught.value.problems] == ["run.steps"]
    resume(run, changes=["run.steps=6"], allow=["run.steps"])
    assert [row["step"] for row in metrics(run)] == list(range(7))
    assert load_recipe(run / "recipe.yaml").run.steps == 6
    assert resume(run).model.name == "step-000006"


def test_what_was_allowed_stays_allowed_until_the_next_checkpoint(short, tmp_path):
    run = stopped(short, tmp_path / "run", after=2)

    def die(name, *told):
        if (name, told[0]) == ("step", 3):
            raise Killed

    changes = ["optimizer.lr=0.02", "checkpoint.every=10"]
    with pytest.raises(Killed):
        resume(run, at=die, changes=changes, allow=["optimizer.lr", "checkpoint.every"])
    for _ in range(2):
        with pytest.raises(Killed):
            resume(run, at=die)
    with pytest.raises(RecipeError):
        resume(run, changes=["optimizer.clip=3"])
    resume(run)
    assert lines(run / "metrics.jsonl")[-1]["learning_rate"] == 0.02
    path = run / "recipe.yaml"  # from then on by hand is noticed again
    path.write_text(path.read_text().replace("lr: 0.02", "lr: 0.03"))
    with pytest.raises(RecipeError):
        resume(run)


@pytest.mark.parametrize("made", [True, False], ids=["with a checkpoint", "before its first checkpoint"])
def test_a_resume_with_another_recipe_is_refused_before_anything_is_touched(short, tmp_path, made):
    run = stopped(short, tmp_path / "run", after=4 if made else -1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    changes = ["optimizer.lr=0.5", "model.scratch.width=32", "engine.max_new_tokens=3"]
    with pytest.raises(RecipeError) as caught:
        resume(run, changes=changes, allow=["engine"])
    assert [problem.field for problem in caught.value.problems] == ["model.scratch.width", "optimizer.lr"]
    assert all("--allow" in problem.fix for problem in caught.value.problems)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_recipe_that_a_worker_refuses_does_not_stay_in_the_folder(short, tmp_path, monkeypatch):
    run = stopped(short, tmp_path / "run", after=2)
    before = (run / "recipe.yaml").read_text()

    async def refuses(parts, checkpoint):
        raise CheckpointError("the checkpoint holds the moments of adamw, and optimizer.name is adamw8bit")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError):
        patch.setattr(Runtime, "restored", refuses)
        resume(run, changes=["optimizer.lr=0.02"], allow=["optimizer"])
    assert (run / "recipe.yaml").read_text() == before
    resume(run)


def test_a_recipe_that_was_edited_by_hand_is_noticed(short, tmp_path):
    run = stopped(short, tmp_path / "run", after=2)
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("lr: 0.01", "lr: 0.02"))
    with pytest.raises(RecipeError) as caught:
        resume(run)
    assert [problem.field for problem in caught.value.problems] == ["optimizer.lr"]
    resume(run, allow=["optimizer"])
    assert lines(run / "metrics.jsonl")[-1]["learning_rate"] == 0.02


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "\x00\x00", '{"step": 3, "loss": 0}\n{"step"'])
def test_torn_lines_and_files_of_later_steps_do_not_disturb_a_resume(short, tmp_path, torn):
    run = stopped(short, tmp_path / "run", after=2)
    for name in ("metrics.jsonl", "events.jsonl"):
        text = (run / name).read_text()
        (run / name).write_text(text[: len(text) // 2] + torn)
    (run / "samples" / ".step-000003.jsonl.partial").write_text("torn")
    trace = run / "timeline.json"
    trace.write_bytes(trace.read_bytes()[:-9])
    metrics_there = [row["step"] for row in lines_that_are_whole(run / "metrics.jsonl")]
    resume(run)
    assert [row["step"] for row in metrics(run)][len(metrics_there) :] == [3, 4][-(5 - len(metrics_there)) :]
    assert_same_checkpoint(run / "checkpoints" / "step-000004", short / "checkpoints" / "step-000004")
    json.loads(trace.read_text())


def lines_that_are_whole(path):
    found = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= 2:
            found.append(row)
    return found


def test_a_checkpoint_that_was_damaged_sends_the_run_to_the_one_before(short, tmp_path):
    run = stopped(short, tmp_path / "run", after=3)
    file = run / "checkpoints" / "step-000003" / "state" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    told = []
    resume(run, at=lambda name, *values: told.append((name, values)))
    assert any(name == "note" and "skipped step-000003" in values[0] for name, values in told)
    assert told.index(("start", (4, 2))) >= 0
    assert_same_run(run, short, step=4)


def test_a_checkpoint_that_lacks_a_part_is_refused_by_its_name(short, tmp_path, monkeypatch):
    run = stopped(short, tmp_path / "run", after=2)
    monkeypatch.setattr("stretto.tasks.source.PromptSource.name", "questions")
    with pytest.raises(CheckpointError, match="holds no state of questions, which this run needs"):
        resume(run)


def test_a_resume_with_other_data_is_refused(tmp_path):
    rows = [{"prompt": f"{number:b}=", "answer": f"{number:b}"} for number in range(8)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    source = {"kind": "jsonl", "path": "data.jsonl", "name": None}
    task = {"source": source, "holdout": {"prompts": 4}}
    run = start(tmp_path, task=task, run__steps=1).folder
    data.write_text("\n".join(map(json.dumps, rows[:-1])))
    with pytest.raises(CheckpointError, match="other prompts"):
        resume(run)


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RecipeError, match=r"holds no recipe\.yaml"):
        resume(tmp_path)


def test_an_explicit_folder_that_exists_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(RecipeError, match="exists already"):
        recipe_in(tmp_path, run__folder=str(tmp_path / "mine"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def dies_at(*steps, monkeypatch):
    """Makes steps of a run lose the state of training, each once."""
    left, run_step = list(steps), loop.run_step

    async def lost(parts, clock, *, step):
        if step in left:
            left.remove(step)
            raise StateLostError("localhost/cpu:1: its process died, and no other holds the optimizer; resume the run")
        return await run_step(parts, clock, step=step)

    async def nothing(*rest, **more):
        """Nobody is left to ask for a checkpoint."""

    monkeypatch.setattr(loop, "run_step", lost)
    monkeypatch.setattr(loop, "save_before", nothing)


def test_a_run_whose_state_is_lost_goes_back_to_its_newest_checkpoint_and_says_so(short, tmp_path, monkeypatch):
    dies_at(2, 4, monkeypatch=monkeypatch)
    told = []
    run = start(tmp_path, at=lambda name, *values: told.append(values[0]) if name == "note" else None, run__steps=4)
    assert_same_run(run.folder, short, step=4)
    told = [line for line in told if "going back" in line]
    gone = "localhost/cpu:1: its process died, and no other holds the optimizer; going back to step"
    assert told == [f"{gone} {step}, the newest checkpoint" for step in (1, 3)]


def test_a_run_without_a_checkpoint_goes_back_to_its_beginning(short, tmp_path, monkeypatch):
    dies_at(1, monkeypatch=monkeypatch)
    told = []
    run = start(
        tmp_path, at=lambda name, *values: told.append(values[0]) if name == "note" else None, run__steps=4,
        evaluate__every=0,
    )  # fmt: skip
    assert any(line.endswith("going back to the beginning, as there is no checkpoint") for line in told)
    assert [row["step"] for row in metrics(run.folder)] == [1, 2, 3, 4]


def test_who_pressed_ctrl_c_gets_no_second_try(tmp_path, monkeypatch):
    async def lost(parts, clock, *, step):
        asyncio.current_task().cancel()
        raise StateLostError("localhost/cpu:1: its process died")

    monkeypatch.setattr(loop, "run_step", lost)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)


def test_a_state_that_is_lost_twice_without_a_checkpoint_between_ends_the_run(tmp_path, monkeypatch):
    dies_at(2, 2, monkeypatch=monkeypatch)
    with pytest.raises(StateLostError, match="resume the run"):
        start(tmp_path)


REFUSED_EARLY = """
import sys
from stretto import RecipeError, api
from stretto.api import calls
run = sys.argv[1]
asked = [
    lambda: calls.resume(run, changes=["optimizer.lr=0.5"]),
    lambda: calls.resume(run, changes=["run.steps=1"], allow=["run"]),
    lambda: calls.resume(run, changes=["engine.max_new_tokens=3"], allow=["engines"]),
    lambda: calls.resume(run, changes=["model.scratch.width=32"], allow=["model"]),
    lambda: calls.evaluate(run, changes=["algorithm.kl.coef=0.5"]),
    lambda: calls.evaluate(run, changes=["rewards=[]"]),
    lambda: calls.sample(run, "0=", changes=["seed=9"]),
    lambda: calls.serve(run, changes=["task.prompt='{text}'"], ready=print),
    lambda: calls.evaluate("nothing.yaml"),
    lambda: calls.evaluate(run + "/recipe.yaml", changes=["task.holdout.prompts=0", "evaluate={every: 0}"]),
]
for ask in asked:
    try:
        ask()
    except RecipeError as error:
        print(error.problems[0].field)
    assert "torch" not in sys.modules
"""


def test_a_changed_key_is_refused_before_torch_is_loaded(short, tmp_path):
    run = stopped(short, tmp_path / "run", after=2)
    told = subprocess.run([sys.executable, "-c", REFUSED_EARLY, run], capture_output=True, text=True, cwd=tmp_path)
    assert told.stdout.split() == [
        "optimizer.lr", "run.steps", "--allow", "model.scratch.width", "algorithm.kl.coef", "rewards", "seed",
        "task.prompt", "nothing.yaml", "task.holdout.prompts",
    ], told.stderr  # fmt: skip
