"""The table of V*: made once, finished when interrupted, found by what it was made from, and read by training."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from running import END, EQUALS, ONE, ZERO, Quiet, assert_same_run, lines, recipe_in, resume, scripted, start, written
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.models.source import ModelFiles
from stretto.runtime import questions
from stretto.runtime import value as making
from stretto.runtime.recipe_file import with_lasting_paths
from stretto.runtime.value import value
from stretto.runtime.value_table import ingredients, lacks_table, read_table, table_path, value_problems, weights_digest
from stretto.tasks.source import load_prompts, split
from tables import ASTAR, made


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Tables are kept below the working directory."""
    monkeypatch.chdir(tmp_path)


def test_every_training_prompt_is_asked_so_many_times(tmp_path):
    told, rows = made(tmp_path)
    recipe = recipe_in(tmp_path, **ASTAR)
    training, held = split(load_prompts(recipe.task, tmp_path), recipe.task.holdout)
    assert set(rows) == {(prompt.id, attempt) for prompt in training for attempt in range(3)}
    assert not {prompt.id for prompt in held} & {name for name, _ in rows}
    assert (told.prompts, told.samples, told.generated, told.unjudged) == (10, 3, 30, 0)
    assert told.tokens == sum(row["tokens"] for row in rows.values()) > 30
    assert told.reward_mean == pytest.approx(sum(row["reward"] for row in rows.values()) / 30)
    assert told.table.startswith(".stretto/vstar/")


def test_a_second_time_there_is_nothing_to_do(tmp_path):
    first, rows = made(tmp_path)
    second, again = made(tmp_path)
    assert (second.generated, again) == (0, rows)
    assert second.table == first.table


def test_more_samples_are_added_to_those_there_are(tmp_path):
    first, rows = made(tmp_path)
    more, all_rows = made(tmp_path, algorithm__vstar__samples=5)
    assert more.table == first.table and more.generated == 20
    assert {key: row for key, row in all_rows.items() if key[1] < 3} == rows


def test_an_interrupted_table_is_finished_with_the_same_answers(tmp_path, monkeypatch):
    whole, rows = made(tmp_path)
    os.rename(whole.table, "whole.jsonl")
    monkeypatch.setattr(making, "TOGETHER", 7)
    with pytest.raises(KeyboardInterrupt):

        def stop(name, *values):
            if name == "step" and values[0] == 2:
                raise KeyboardInterrupt

        value(recipe_in(tmp_path, **ASTAR), root=tmp_path, progress=Quiet(stop))
    assert len(lines(whole.table)) == 1 + 14
    torn = Path(whole.table)
    torn.write_text(torn.read_text()[:-9])  # a kill tore the last line
    told, again = made(tmp_path)
    assert told.generated == 17
    assert again == rows


@pytest.mark.parametrize(
    "changes",
    [
        {"task__source__count": 13},
        {"task__prompt": "{text}=="},
        {"engine__temperature": 0.7},
        {"engine__max_new_tokens": 3},
        {"rewards": [{"name": "accuracy", "kind": "numeric", "pick": "last"}]},
        {"model__scratch__width": 32},
        {"seed": 6},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_rewards_depend_on_is_in_the_name(tmp_path, changes):
    def name(**more):
        recipe = recipe_in(tmp_path, **ASTAR, **more)
        training, _ = split(load_prompts(recipe.task, tmp_path), recipe.task.holdout)
        return table_path(recipe, ingredients(recipe, training, tmp_path), tmp_path)

    assert name(**changes) != name()
    assert name(optimizer__lr=0.5, algorithm__vstar__beta1=2.0, run__steps=9) == name()


def test_a_reward_of_ones_own_is_in_the_name_by_its_code(tmp_path):
    def name(code):
        (tmp_path / "judge.py").write_text(code)
        recipe = recipe_in(tmp_path, **ASTAR, rewards=[{"name": "mine", "kind": "judge:good"}])
        training, _ = split(load_prompts(recipe.task, tmp_path), recipe.task.holdout)
        return table_path(recipe, ingredients(recipe, training, tmp_path), tmp_path)

    function = "def good(answer, prompt, signals):\n    return {}\n"
    assert name(function.format(1)) == name(function.format(1))
    assert name(function.format(1)) != name(function.format(2))


def test_a_table_of_other_keys_is_none_in_the_first_tier(tmp_path):
    made(tmp_path)
    assert lacks_table(recipe_in(tmp_path, **ASTAR), tmp_path) == []
    assert lacks_table(recipe_in(tmp_path, **ASTAR, optimizer__lr=0.5), tmp_path) == [], "rewards do not depend on it"
    for changes in ({"engine__temperature": 0.5}, {"model__dtype": "float64"}, {"rewards": [{"kind": "exact"}]}):
        (problem,) = lacks_table(recipe_in(tmp_path, **ASTAR, **changes), tmp_path)
        assert problem.field == "algorithm.vstar.table" and "stretto value" in problem.fix


def test_training_without_a_table_is_refused_with_what_to_do(tmp_path):
    recipe = recipe_in(tmp_path, **ASTAR)
    (problem,) = value_problems(recipe, tmp_path)
    assert problem.field == "algorithm.vstar.table"
    assert "no table" in problem.reason and "stretto value" in problem.fix
    with pytest.raises(RecipeError, match="no table"):
        start(tmp_path, **ASTAR)
    assert not list(tmp_path.glob("run*"))


def test_training_with_half_a_table_is_refused(tmp_path):
    made(tmp_path)
    (problem,) = value_problems(recipe_in(tmp_path, **(ASTAR | {"algorithm__vstar__samples": 4})), tmp_path)
    assert "10 of 10 prompts have fewer than 4 answers" in problem.reason


def test_a_run_trains_reads_its_own_copy_and_resumes_without_the_table(tmp_path):
    told, _ = made(tmp_path)
    whole = start(tmp_path, **ASTAR, run__steps=4).folder
    part = start(tmp_path, **ASTAR, run__steps=2).folder
    os.remove(told.table)
    resume(part, changes=["run.steps=4"], allow=["run.steps"])
    assert_same_run(whole, part, step=4)
    last = lines(whole / "metrics.jsonl")[-1]
    assert last["astar/gap"] == pytest.approx(last["astar/gap"]) and last["astar/residual"] != 0
    assert "clip/share" not in last


def test_the_residual_is_zero_in_the_first_step_where_policy_and_reference_are_one(tmp_path):
    made(tmp_path)
    run = start(tmp_path, **ASTAR, run__steps=1).folder
    first = lines(run / "metrics.jsonl")[-1]
    assert first["astar/residual"] == pytest.approx(0.0, abs=1e-6)
    assert first["loss"] >= first["astar/gap"] ** 2 - 1e-9


def test_a_file_of_another_recipe_is_refused(tmp_path):
    made(tmp_path, algorithm__vstar__table="mine.jsonl")
    recipe = recipe_in(tmp_path, **ASTAR, algorithm__vstar__table="mine.jsonl", engine__temperature=0.5)
    (problem,) = value_problems(recipe, tmp_path)
    assert "mine.jsonl was made from other sampler" in problem.reason
    with pytest.raises(RecipeError, match="other sampler"):
        value(recipe, root=tmp_path, progress=Quiet())


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"made_from": {}}\n[1]\n{"prompt": "p"}\n')
    with pytest.raises(RecipeError, match="line 2 of"):
        read_table(tmp_path / "mine.jsonl", None)


UNDECIDED = "def good(answer, prompt, signals):\n    return {'0': 0.5, '': 0.0}[answer[:1]]\n"


def zero_but_for(text):
    """A script that answers 0, and 1 to the one prompt."""
    letters = {ZERO: "0", ONE: "1", EQUALS: "="}
    return lambda request: [ONE if "".join(letters.get(t, "") for t in request.tokens) == text else ZERO, END]


def test_an_answer_without_a_verdict_is_asked_again_and_its_prompt_left_out_until_then(tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text(UNDECIDED)
    own = {
        "rewards": [{"name": "mine", "kind": "judge:good"}],
        "guards__reward_error_share": 1.0,
        "guards__max_k3": None,
        "evaluate__every": 0,
        "run__steps": 2,
    }
    recipe = recipe_in(tmp_path, **ASTAR, **own)

    training, _ = split(load_prompts(recipe.task, tmp_path), recipe.task.holdout)
    unlucky = scripted(zero_but_for(training[0].messages[0]["content"]))
    told = value(recipe, root=tmp_path, progress=Quiet(), make_engine=unlucky)
    assert told.unjudged == 1 and told.reward_mean == 0.5
    assert value_problems(recipe, tmp_path) == []
    run = start(tmp_path, **ASTAR, **own, engine=scripted(zero_but_for("nobody"))).folder
    asked = {row["prompt"] for path in (run / "samples").glob("step-*") for row in lines(path)}
    assert asked == {prompt.id for prompt in training[1:]}
    usual = questions.build_runtime
    monkeypatch.setattr(questions, "build_runtime", partial(usual, make_engine=scripted(zero_but_for("nobody"))))
    assert questions.evaluate_run(run).n > 0
    again = value(recipe, root=tmp_path, progress=Quiet(), make_engine=scripted(zero_but_for("nobody")))
    assert (again.generated, again.unjudged) == (3, 0)


def test_prompts_that_are_dropped_are_not_asked_and_training_goes_without_them(tmp_path):
    told, rows = made(tmp_path, task__drop_longer_than=5)
    recipe = recipe_in(tmp_path, **ASTAR, task__drop_longer_than=5)
    training, _ = split(load_prompts(recipe.task, tmp_path), recipe.task.holdout)
    short = {prompt.id for prompt in training if len(prompt.messages[0]["content"]) < 4}
    assert 0 < len(short) < len(training)
    assert {name for (name, _), row in rows.items() if row["tokens"]} == short
    assert {name for (name, _), row in rows.items() if row["reward"] is not None} == short
    assert (told.generated, told.unjudged) == (3 * len(short), len(training) - len(short))
    again, same = made(tmp_path, task__drop_longer_than=5)
    assert (again.generated, same, len(lines(again.table))) == (0, rows, 1 + 3 * len(training))
    run = start(tmp_path, **ASTAR, task__drop_longer_than=5, run__steps=2).folder
    asked = {row["prompt"] for path in (run / "samples").glob("step-*") for row in lines(path)}
    assert asked == short


def test_what_is_dropped_is_in_the_name_of_the_table(tmp_path):
    def name(**more):
        recipe = recipe_in(tmp_path, **ASTAR, **more)
        return table_path(recipe, ingredients(recipe, [], tmp_path), tmp_path)

    assert name(task__drop_longer_than=5) != name(task__drop_longer_than=6) != name()


def test_a_model_of_the_working_directory_is_told_as_a_run_tells_it(tmp_path):
    """A run goes on from any directory, so it tells paths from the folder of its recipe."""
    for name in ("recipes", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    scratch, root = recipe_in(tmp_path, **ASTAR), tmp_path / "recipes"
    model = scratch.model.model_copy(update={"name": "model", "scratch": None})
    recipe = scratch.model_copy(update={"model": model})
    lasting = with_lasting_paths(recipe, root)
    assert lasting.model.name == "../model"
    assert ingredients(lasting, [], root) == ingredients(recipe, [], root)


def test_a_reward_that_always_fails_ends_the_command(tmp_path):
    (tmp_path / "judge.py").write_text("def good(answer, prompt, signals):\n    raise KeyError(answer)\n")
    with pytest.raises(RecipeError, match=r"KeyError: .*(\n.*)*tried with the reference answer"):
        made(tmp_path, rewards=[{"name": "mine", "kind": "judge:good"}])


def test_the_command_prints_one_document(tmp_path, capsys):
    assert main(["value", str(written(tmp_path, **ASTAR)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["prompts"], told["generated"]) == (10, 30)
    assert main(["value", str(written(tmp_path, **ASTAR))]) == 0
    assert "0 answers are new" in capsys.readouterr().out
    assert main(["value", str(written(tmp_path))]) == 2
    assert "reads no V* table" in capsys.readouterr().err


def test_what_a_reward_imports_is_in_the_name_of_the_table(tmp_path):
    def name(limit):
        (tmp_path / "judge.py").write_text(
            "import limits\ndef good(answer, prompt, signals):\n    return limits.LIMIT\n"
        )
        (tmp_path / "limits.py").write_text(f"LIMIT = {limit}\n")
        recipe = recipe_in(tmp_path, **ASTAR, rewards=[{"name": "mine", "kind": "judge:good"}])
        return table_path(recipe, ingredients(recipe, [], tmp_path), tmp_path)

    assert name(1) == name(1)
    assert name(1) != name(2)


@pytest.mark.parametrize("place", [0, 70_000, 1_234_567, -1])
def test_every_byte_of_the_weights_is_in_the_name_of_the_table(tmp_path, place):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    weights, content = tmp_path / "model.safetensors", bytearray(3 * 2**20)
    files = ModelFiles(kind="folder", name="model", folder=tmp_path, file=None)
    weights.write_bytes(content)
    before = weights_digest(files)
    content[place] ^= 1
    weights.write_bytes(content)
    assert weights_digest(files) != before
    (tmp_path / "trainer_state.json").write_text("{}")
    content[place] ^= 1
    weights.write_bytes(content)
    assert weights_digest(files) == before


def test_a_run_goes_on_with_its_own_copy_as_it_was_and_no_other(tmp_path):
    made(tmp_path)
    run = start(tmp_path, **ASTAR, run__steps=1).folder
    longer = {"changes": ["run.steps=2"], "allow": ["run.steps"]}
    with pytest.raises(RecipeError, match=r"a resume cannot change it: vstar\.jsonl"):
        resume(run, changes=["algorithm.vstar.table=other.jsonl"], allow=["algorithm"])
    with pytest.raises(RecipeError, match="10 of 10 prompts have fewer than 4 answers"):
        resume(run, changes=["algorithm.vstar.samples=4"], allow=["algorithm"])
    copy = run / "vstar.jsonl"
    whole = copy.read_text()
    copy.write_text(whole.replace('"reward": 0.0', '"reward": 1.0', 1))
    assert copy.read_text() != whole
    with pytest.raises(RecipeError, match=r"vstar\.jsonl differs") as caught:
        resume(run, **longer)
    assert caught.value.problems[0].field == "algorithm.vstar.table"
    resume(run, changes=["run.steps=2"], allow=["run.steps", "algorithm.vstar.table"])
