"""Prompts of reasoning-gym: which there are, that they stay the same, and what is said about wrong settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import Holdout, Source, TaskSection
from stretto.tasks import gym, reasoning_gym
from stretto.tasks.source import load_prompts, peek, split

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
NOWHERE = Path()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are made in this process, which has the package already, instead of in one of their own."""
    monkeypatch.setattr(reasoning_gym, "_made", lambda request: json.loads(json.dumps(gym.make(**json.loads(request)))))


def task(name: str = "chain_sum", *, prompt: str | None = None, held: int = 0, **source: Any) -> TaskSection:
    source = {"count": 20, "config": SUMS if name == "chain_sum" else {}, **source}
    made = Source(kind="reasoning_gym", name=name, **source)
    return TaskSection(source=made, prompt=prompt, holdout=Holdout(prompts=held))


def refused(task: TaskSection) -> Problem:
    with pytest.raises(RecipeError) as caught:
        load_prompts(task, NOWHERE)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.usefixtures("here")
def test_a_prompt_carries_all_that_its_scorer_needs() -> None:
    first = load_prompts(task(), NOWHERE)[0]
    assert first.messages[0]["content"] == first.tags["question"]
    assert first.tags["task"] == "chain_sum"
    assert first.tags["config"] == SUMS
    assert first.tags["metadata"]["expression"] in first.tags["question"]
    assert first.reference is not None and first.reference.lstrip("-").isdigit()


@pytest.mark.usefixtures("here")
def test_prompts_follow_from_the_seed_and_more_extend_the_set() -> None:
    few = load_prompts(task(), NOWHERE)
    assert load_prompts(task(), NOWHERE) == few
    assert load_prompts(task(count=25), NOWHERE)[:20] == few
    assert peek(task(), NOWHERE).prompts == few[: reasoning_gym.FEW]
    assert {prompt.id for prompt in load_prompts(task(seed=1), NOWHERE)} != {prompt.id for prompt in few}


@pytest.mark.slow
def test_prompts_do_not_depend_on_the_order_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for seed in ("1", "2"):
        monkeypatch.setitem(os.environ, "PYTHONHASHSEED", seed)
        reasoning_gym._made.cache_clear()
        made.append(load_prompts(task("isomorphic_strings"), NOWHERE))
    assert made[0] == made[1]


@pytest.mark.usefixtures("here")
def test_every_question_comes_once_and_its_id_is_its_own() -> None:
    prompts = load_prompts(task(count=80), NOWHERE)
    assert len({prompt.id for prompt in prompts}) == len({prompt.tags["question"] for prompt in prompts}) == 80
    train, heldout = split(prompts, Holdout(prompts=30))
    assert not {prompt.tags["question"] for prompt in train} & {prompt.tags["question"] for prompt in heldout}


@pytest.mark.usefixtures("here")
def test_a_template_and_a_system_message_go_around_the_question() -> None:
    made = task(prompt="{question} Just the number.").model_copy(update={"system": "Be brief."})
    system, user = load_prompts(made, NOWHERE)[0].messages
    assert system["content"] == "Be brief."
    assert user["content"].endswith("? Just the number.") or user["content"].endswith(" Just the number.")
    assert load_prompts(made, NOWHERE)[0].id == load_prompts(task(), NOWHERE)[0].id


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("source", "field", "says"),
    [
        ({"name": "chain_sums"}, "task.source.name", "did you mean chain_sum?"),
        ({"name": "x" * 500}, "task.source.name", "has no task"),
        ({"config": {"min_term": 3}}, "task.source.config.min_term", "did you mean min_terms?"),
        ({"config": {"min_terms": 0}}, "task.source.config", "min_terms must be positive"),
        ({"config": {"min_terms": "two"}}, "task.source.config", "chain_sum refuses these settings"),
        ({"config": {"seed": 3}}, "task.source.config.seed", "task.source.seed"),
        ({"config": {"size": 3}}, "task.source.config.size", "task.source.count"),
        ({"seed": -1}, "task.source.seed", "negative"),
        ({"count": 1_000_000}, "task.source.count", "too many"),
        ({"count": 500}, "task.source.count", "different ones"),
        ({"held": 20}, "task.holdout.prompts", "leaves none to train on"),
        ({"prompt": "{quesion}"}, "task.prompt", "the columns are: question"),
        ({"name": "composite", "config": {"datasets": [{"name": "chain_sum"}]}}, "task.source.config", "missing"),
    ],
)
def test_wrong_settings_are_told(source: dict[str, Any], field: str, says: str) -> None:
    problem = refused(task(**source))
    assert problem.field == field
    assert says in str(problem)
    assert len(str(problem)) < 400


@pytest.mark.usefixtures("here")
def test_a_mix_of_tasks_is_a_task() -> None:
    datasets = [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "gcd")]
    prompts = load_prompts(task("composite", config={"datasets": datasets}), NOWHERE)
    assert {prompt.tags["metadata"]["source_dataset"] for prompt in prompts} == {"chain_sum", "gcd"}


def test_a_process_that_fails_or_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "SECONDS", 0.01)
    assert "did not make its prompts within 0.01 s" in refused(task(seed=11)).reason
    monkeypatch.undo()
    monkeypatch.setattr(reasoning_gym.gym, "__file__", "/nowhere/gym.py")
    assert "failed while it made prompts" in refused(task(seed=12)).reason


def test_a_missing_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.extras.find_spec", lambda name: None)
    problem = refused(task())
    assert problem.field == "task.source.kind"
    assert problem.fix.startswith("pip install '") and "'reasoning-gym" in problem.fix
