"""Accuracy counts right answers, with an honest interval, and leaves out what could not be judged."""

import asyncio
import itertools
import json
import shutil
from contextlib import nullcontext

import pytest

import stretto
from running import END, ONE, ZERO, assert_same_run, metrics, recipe_in, resume, scripted, start, written
from stretto.errors import CheckpointError, RecipeError, RewardError
from stretto.recipe.schema import Guards, Holdout
from stretto.report.read_run import RunRecord
from stretto.rewards.score import Scored
from stretto.runtime import guards, questions, session
from stretto.runtime.build import build_runtime
from stretto.runtime.endings import summary
from stretto.runtime.evaluate import evaluate, pass_at_k, wilson
from stretto.runtime.loop import unjudged
from stretto.runtime.plans import make_plan
from stretto.storage.pass_rates import interval, shown
from stretto.tasks.source import load_prompts, split
from stretto.types import Group, Prompt, Reward, Trajectory


@pytest.mark.parametrize(
    ("right", "n", "interval"),
    [
        # Worked by hand from Wilson's formula; the first is in Brown, Cai and DasGupta 2001.
        (0, 10, (0.0, 0.27753)),
        (10, 10, (0.72247, 1.0)),
        (5, 10, (0.23659, 0.76341)),
        (81, 263, (0.25525, 0.36622)),
        (0, 0, (0.0, 1.0)),
    ],
)
def test_the_interval_is_wilsons(right, n, interval):
    assert wilson(right, n) == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize(("right", "n"), [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (2, 5)])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_answer(right, n):
    for k in range(1, n + 1):
        choices = list(itertools.combinations(range(n), k))
        holding = sum(any(sample < right for sample in choice) for choice in choices)
        assert pass_at_k(right, n, k) == pytest.approx(holding / len(choices))


@pytest.mark.parametrize(
    ("right", "n", "asked"), [(46, 100, 100), (46, 91, 100), (0, 9, 10), (9, 9, 10), (0, 0, 5), (0, 0, 0), (1, 1, 100)]
)
def test_an_interval_holds_every_verdict_that_is_missing(right, n, asked):
    low, high = interval(right, n, asked)
    for more in range(asked - n + 1):  # so many of the others are right
        least, most = wilson(right + more, asked)
        assert low <= least <= most <= high
    assert (low, high) == (wilson(right, asked)[0], wilson(right + asked - n, asked)[1])


MISSING = {"eval/accuracy": 46 / 91, "eval/n": 91, "eval/asked": 100, "eval/low": 0.3, "eval/high": 0.7}
"""Nine verdicts of a hundred are missing."""


@pytest.mark.parametrize(
    ("metrics", "name", "value"),
    [
        ({"eval/accuracy": 46 / 91, "eval/n": 91, "eval/asked": 100}, "eval/accuracy", 0.46),
        ({"eval/accuracy": 46 / 91, "eval/n": 91, "eval/asked": 100, "eval/low": 0.3}, "eval/low", wilson(46, 100)[0]),
        (
            {"eval/accuracy": 46 / 91, "eval/n": 91, "eval/asked": 100, "eval/high": 0.7},
            "eval/high",
            wilson(46, 100)[1],
        ),
        ({"eval/accuracy": 0.5, "eval/n": 100, "eval/asked": 100}, "eval/accuracy", 0.5),
        ({"eval/accuracy": 0.5}, "eval/accuracy", 0.5),  # checkpoints of before
        ({"eval/accuracy": 0.5, "eval/n": 9, "eval/asked": 10, "reward/mean": 0.7}, "reward/mean", 0.7),
        ({"eval/n": 9, "eval/asked": 10}, "eval/accuracy", None),
        ({}, "eval/accuracy", None),
        ({"eval/accuracy": 0.0, "eval/n": 0, "eval/asked": 10}, "eval/accuracy", 0.0),
    ],
)
def test_what_an_evaluation_has_shown_at_least(metrics, name, value):
    assert shown(metrics, name) == (value if value is None else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize(
    ("failed", "launched", "share", "stops"),
    [(0, 10, 0.0, False), (1, 10, 0.0, True), (1, 10, 0.1, False), (2, 10, 0.1, True), (9, 10, 1.0, False)],
)
def test_an_evaluation_ends_where_more_verdicts_are_missing_than_the_guard_allows(failed, launched, share, stops):
    prompt = Prompt(id="p", messages=())
    lost = Trajectory(prompt=prompt, visit=-1, attempt=0, conversations=(), outcome=None, failure="it broke")
    verdict = Reward(value=1.0, outcome=1.0, parts={})
    group = Group(prompt=prompt, trajectories=(lost,), rewards=(verdict,))
    scored = Scored(groups=(group,) * (launched - failed), failed=(lost,) * failed)
    with pytest.raises(RewardError, match="it broke") if stops else nullcontext():
        guards.evaluation_errors(Guards(reward_error_share=share), scored, launched=launched)


def test_a_run_says_over_how_many_prompts_its_accuracy_is(tmp_path, capsys):
    (tmp_path / "picky.py").write_text(
        "def first(answer, prompt, signals):\n    assert prompt['reference'] != '010'\n    return 1.0\n"
    )
    source = {"kind": "synthetic", "name": "copy", "length": [3, 3], "alphabet": "01", "count": 8}
    task = {"source": source, "prompt": "{text}=", "holdout": {"prompts": 7}}
    recipe = {"rewards": [{"name": "a", "kind": "picky:first"}], "task": task, "evaluate__prompts": 7}
    lenient = {"guards__reward_error_share": 0.9, "run__steps": 1, "batch": {"prompts": 1, "samples": 2}}
    run = start(tmp_path, **recipe, **lenient)
    last = metrics(run.folder)[-1]
    assert (last["eval/accuracy"], last["eval/n"], last["eval/asked"]) == (1.0, 6, 7)
    (_, evaluation), *_ = run.evaluations
    assert evaluation.prompts == "6 of 7 prompts" in "\n".join(summary(run))
    assert "accuracy is over 6 of 7 prompts" in unjudged(evaluation, step=1)
    assert questions.evaluate_run(run.folder).document().items() >= {"n": 6, "asked": 7}.items()
    with pytest.raises(RewardError, match="evaluation: 1 of 7 answers have no verdict"):
        start(tmp_path, **recipe, **(lenient | {"guards__reward_error_share": 0.1}))


def evaluated(folder, script, *, pass_k=1, **changes):
    """What a scripted model scores on the held-out prompts."""
    recipe = recipe_in(folder, model__scratch__warmup_steps=0, **changes)

    async def run():
        parts = await build_runtime(
            recipe, plan=make_plan(recipe), root=folder, folder=None, note=print, make_engine=scripted(script)
        )
        try:
            return await evaluate(parts, parts.heldout, pass_k=pass_k), parts.heldout
        finally:
            await parts.close()

    return asyncio.run(run())


def copied(request):
    return [*request.tokens[1:-2].tolist(), END]


def test_a_model_that_knows_scores_1_and_one_that_does_not_0(tmp_path):
    result, prompts = evaluated(tmp_path, copied)
    assert (result.accuracy, result.n, result.pass_at_k) == (1.0, 4, {})
    assert result.interval == pytest.approx(wilson(4, 4))
    assert result.length_mean == pytest.approx(sum(len(prompt.reference) + 1 for prompt in prompts) / 4)
    result, _ = evaluated(tmp_path, lambda request: [END])
    assert (result.accuracy, result.length_mean) == (0.0, 1.0)


def test_accuracy_is_greedy_and_pass_at_k_is_sampled_at_the_training_temperature(tmp_path):
    temperatures = []

    def sometimes(request):
        temperatures.append(request.temperature)
        right = request.temperature == 0 or len([t for t in temperatures if t]) % 5 == 1
        return copied(request) if right else [END]

    result, _ = evaluated(tmp_path, sometimes, pass_k=5, engine__temperature=0.8)
    assert temperatures == [0.0] * 4 + [0.8] * 20
    assert result.accuracy == 1.0
    assert result.pass_at_k == pytest.approx({1: 0.2, 2: 0.4, 4: 0.8, 5: 1.0})


def test_partial_credit_is_not_a_right_answer(tmp_path):
    (tmp_path / "half.py").write_text("def first(answer, prompt, signals):\n    return 0.5\n")
    rewards = [{"name": "a", "kind": "numeric", "pick": "first"}, {"name": "b", "kind": "half:first"}]
    assert evaluated(tmp_path, copied, rewards=rewards)[0].accuracy == 0.0


def test_penalties_do_not_turn_a_right_answer_into_a_wrong_one(tmp_path):
    (tmp_path / "long.py").write_text("def first(answer, prompt, signals):\n    return len(answer)\n")
    rewards = [{"name": "a", "kind": "numeric", "pick": "first"}, {"name": "b", "kind": "long:first", "weight": -0.1}]
    assert evaluated(tmp_path, copied, rewards=rewards)[0].accuracy == 1.0


def test_what_could_not_be_judged_is_left_out_and_never_wrong_but_it_is_said_and_too_much_of_it_ends_it(tmp_path):
    code = "def first(answer, prompt, signals):\n    assert len(prompt['reference']) > 1\n    return 1.0\n"
    (tmp_path / "picky.py").write_text(code)
    rewards = [{"name": "a", "kind": "picky:first"}]
    source = {"kind": "synthetic", "name": "copy", "length": [1, 2], "alphabet": "01", "count": 6}
    task = {"source": source, "prompt": "{text}=", "holdout": {"prompts": 5}}
    asked = {"rewards": rewards, "task": task, "evaluate__prompts": 5}
    result, prompts = evaluated(tmp_path, copied, **asked, guards__reward_error_share=0.9, pass_k=2)
    judged = sum(len(prompt.reference) > 1 for prompt in prompts)
    assert 0 < judged < 5
    assert (result.accuracy, result.n, result.asked, result.prompts) == (1.0, judged, 5, f"{judged} of 5 prompts")
    assert (result.pass_at_k, result.pass_n) == ({1: 1.0, 2: 1.0}, {1: judged, 2: judged})
    assert result.interval == (pytest.approx(wilson(judged, 5)[0]), 1.0), "the others may be wrong, or right"
    assert "AssertionError" in result.failure
    with pytest.raises(RewardError, match=rf"{5 - judged} of 5 answers have no verdict, more than guards.reward_err"):
        evaluated(tmp_path, copied, **asked)
    nothing = "def first(answer, prompt, signals):\n    assert answer in ('', prompt['reference']), 'RuntimeError'\n"
    (tmp_path / "never.py").write_text(nothing + "    return 1.0\n")
    with pytest.raises(RewardError, match=r"none of 4 answers has a verdict(.|\n)*RuntimeError"):
        evaluated(
            tmp_path,
            lambda request: [ZERO] * 3 + [END],
            rewards=[{"name": "a", "kind": "never:first"}],
            evaluate__prompts=4,
        )


def test_the_held_out_prompts_are_those_of_the_split(tmp_path):
    recipe = recipe_in(tmp_path)
    asked = []

    def note(request):
        asked.append(request.tokens[1:-2].tolist())
        return [ZERO, END]

    evaluated(tmp_path, note)
    _, heldout = split(load_prompts(recipe.task, tmp_path), Holdout(prompts=4))
    digits = {"0": ZERO, "1": ONE}
    assert asked == [[digits[character] for character in prompt.reference] for prompt in heldout]


def test_evaluating_a_run_gives_what_its_last_line_says(tmp_path):
    run = start(tmp_path, evaluate__pass_k=2)
    result = questions.evaluate_run(run.folder)
    last = metrics(run.folder)[-1]
    assert result.accuracy == last["eval/accuracy"]
    assert result.interval == pytest.approx((last["eval/low"], last["eval/high"]))
    assert result.pass_at_k == {1: last["eval/pass_at_1"], 2: last["eval/pass_at_2"]}
    more = questions.evaluate_run(run.folder, changes=["evaluate.pass_k=3", "engine.temperature=0.5"])
    changed, _ = session.load_run_recipe(
        run.folder, ["rewards=[{name: accuracy, kind: exact}, {name: o, kind: overlong}]"]
    )
    assert changed.rewards[1].longest == changed.engine.max_new_tokens, "what a change leaves open is filled in"
    assert (more.accuracy, more.pass_at_k.keys()) == (result.accuracy, {1, 2, 3})
    assert questions.evaluate_run(run.folder, changes=["placement.cluster=1xcpu"]).accuracy == result.accuracy
    with pytest.raises(RecipeError) as caught:
        questions.evaluate_run(run.folder, changes=["optimizer.lr=1.0"])
    assert [problem.field for problem in caught.value.problems] == ["optimizer.lr"]


@pytest.mark.slow
def test_a_run_on_two_devices_is_evaluated_on_both_and_nothing_there_trains(tmp_path, monkeypatch):
    run = start(tmp_path, placement__cluster="2xcpu", placement__strategy="separate")
    plans = []
    there = questions.build_runtime
    monkeypatch.setattr(
        questions, "build_runtime", lambda recipe, **rest: plans.append(rest["plan"]) or there(recipe, **rest)
    )
    assert questions.evaluate_run(run.folder).accuracy == metrics(run.folder)[-1]["eval/accuracy"]
    assert [(cell.role, *cell.devices) for cell in plans[0].cells] == [
        ("generate", "localhost/cpu:0"),
        ("generate", "localhost/cpu:1"),
    ]


def test_evaluating_a_recipe_gives_what_its_run_begins_with_and_leaves_no_trace(tmp_path):
    recipe = recipe_in(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = questions.evaluate_recipe(recipe, root=tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert result.accuracy == metrics(start(tmp_path, run__steps=1).folder)[0]["eval/accuracy"]


def test_a_run_without_a_checkpoint_cannot_be_evaluated(tmp_path):
    class Killed(Exception):
        pass

    def die(name, *told):
        if name == "start":
            raise Killed

    with pytest.raises(Killed):
        start(tmp_path, at=die)
    (run,) = tmp_path.glob("run*")
    with pytest.raises(CheckpointError, match=r"no sound checkpoint yet\n    fix: `stretto resume .*` goes on"):
        questions.evaluate_run(run)


def test_evaluation_does_not_change_what_is_trained(tmp_path):
    often = start(tmp_path, evaluate__every=1).folder
    never = start(tmp_path, evaluate__every=0).folder
    keep = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(often)[1:]]
    assert keep == metrics(never)


PARTS = [{"name": "accuracy", "kind": "numeric", "pick": "first"}, {"name": "same", "kind": "exact", "weight": 0.5}]


def test_held_out_rewards_and_answers_are_kept(tmp_path):
    folder = start(tmp_path, rewards=PARTS).folder
    run = RunRecord(folder)
    assert list(run.evaluated) == [0, 2, 3]
    for row in run.metrics:
        if "eval/accuracy" not in row:
            assert not any(name.startswith("eval/") for name in row)
            continue
        answers = run.samples(int(row["step"]), held_out=True)
        found = [each["reward"] for each in answers]
        assert len(answers) == row["eval/asked"] == 4 and not any(each["used"] for each in answers)
        assert row["eval/reward"] == pytest.approx(sum(each["value"] for each in found) / 4)
        for name in ("accuracy", "same"):
            mean = sum(each["parts"][name] for each in found) / 4
            assert row[f"eval/reward/part/{name}"] == pytest.approx(mean)
        assert sum(each["outcome"] >= 1 for each in found) / 4 == row["eval/accuracy"]
        talk = answers[0]["conversations"][0]
        assert talk["version"] == int(row["step"]) and len(talk["tokens"]) == len(talk["trained"])
    held_out = {each["prompt"] for each in run.samples(0, held_out=True)}
    assert held_out.isdisjoint(row["prompt"] for step in run.sampled for row in run.samples(step))
    result = questions.evaluate_run(folder)
    assert (result.reward, result.parts) == (run.metrics[-1]["eval/reward"], pytest.approx(
        {name: run.metrics[-1][f"eval/reward/part/{name}"] for name in ("accuracy", "same")}
    ))  # fmt: skip
    assert stretto.Run(folder).held_out() == run.samples(3, held_out=True)
    assert stretto.Run(folder).held_out(0) == run.samples(0, held_out=True)


def test_a_resumed_run_is_told_from_its_beginning(tmp_path):
    folder = start(tmp_path, rewards=PARTS, run__steps=2).folder
    again = resume(folder, changes=["run.steps=4"], allow=["run.steps"])
    whole = start(tmp_path, rewards=PARTS, run__steps=4)
    assert_same_run(folder, whole.folder, step=4)
    told = [summary(each) for each in (again, whole)]
    assert [line for line in told[0] if "held-out" in line] == [line for line in told[1] if "held-out" in line]
    first, last = metrics(folder)[0], metrics(folder)[-1]
    begun, ended = f"{first['eval/accuracy']:.2f} (step 0)", f"{last['eval/accuracy']:.2f} (step 4)"
    assert told[0][0].startswith(f"held-out accuracy {begun} -> {ended}, 95 % interval")
    assert told[0][0].endswith("4 prompts")
    assert told[0][1] == f"held-out reward {first['eval/reward']:.3f} (step 0) -> {last['eval/reward']:.3f} (step 4)"
    assert [line.split()[:3] for line in told[0][2:4]] == [
        ["held-out", "part", "accuracy"],
        ["held-out", "part", "same"],
    ]
    assert "held-out accuracy" in summary(resume(folder))[0], "nothing left to do"


def test_answers_of_steps_that_are_done_again_are_dropped(tmp_path):
    folder = start(tmp_path, run__steps=2).folder
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    stray = folder / "samples" / "eval-000009.jsonl"
    stray.write_text("{}\n")
    resume(folder)
    assert not stray.exists() and list(RunRecord(folder).evaluated) == [0, 2]
    assert_same_run(folder, start(tmp_path, run__steps=2).folder, step=2)


@pytest.mark.parametrize("holdout", [4, 0])
def test_whole_sets_are_asked_row_by_row(tmp_path, holdout, monkeypatch):
    given = {} if holdout else {"evaluate": {"every": 0}, "task__holdout": {"prompts": 0}}
    folder = start(tmp_path, **given).folder
    rows = [{"text": f"{i:03b}", "answer": f"{i:03b}"} for i in range(8)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    before = sorted(folder.rglob("*"))
    result = stretto.evaluate(folder, on="test.jsonl")
    assert (result.n, result.asked, len(result.verdicts)) == (8, 8, 8) and result.reward is not None
    assert sorted(folder.rglob("*")) == before
    assert stretto.Run(folder).evaluate(on=tmp_path / "test.jsonl").verdicts == result.verdicts
    assert stretto.evaluate(written(tmp_path, **given), on="test.jsonl").asked == 8
    with pytest.raises(RecipeError, match="--on: there is no file"):
        stretto.evaluate(folder, on="none.jsonl")
    (tmp_path / "test.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(RecipeError, match="text"):
        stretto.evaluate(folder, on="test.jsonl")
