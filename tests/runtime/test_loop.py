"""What goes wrong within a step: a reward that raises is marked and dropped, and too many of them stop the run."""

import hashlib
import json
import threading
import time

import pytest

from running import END, ONE, ZERO, lines, metrics, resume, scripted, start
from stretto.engines.native.engine import NativeEngine
from stretto.engines.scripted import ScriptedEngine
from stretto.errors import CheckpointError, DeadlineError, GuardError, RewardError, StrettoError, TrainingError
from stretto.storage.checkpoint import Checkpoints
from stretto.workers import worker_group
from stretto.workers.worker import Worker

FLAKY = """
def first(answer, prompt, signals):
    if prompt["id"].endswith({wanted!r}) and answer not in ("", prompt["reference"]):
        raise ValueError(f"cannot judge {{prompt['id']}}")
    return float(len(answer))
"""
CALM = {"reward_error_share": 1.0, "min_disk_gb": 0, "max_k3": None}


def own_reward(folder, name, code):
    """A recipe's reward by a function of the user's, in a file beside the recipe."""
    (folder / f"{name}.py").write_text(code)
    return [{"name": "mine", "kind": f"{name}:first"}]


def one_or_two(request):
    """Answers of one or two characters, by the request's key."""
    return [ONE, ZERO, END] if request.key % 2 else [ZERO, END]


def test_a_reward_that_raises_marks_its_sample_and_the_run_goes_on(tmp_path):
    rewards = own_reward(tmp_path, "flaky_one", FLAKY.format(wanted="1"))
    run = start(
        tmp_path, rewards=rewards, guards=CALM, engine=scripted(one_or_two), batch__prompts=8, evaluate__every=0
    )
    rows = [row for step in (1, 2, 3) for row in lines(run.folder / "samples" / f"step-{step:06d}.jsonl")]
    failed = [row for row in rows if row["failure"]]
    assert 0 < len(failed) < len(rows)
    for row in rows:
        assert bool(row["failure"]) == row["prompt"].endswith("1")
        assert (row["reward"] is None) == (not row["used"]) == bool(row["failure"])
        if row["failure"]:
            assert f"reward mine: ValueError: cannot judge {row['prompt']}" in row["failure"]
            assert set(row["conversations"][0]["advantages"]) == {0.0}
    counted = metrics(run.folder)
    assert sum(line["trajectories/failed"] for line in counted) == len(failed)
    assert all(line["groups/used"] + line["groups/infra"] == 8 for line in counted)
    assert all(line["trajectories/launched"] == 32 for line in counted)


def test_a_group_that_lost_too_many_samples_is_dropped_whole(tmp_path):
    code = (
        "def first(answer, prompt, signals):\n"
        "    assert len(answer) == 1 or answer in ('', prompt['reference'])\n    return 1.0\n"
    )
    rewards = own_reward(tmp_path, "flaky_two", code)
    run = start(
        tmp_path,
        rewards=rewards,
        guards=CALM,
        engine=scripted(one_or_two),
        batch={"prompts": 8, "samples": 2},
        evaluate__every=0,
        run__steps=1,
    )
    rows = lines(run.folder / "samples" / "step-000001.jsonl")
    small = [row for row in rows if row["failure"] == "group too small after failures"]
    broken = [row for row in rows if row["failure"] and "AssertionError" in row["failure"]]
    assert small
    assert {row["prompt"] for row in small} <= {row["prompt"] for row in broken}
    assert metrics(run.folder)[0]["groups/used"] == sum(row["used"] for row in rows) / 2 > 0


@pytest.mark.parametrize(("share", "wanted"), [(0.1, "1"), (0.9, "")])
def test_above_the_share_the_run_stops_and_shows_the_first_exception(tmp_path, share, wanted):
    rewards = own_reward(tmp_path, f"flaky_three{len(wanted)}", FLAKY.format(wanted=wanted))
    with pytest.raises(RewardError) as caught:
        start(
            tmp_path,
            rewards=rewards,
            guards={**CALM, "reward_error_share": share},
            engine=scripted(one_or_two),
            batch__prompts=8,
            evaluate__every=0,
        )
    text = str(caught.value)
    assert f"guards.reward_error_share ({share:g})" in text
    assert "ValueError: cannot judge copy/" in text
    assert "of 32 trajectories" in text
    assert caught.value.exit_code == 1


def test_samples_that_were_dropped_do_not_move_the_weights(tmp_path):
    """What is trained is the same whether a prompt's group failed or taught nothing."""
    codes = {
        "fails": "def first(answer, prompt, signals):\n    assert prompt['id'][-1] == '0'\n    return len(answer)\n",
        "flat": "def first(answer, prompt, signals):\n    return len(answer) if prompt['id'][-1] == '0' else 1\n",
    }
    norms = []
    for name, code in codes.items():
        run = start(
            tmp_path,
            rewards=own_reward(tmp_path, name, code),
            guards=CALM,
            engine=scripted(one_or_two),
            batch__prompts=8,
            evaluate__every=0,
            run__steps=1,
            algorithm={"name": "rloo"},
        )
        rows = lines(run.folder / "samples" / "step-000001.jsonl")
        used = sum(row["used"] for row in rows)
        norms.append(metrics(run.folder)[0]["grad_norm"] * used)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[0] > 0


def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run(tmp_path):
    with pytest.raises(GuardError, match="engine and trainer disagree: mean k3 is"):
        start(tmp_path, engine=scripted(one_or_two), evaluate__every=0)
    (run,) = tmp_path.glob("run*")
    assert [row["step"] for row in metrics(run)] == [1], "the step that broke it is in the metrics"


def test_an_entropy_below_the_floor_stops_the_run(tmp_path):
    with pytest.raises(GuardError, match=r"entropy is .*, below guards\.min_entropy \(5\)"):
        start(tmp_path, guards__min_entropy=5.0)


def test_a_loss_that_is_not_finite_stops_the_run_or_skips_the_update(tmp_path):
    def broken(policy):
        return ScriptedEngine(one_or_two, logprob=float("nan"))

    with pytest.raises(TrainingError, match="step 1 is not finite"):
        start(tmp_path, engine=broken, guards=CALM, evaluate__every=0)
    run = start(tmp_path, engine=broken, guards={**CALM, "non_finite": "skip"}, evaluate__every=0)
    assert [row["updates/skipped"] for row in metrics(run.folder)] == [1, 1, 1]
    first, second = (json.loads((run.folder / "checkpoints" / n / "state" / "optimizer.json").read_text())["update"]
                     for n in ("step-000001", "step-000003"))  # fmt: skip
    assert (first, second) == (0, 0)


def test_generation_that_takes_too_long_is_a_deadline(tmp_path):
    class Endless(NativeEngine):
        def step(self, budget_seconds):
            return []

    with pytest.raises(DeadlineError, match=r"generate has not answered for 0\.05 s(.|\n)* raise deadlines\.generate"):
        start(tmp_path, engine=Endless, deadlines={"generate": 0.05})
    with pytest.raises(DeadlineError, match=r"generate has not answered for 0\.05 s"):
        start(tmp_path, engine=Endless, deadlines={"generate": 0.05}, evaluate__every=0)


def test_loading_that_takes_too_long_is_a_deadline(tmp_path):
    over = threading.Event()  # who loads lets nobody else load meanwhile

    def endless(policy):
        over.wait(60)

    with pytest.raises(DeadlineError, match=r"start has not answered for [\d.]+ s"):
        start(tmp_path, engine=endless, deadlines={"start": 2.0})
    over.set()


@pytest.mark.parametrize("stage", ["train", "publish"])
def test_a_stage_that_hangs_in_this_process_is_a_deadline_and_its_step_is_not_kept(tmp_path, monkeypatch, stage):
    name = {"train": "accumulate", "publish": "engine_weights"}[stage]
    version = {"train": 2, "publish": 3}[stage]  # in the third step
    plain, hung = getattr(Worker, name), []

    def hangs(worker, *given):
        if worker.trainer.version == version and not hung:
            hung.append(stage)
            time.sleep(60)
        return plain(worker, *given)

    monkeypatch.setattr(Worker, name, hangs)
    monkeypatch.setattr(worker_group, "CLOSING_LATE", 0.1)
    with pytest.raises(DeadlineError, match=rf"localhost/cpu:0 \(.*\): {name} has not answered for 0\.5 s"):
        start(tmp_path, evaluate__every=0, deadlines={stage: 0.5})
    (run,) = tmp_path.glob("run*")
    (stacks,) = run.glob(f"stacks-{name}-*.txt")
    assert "in hangs" in stacks.read_text()
    made = [path.name for path in (run / "checkpoints").iterdir()]
    assert "step-000001" in made and "step-000003" not in made, "that of the second is on its way"


def test_rewards_that_take_too_long_together_are_a_deadline_and_a_resume_goes_on(tmp_path):
    code = (
        "import time\nfrom pathlib import Path\n"
        "def first(answer, *_):\n    Path({!r}).exists() or time.sleep(60)\n    return len(answer)\n"
    )
    mended = tmp_path / "mended"
    rewards = own_reward(tmp_path, "slow", code.format(str(mended)))
    mended.touch()
    changes = {"evaluate__every": 0, "run__steps": 1, "deadlines": {"reward": 0.3}}
    with pytest.raises(DeadlineError, match=r"reward: 4 of 4 trajectories have no verdict 0\.3 s after"):
        start(tmp_path, at=lambda name, *told: name == "start" and mended.unlink(), rewards=rewards, **changes)
    mended.touch()
    (run,) = tmp_path.glob("run*")
    resume(run, changes=["deadlines.reward=60"], allow=["deadlines"])
    assert [row["step"] for row in metrics(run)] == [1]


TRIED = 2
"""Answers that a reward is tried with before anything is loaded."""
FAILING = {
    "reward": (RewardError, {"reward_error_share": 0.0, "min_disk_gb": 0, "max_k3": None}),
    "guard": (GuardError, {"reward_error_share": 1.0, "min_disk_gb": 0, "max_k3": None, "min_entropy": 9.0}),
}


@pytest.mark.parametrize("kind", list(FAILING))
def test_an_error_outside_of_learning_leaves_a_checkpoint_so_that_nothing_is_done_again(tmp_path, kind):
    error, wanted = FAILING[kind]
    (tmp_path / "seen").write_text("")
    code = (
        "from pathlib import Path\ndef first(answer, *_):\n"
        f"    with Path({str(tmp_path)!r}, 'seen').open('a') as file:\n        file.write('x')\n"
        f"    assert not Path({str(tmp_path)!r}, 'broken').exists()\n    return len(answer)\n"
    )

    def breaks(name, *told):
        if (name, told[0]) == ("step", 1):
            (tmp_path / "broken").touch()

    changes = {"rewards": own_reward(tmp_path, f"late_{kind}", code), "evaluate__every": 0, "checkpoint__every": 100}
    with pytest.raises(error):
        start(tmp_path, at=breaks, guards=wanted, **changes)
    (run,) = tmp_path.glob("run*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    (tmp_path / "broken").unlink()
    before = len((tmp_path / "seen").read_text())
    resume(run, changes=["guards.min_entropy=null"], allow=["guards"])
    assert len((tmp_path / "seen").read_text()) - before == 24 + TRIED, "two steps were left"
    assert metrics(start(tmp_path, guards=CALM, **changes).folder) == metrics(run)


def test_a_checkpoint_that_cannot_be_written_does_not_hide_why_the_run_ended(tmp_path, monkeypatch):
    def full(self, step, **rest):
        raise CheckpointError("no room")

    monkeypatch.setattr(Checkpoints, "save", full)
    told = []
    with pytest.raises(GuardError, match="entropy"):
        start(
            tmp_path,
            at=lambda *values: told.append(values),
            guards__min_entropy=9.0,
            evaluate__every=0,
            checkpoint__every=100,
        )
    assert ("note", "no checkpoint of step 1 could be written: no room") in told


def test_a_run_that_failed_can_be_resumed_when_the_reason_is_gone(tmp_path):
    code = "from pathlib import Path\ndef first(answer, *_):\n    assert Path({!r}).exists()\n    return len(answer)\n"
    mended = tmp_path / "mended"
    rewards = own_reward(tmp_path, "fragile", code.format(str(mended)))
    changes = {"rewards": rewards, "evaluate__every": 0, "run__steps": 2}
    mended.touch()
    with pytest.raises(RewardError, match="AssertionError"):
        start(tmp_path, at=lambda name, *told: name == "start" and mended.unlink(), **changes)
    (run,) = tmp_path.glob("run*")
    mended.touch()
    resume(run)
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert metrics(start(tmp_path, **changes).folder) == metrics(run)


def test_a_full_disk_is_an_error_that_names_the_file_and_how_to_go_on(tmp_path):
    def fill(name, *told):
        if name == "start":
            (run,) = tmp_path.glob("run*")
            (run / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(StrettoError, match=r"metrics\.jsonl: cannot be written .No space left on device"):
        start(tmp_path, at=fill)


def test_what_is_trained_carries_the_version_that_sampled_it(tmp_path):
    run = start(tmp_path, run__steps=3, batch__updates=2, evaluate__every=0)
    for step in (1, 2, 3):
        rows = lines(run.folder / "samples" / f"step-{step:06d}.jsonl")
        assert {row["conversations"][0]["version"] for row in rows} == {step - 1}


def test_prompts_are_drawn_in_epochs_and_never_from_the_held_out_ones(tmp_path):
    run = start(tmp_path, batch={"prompts": 5, "samples": 2}, run__steps=4, evaluate__every=0)
    drawn = []
    for step in range(1, 5):
        rows = lines(run.folder / "samples" / f"step-{step:06d}.jsonl")
        drawn += [(row["prompt"], row["visit"]) for row in rows if row["attempt"] == 0]
    assert len(drawn) == 20
    assert {visit for _, visit in drawn[:10]} == {0}
    assert {visit for _, visit in drawn[10:]} == {1}
    assert len({prompt for prompt, _ in drawn}) == 10
    digest = {hashlib.sha256(repr(part).encode()).digest() for part in (drawn[:10], drawn[10:])}
    assert len(digest) == 2


def test_the_answers_of_a_step_that_failed_are_kept_and_the_way_on_is_named(tmp_path):
    file = tmp_path / "fragile.py"
    file.write_text('async def play(prompt, model):\n    await model.chat("01=")\n    raise KeyError("no such room")\n')
    told = []

    with pytest.raises(RewardError) as caught:
        start(tmp_path, at=lambda name, *values: told.append(str(values)), environment={"kind": "fragile:play"},
              evaluate__every=0)  # fmt: skip
    text = str(caught.value)
    assert f"environment: KeyError: 'no such room'\n  File \"{file}\", line 3, in play" in text
    assert "guards.reward_error_share" in text and "--allow environment.kind" in text
    (kept,) = tmp_path.rglob("samples/step-000001.jsonl")
    assert len(lines(kept)) == 12 and all("in play" in row["failure"] and row["conversations"] for row in lines(kept))
    assert any("--step 1" in each for each in told)


def test_run_warns_once_of_characters_that_a_tokenizer_lacks(tmp_path):
    (tmp_path / "spells.py").write_text(
        "from stretto import Outcome\n\n\nasync def play(prompt, model):\n"
        '    return Outcome(answer=(await model.chat(f"5%{prompt.reference}=")).text)\n'
    )
    told = []
    start(
        tmp_path, at=lambda name, *values: told.append(str(values)), environment={"kind": "spells:play"},
        evaluate__every=0, run__steps=2,
    )  # fmt: skip
    (warning,) = [each for each in told if "model.scratch.characters" in each]
    assert "lacks '%5'" in warning and "fix: add them to model.scratch.characters" in warning
