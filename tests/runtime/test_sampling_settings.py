"""Whole runs with top-p, top-k, stop texts and prompts that are dropped."""

from __future__ import annotations

import json

import pytest

from running import lines, metrics, recipe_in, start
from stretto.errors import RecipeError
from stretto.recipe.schema import Holdout
from stretto.runtime import questions
from stretto.tasks.source import load_prompts, split


@pytest.mark.parametrize("cut", [{"engine__top_p": 0.8}, {"engine__top_k": 2}])
def test_engine_and_trainer_agree_as_without(tmp_path, cut):
    run = start(tmp_path, **cut, optimizer__lr=0.0, batch__updates=2, run__steps=2, evaluate__every=0)
    counted = metrics(run.folder)
    assert all(line["kl/engine_trainer"] <= 1e-6 for line in counted)
    assert all(line["ess"] > 0.999999 for line in counted)
    assert all(1 <= line["kept/mean"] <= cut.get("engine__top_k", 16) for line in counted)


def test_a_stop_text_ends_answers_and_is_part_of_them(tmp_path):
    run = start(tmp_path, engine__stop=["1"], run__steps=1, evaluate__every=0)
    answers = [row["answer"] for row in lines(run.folder / "samples" / "step-000001.jsonl")]
    assert any(answer.endswith("1") for answer in answers)
    assert all("1" not in answer[:-1] for answer in answers)


def test_long_prompts_are_dropped_and_counted_and_all_of_them_refused(tmp_path):
    source = {"kind": "synthetic", "name": "copy", "length": [1, 4], "alphabet": "01", "count": 30}
    task = {"source": source, "prompt": "{text}=", "holdout": {"prompts": 4}, "drop_longer_than": 5}
    told = []
    run = start(tmp_path, task=task, run__steps=2, evaluate__every=0, at=lambda *values: told.append(values))
    rows = [row for step in (1, 2) for row in lines(run.folder / "samples" / f"step-{step:06d}.jsonl")]
    assert {len(row["messages"][0]["content"]) for row in rows} <= {2, 3}
    assert any("prompts are too long and are dropped" in str(values) for values in told)
    with pytest.raises(RecipeError, match="drops every prompt to train on"):
        start(tmp_path, task={**task, "drop_longer_than": 2}, run__steps=1, evaluate__every=0)


def test_an_evaluation_needs_a_prompt_that_is_not_dropped(tmp_path):
    rows = [{"id": str(size), "prompt": "0" * size + "=", "answer": "0"} for size in range(1, 7)]
    (tmp_path / "zeros.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"source": {"kind": "jsonl", "path": "zeros.jsonl"}, "holdout": {"prompts": 1}}
    prompts = load_prompts(recipe_in(tmp_path, task=task, evaluate__prompts=1).task, tmp_path)
    held = [(seed, split(prompts, Holdout(prompts=1, seed=seed))[1][0]) for seed in range(20)]
    seed, longest = next((seed, int(prompt.id)) for seed, prompt in held if int(prompt.id) > 3)
    task |= {"holdout": {"prompts": 1, "seed": seed}, "drop_longer_than": longest + 2}  # of longest + 3 tokens
    asked = {"task": task, "evaluate__prompts": 1, "run__steps": 1}
    with pytest.raises(RecipeError, match="drops every prompt that is held out"):
        start(tmp_path, **asked)
    run = start(tmp_path, **asked, evaluate__every=0)
    with pytest.raises(RecipeError, match="drops every prompt that is held out"):
        questions.evaluate_run(run.folder)
