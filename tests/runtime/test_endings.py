"""How a run ends says what to do next: stopped, it names the step and a command; finished, it says so."""

import shlex
import signal
from contextlib import suppress

import pytest

import running
from running import Quiet, lines, recipe_in, start
from stretto.errors import RunStopped
from stretto.recipe.load import load_recipe
from stretto.report.compare_runs import verdicts_of
from stretto.report.read_run import RunRecord
from stretto.runtime import session
from stretto.runtime.recipe_changes import as_arguments
from stretto.runtime.recipe_file import load_run_recipe
from stretto.runtime.time_limit import TimeLimit


def ended(folder, at, **changes):
    """What a run says that gets a Ctrl-C when it says `at`, and its last words."""

    def press(name, *values):
        if (name, *values[:1]) == at:
            signal.raise_signal(signal.SIGINT)

    progress = Quiet(press)
    recipe = recipe_in(folder, run__folder=str(folder / "run"), **changes)
    with pytest.raises(RunStopped) as stopped:
        session.start(recipe, name="tiny", root=folder, progress=progress)
    return progress.notes(), str(stopped.value)


def test_ctrl_c_says_where_the_run_stands_and_what_goes_on_with_it(tmp_path):
    notes, last = ended(tmp_path, ("step", 2), run__steps=4, checkpoint__every=100)
    assert last == f"stopped after step 2 of 4; go on with: stretto resume {tmp_path / 'run'}"
    assert "go on with" not in notes, "it is said once, by whoever runs the run"


@pytest.mark.parametrize(
    ("at", "stands", "rest"),
    [("note", "step 2 of 6", " run.steps=6 --allow run.steps,rewards"), ("step", "step 3 of 6", "")],
    ids=["before it is written down", "after that"],
)
def test_what_a_resume_was_to_change_is_not_lost_when_it_ends(at, stands, rest, tmp_path):
    recipe = recipe_in(tmp_path, run__folder=str(tmp_path / "run"), run__steps=2)
    session.start(recipe, name="tiny", root=tmp_path, progress=Quiet())
    pressed = []

    def press(name, *values):
        if name == at and not pressed:
            pressed.append(signal.raise_signal(signal.SIGINT))

    with pytest.raises(RunStopped) as stopped:
        session.resume(tmp_path / "run", changes=["run.steps=6"], allow=["run.steps", "rewards"], progress=Quiet(press))
    assert str(stopped.value) == f"stopped after {stands}; go on with: stretto resume {tmp_path / 'run'}{rest}"
    assert load_run_recipe(tmp_path / "run")[0].run.steps == (2 if rest else 6)


def test_a_run_that_is_finished_says_so_and_again_when_it_is_resumed(tmp_path):
    progress = Quiet()
    recipe = recipe_in(tmp_path, run__folder=str(tmp_path / "run"), run__steps=2)
    session.start(recipe, name="tiny", root=tmp_path, progress=progress)
    (told,) = (values[0] for name, *values in progress.told if name == "finish")
    said = f"finished: 2 of 2 steps; go further with: stretto resume {tmp_path / 'run'} run.steps=4 --allow run.steps"
    assert told[-1] == said
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    again = Quiet()
    finished = session.resume(tmp_path / "run", progress=again)
    (told,) = (values[0] for name, *values in again.told if name == "finish")
    assert told[-1] == said
    assert finished.model == tmp_path / "run" / "checkpoints" / "step-000002"
    assert [name for name, *_ in again.told if name != "note"] == ["finish"]
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before
    session.resume(tmp_path / "run", changes=["run.steps=3"], allow=["run.steps"], progress=Quiet())
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")][-1] == 3


def test_a_run_whose_time_ends_with_its_last_step_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(TimeLimit, "stepped", lambda self, seconds: self.request.time_is_over("run.until"))
    progress = Quiet()
    recipe = recipe_in(tmp_path, run__folder=str(tmp_path / "run"), run__steps=1)
    with suppress(RunStopped):  # which would end pytest
        session.start(recipe, name="tiny", root=tmp_path, progress=progress)
    assert [name for name, *_ in progress.told].count("finish") == 1
    with pytest.raises(RunStopped, match="after step 1 of 2") as stopped:
        start(tmp_path, run__steps=2)
    assert stopped.value.exit_code == 143


def test_each_evaluation_keeps_which_prompts_were_answered_right(tmp_path):
    folder = start(tmp_path, run__steps=2).folder
    run = RunRecord(folder)
    for step in (0, 2):
        found = verdicts_of(run, step)
        (row,) = (row for row in run.metrics if row["step"] == step)
        assert len(found) == 4
        assert sum(found.values()) / 4 == row["eval/accuracy"]
    resumed = running.resume(folder, changes=["run.steps=3"], allow=["run.steps"]).folder
    assert len(verdicts_of(RunRecord(resumed), 3)) == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["optimizer.lr=1e-3"], ["optimizer.lr=5e-4", "run.steps=9"]),
        (["task.template={enable_thinking: false, x: 1}"], ["task.template={x: 1}"]),
        (["task.template={a: {b: 1}}"], ["task.template={a.b: 2}"]),
        (["roles.critic=null"], ["algorithm.name=ppo", "roles.critic={name: scratch, adapter: {rank: 2}}"]),
        (["task.source={kind: hf, name: x/y, columns: {prompt: q}}"], ["task.source={kind: jsonl, path: 'a b.jsonl'}"]),
        (
            ["placement={strategy: interleave, fractions: {actor+reference: 0.5, critic: 0.5}}"],
            ["placement.fractions=I1"],
        ),
        (["task.system=null"], ['task.system="it\'s $HOME, 1: {a}"']),
    ],
    ids=str,
)
def test_arguments_that_are_repeated_make_the_same_recipe_again(old, new):
    before, after = load_recipe({}, old), load_recipe({}, new)
    shown = shlex.join(as_arguments(before, after))
    assert load_recipe(before.model_dump(mode="json"), shlex.split(shown)) == after
