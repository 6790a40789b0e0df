"""`key=value` on the command line."""

import pytest

from stretto.errors import RecipeError
from stretto.recipe.load import load_recipe, parse_recipe
from stretto.recipe.overrides import apply
from stretto.recipe.schema import Recipe


@pytest.mark.parametrize(
    ("data", "change", "expected"),
    [
        ({}, "seed=3", {"seed": 3}),
        ({}, "optimizer.lr=2e-4", {"optimizer": {"lr": 2e-4}}),
        ({}, "task.prompt=What is {a}+{b}?", {"task": {"prompt": "What is {a}+{b}?"}}),
        ({}, "task.prompt=a=b", {"task": {"prompt": "a=b"}}),
        ({"seed": 1}, "seed=", {"seed": None}),
        ({}, "algorithm.clip=[0.1, 0.2]", {"algorithm": {"clip": [0.1, 0.2]}}),
        ({}, "algorithm.kl={coef: 0.1}", {"algorithm": {"kl": {"coef": 0.1}}}),
        (
            {"algorithm": {"kl": {"coef": 1}}},
            "algorithm.kl.where=reward",
            {"algorithm": {"kl": {"coef": 1, "where": "reward"}}},
        ),
        ({"model": {"adapter": None}}, "model.adapter.rank=4", {"model": {"adapter": {"rank": 4}}}),
        ({"model": None}, "model.adapter.rank=4", {"model": {"adapter": {"rank": 4}}}),
        (
            {"rewards": [{"name": "a"}, {"name": "b"}]},
            "rewards.1.weight=2",
            {"rewards": [{"name": "a"}, {"name": "b", "weight": 2}]},
        ),
        ({"log": ["tensorboard"]}, "log.0=wandb", {"log": ["wandb"]}),
        ({}, "a.b.c=1", {"a": {"b": {"c": 1}}}),
    ],
)
def test_a_change_lands_where_it_says(data, change, expected):
    assert apply(data, change) == expected


def test_a_list_that_is_left_out_starts_from_its_default():
    assert parse_recipe(apply({}, "rewards.0.weight=2")).rewards[0].weight == 2
    assert parse_recipe(apply({}, "optimizer.betas.0=0.5")).optimizer.betas == (0.5, 0.95)
    assert Recipe().optimizer.betas == (0.9, 0.95)


def test_the_last_change_wins(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1")
    assert load_recipe(path, ["seed=2", "seed=3"]).seed == 3


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ("seed", "seed", "is no `key=value`"),
        ("=3", "=3", "is no `key=value`"),
        ("a..b=3", "a..b=3", "is no `key=value`"),
        ("seed.x=1", "seed.x", "`seed` is a single value"),
        ("seed.x.y=1", "seed.x", "`seed` is a single value"),
        ("rewards.5.weight=1", "rewards.5", "the last is rewards.0"),
        ("rewards.-1.weight=1", "rewards.-1", "has no item '-1'"),
        ("rewards.x=1", "rewards.x", "has no item 'x'"),
        ("rewards.99999999999999999999=1", "rewards.99999999999999999999", "has no item"),
        ("rewards.²=1", "rewards.²", "has no item"),
        ("log.0=x", "log.0", "it is empty"),
        ("seed=[1", "seed", "cannot be read as YAML"),
        ("seed={a: 1, a: 2}", "a", "again"),
        ("seed=*x", "seed", "cannot be read as YAML"),
    ],
)
def test_a_change_that_lands_nowhere_is_refused(change, field, reason):
    with pytest.raises(RecipeError) as caught:
        apply({"seed": 1, "rewards": [{}], "log": []}, change)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert reason in problem.reason


@pytest.mark.parametrize("data", [None, 3, [1], "text"])
def test_data_that_is_no_section_is_left_to_validation(data):
    assert apply(data, "seed=1") == data
