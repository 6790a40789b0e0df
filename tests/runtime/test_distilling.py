"""Runs that learn from a teacher, alone and on cells of their own."""

import asyncio

import pytest

from crewed import alone, distance, together
from running import lines, recipe_in, start
from sequential import Sequential
from stretto.checks.deep import deep_problems
from stretto.errors import RecipeError
from stretto.models.quantised import QuantisedLinear
from stretto.recipe.describe import objective


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The model of a run of a larger tiny model."""
    folder = tmp_path_factory.mktemp("teacher")
    return str(start(folder, run__steps=1, evaluate__every=0, model__scratch__width=32, seed=9).model)


@pytest.mark.parametrize(
    ("strategy", "algorithm", "changes"),
    [
        ("elastic", {"name": "distill", "top_k": 3}, {}),
        (
            "interleave",
            {"name": "distill", "reward_weight": 0.5},
            {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}},
        ),
        pytest.param("separate", {"name": "distill"}, {"batch__updates": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_strategy_ends_with_the_weights_of_one_device(strategy, algorithm, changes, teacher, tmp_path):
    changes = {"model__dtype": "float64", "optimizer__lr": 1e-4, "roles__teacher": {"name": teacher}, **changes}
    recipe = recipe_in(tmp_path, algorithm=algorithm, **changes)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    weights, crewed, metrics = asyncio.run(together(recipe, tmp_path, strategy))
    assert distance(single, weights) < 1e-10
    assert [each["loss"] for each in crewed] == pytest.approx([each["loss"] for each in reports], rel=1e-9)
    assert metrics["seconds/reference"] > 0


def test_the_kl_from_the_teacher_falls(teacher, tmp_path):
    changes = {"algorithm": {"name": "distill", "top_k": 8}, "roles__teacher": {"name": teacher}}
    folder = start(tmp_path, **changes, run__steps=12, optimizer__lr=0.003, guards__rehearsal=True).folder
    told = [row["distill/kl"] for row in lines(folder / "metrics.jsonl")[1:]]
    assert sum(told[-3:]) < 0.7 * sum(told[:3])


def problems(folder, **changes):
    with pytest.raises(RecipeError) as caught:
        recipe_in(folder, **changes)
    return {problem.field: problem.reason for problem in caught.value.problems}


def test_recipes_that_cannot_distil_are_refused(teacher, tmp_path):
    distill = {"name": "distill"}
    assert "learns from a teacher" in problems(tmp_path, algorithm=distill)["roles.teacher"]
    assert "asks no teacher" in problems(tmp_path, roles__teacher={"name": teacher})["roles.teacher"]
    named = {"roles__teacher": {"name": teacher}}
    assert "algorithm.kl.coef" in problems(tmp_path, algorithm={**distill, "kl": {"coef": 0.1}}, **named)
    assert "algorithm.top_k" in problems(tmp_path, algorithm={**distill, "top_k": 3}, engine__top_p=0.9, **named)
    assert (
        "nothing to teach"
        in problems(tmp_path, algorithm=distill, roles__teacher={"name": "scratch"})["roles.teacher.name"]
    )
    assert "roles.teacher.name" in problems(tmp_path, algorithm=distill, roles__teacher={"name": "./no"})
    recipe = recipe_in(tmp_path, algorithm={**distill, "top_k": 3}, **named)
    assert "KL(p, p_teacher)" in objective(recipe) and "3 likeliest tokens" in objective(recipe)
    assert deep_problems(recipe, tmp_path) == []


def test_a_teacher_is_not_stored_in_few_bits(teacher, tmp_path):
    changes = {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}, "model__quantize": "int8"}
    recipe = recipe_in(tmp_path, algorithm={"name": "distill"}, roles__teacher={"name": teacher}, **changes)
    plain = Sequential(recipe, tmp_path)
    try:
        worker = plain.worker
        stored = [
            any(isinstance(layer, QuantisedLinear) for layer in network.modules())
            for network in (worker.policy.network, worker.models["reference"].model.network)
        ]
        assert stored == [True, False]
    finally:
        asyncio.run(plain.close())
