"""Recipes that learn from rows: keys that would then do nothing are refused, and so are rows of another kind."""

import json

import pytest

from stretto.api.recipes import PROBES, open_recipe
from stretto.checks.recipe import examine
from stretto.checks.rules.base import CheckContext
from stretto.checks.rules.rows import answers_are_shown
from stretto.errors import RecipeError
from stretto.types import Prompt

SCRATCH = {"name": "scratch", "scratch": {"characters": "01=", "context": 32}, "adapter": None, "dtype": "float32"}
TASK = {"source": {"kind": "jsonl", "path": "rows.jsonl"}, "holdout": {"prompts": 2}}
RECIPE = {"model": SCRATCH, "task": TASK, "algorithm": {"name": "sft"}, "evaluate": {"prompts": 2}}
PAIRS = RECIPE | {"algorithm": {"name": "reward_model"}}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Writes rows beside the recipe, by default some that serve for both."""

    def write(*more):
        usual = [{"id": n, "prompt": f"{n:b}=", "completion": "1", "chosen": "1", "rejected": "0"} for n in range(8)]
        text = "".join(f"{json.dumps({'id': 'last', **row})}\n" for row in (*usual, *more))
        (tmp_path / "rows.jsonl").write_text(text)
        return tmp_path

    monkeypatch.chdir(tmp_path)
    write()
    return write


def problems(recipe, folder, changes=()):
    _, found = examine(recipe, changes, root=folder, probes=PROBES)
    return {problem.field: problem for problem in found}


@pytest.mark.parametrize("recipe", [RECIPE, PAIRS], ids=["sft", "reward_model"])
def test_such_recipes_are_short_and_what_they_leave_out_is_filled_in(recipe, rows, tmp_path):
    opened, found = examine(recipe, root=tmp_path, probes=PROBES)
    assert found == ()
    assert opened.rewards == () and opened.batch.samples == 1 and opened.model.scratch.warmup_steps == 0
    assert opened.task.source.rows == ("pairs" if recipe is PAIRS else "demonstrations")
    assert examine(opened, root=tmp_path, probes=PROBES) == (opened, ())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("batch.samples=4", "batch.samples"),
        ("batch.updates=2", "batch.updates"),
        ("batch.epochs=2", "batch.epochs"),
        ("algorithm.kl.coef=0.1", "algorithm.kl.coef"),
        ("algorithm.credit=turn", "algorithm.credit"),
        ("algorithm.correction.cap=3.0", "algorithm.correction.cap"),
        ("engine.speculate=true", "engine.speculate"),
        ("evaluate.pass_k=4", "evaluate.pass_k"),
        ("guards.max_k3=0.1", "guards.max_k3"),
        ("task.source.rows=prompts", "task.source.rows"),
        ("roles.critic={name: scratch}", "roles.critic"),
        ("roles.reward_model={name: scratch}", "roles.reward_model"),
        ("algorithm.clip=[0.1, 0.1]", "algorithm.clip"),
    ],
)
@pytest.mark.parametrize("recipe", [RECIPE, PAIRS], ids=["sft", "reward_model"])
def test_a_key_that_would_do_nothing_is_refused(recipe, change, field, rows, tmp_path):
    assert field in problems(recipe, tmp_path, [change])


@pytest.mark.parametrize("key", ["max_new_tokens=16", "temperature=0.7", "top_p=0.9", "top_k=8", "stop=['0']"])
def test_how_the_finished_model_is_asked_may_be_told_where_it_answers(key, rows, tmp_path):
    assert problems(RECIPE, tmp_path, [f"engine.{key}"]) == {}
    assert f"engine.{key.partition('=')[0]}" in problems(PAIRS, tmp_path, [f"engine.{key}"])


def test_only_a_reward_model_has_pairs_and_no_rewards(rows, tmp_path):
    assert "task.source.ranking" in problems(RECIPE, tmp_path, ["task.source.ranking.best=0.5"])
    assert "rewards" in problems(PAIRS, tmp_path, ["rewards=[{name: a, kind: exact}]"])
    assert "task.source.kind" in problems(PAIRS, tmp_path, ["task.source={kind: synthetic, name: copy}"])
    assert "rewards" in problems(RECIPE, tmp_path, ["algorithm.name=grpo", "rewards=[]"])
    assert problems(RECIPE, tmp_path, ["rewards=[{name: a, kind: exact}]", "engine.max_new_tokens=8"]) == {}


def test_prompts_without_answers_show_nothing_and_nothing_is_planned(rows, tmp_path):
    assert "algorithm.name" in {p.field for p in examine(RECIPE, root=tmp_path, probes=PROBES, planning=True)[1]}
    prompts = (Prompt(id="p", messages=({"role": "user", "content": "?"},)),)
    unanswered = CheckContext(root=tmp_path, probes=PROBES, prompts=prompts, complete=True)
    opened, _ = examine(RECIPE, root=tmp_path, probes=PROBES)
    assert [problem.field for problem in answers_are_shown(opened, unanswered)] == ["task.source"]


def test_a_row_that_is_too_long_is_named_by_its_line(rows, tmp_path):
    folder = rows({"prompt": "0=", "completion": "1" * 40, "chosen": "1" * 40, "rejected": "0"})
    for recipe in (RECIPE, PAIRS):
        with pytest.raises(RecipeError) as caught:
            open_recipe(recipe, deep=True)
        (problem,) = caught.value.problems
        assert problem.field == f"{folder / 'rows.jsonl'}:9"
        assert "more than the context of 32" in problem.reason and "drop_longer_than" in problem.fix
        assert open_recipe(recipe, ["task.drop_longer_than=auto"], deep=True)


def test_a_row_that_a_scratch_model_cannot_spell_is_named_too(rows, tmp_path):
    folder = rows({"prompt": "0=", "completion": "1x", "chosen": "1x", "rejected": "0"})
    with pytest.raises(RecipeError) as caught:
        open_recipe(RECIPE, deep=True)
    assert f"{folder / 'rows.jsonl'}:9" in [problem.field for problem in caught.value.problems]
