"""Filling in what follows from other keys, and writing it down."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.catalog import CATALOG
from stretto.api.recipes import PROBES
from stretto.checks.recipe import check
from stretto.recipe import yaml_io
from stretto.recipe.load import load_recipe, parse_recipe
from stretto.recipe.resolve import default_rate, dump, resolve

VARIANTS = [
    {},
    {"model": {"name": "scratch"}},
    {"algorithm": {"name": "reinforce"}, "batch": {"samples": 1}},
    {"algorithm": {"clip": [0.0, 0.5]}},
    {"evaluate": {"every": 0}},
    {"task": {"source": {"name": "sort", "length": [1, 2], "count": 30}}},
    {"task": {"source": {"kind": "jsonl", "path": "a.jsonl"}}},
    {"task": {"source": {"kind": "hf", "path": "folder", "split": "test"}}},
    {
        "task": {
            "source": {"kind": "reasoning_gym", "name": "chain_sum", "config": {"min_terms": 2, "odd": [1, None]}}
        },
        "rewards": [{"kind": "reasoning_gym"}, {"name": "own", "kind": "reasoning_gym", "deadline": 5.0}],
    },
    {"rewards": [{"kind": "regex", "pattern": "x"}, {"name": "b", "kind": "exact"}]},
]


@pytest.mark.parametrize("data", VARIANTS)
def test_resolving_twice_changes_nothing(data):
    once = resolve(parse_recipe(data))
    assert resolve(once) == once


@pytest.mark.parametrize("data", VARIANTS)
def test_a_written_recipe_loads_back_equal(data, tmp_path):
    recipe = resolve(parse_recipe(data))
    path = tmp_path / "r.yaml"
    path.write_text(dump(recipe), "utf-8")
    loaded = load_recipe(path)
    assert loaded == recipe
    assert resolve(loaded) == recipe
    assert dump(loaded) == dump(recipe)


def test_a_resolved_recipe_is_as_right_as_it_was(right):
    for data in (
        right,
        right | {"evaluate": {"every": 0}},
        right | {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}},
    ):
        recipe = parse_recipe(data)
        assert check(recipe, root=Path.cwd(), probes=PROBES) == []
        assert check(resolve(recipe), root=Path.cwd(), probes=PROBES) == []


def test_a_scorer_of_reasoning_gym_has_time_to_load_unless_the_recipe_says_otherwise():
    data = {"rewards": [{"kind": "reasoning_gym"}, {"name": "own", "kind": "reasoning_gym", "deadline": 5.0}]}
    assert [part.deadline for part in resolve(parse_recipe(data)).rewards] == [25.0, 5.0]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1))
def test_any_text_survives_being_written(tmp_path_factory, text):
    recipe = parse_recipe({"task": {"prompt": text}, "model": {"scratch": {"characters": text}}})
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(dump(recipe).encode())
    assert load_recipe(path) == recipe


@pytest.mark.parametrize("name", CATALOG)
def test_the_clip_range_comes_from_the_catalog(name):
    algorithm = resolve(parse_recipe({"algorithm": {"name": name}})).algorithm
    assert getattr(algorithm, "clip", None) == CATALOG[name].clip


def test_a_value_that_was_given_is_never_replaced():
    given_values = {
        "algorithm": {"clip": [0.1, 0.9]},
        "model": {"name": "scratch", "scratch": {"layers": 1}},
        "task": {"source": {"name": "addition", "max": 3}},
        "rewards": [{"kind": "regex", "pattern": "x", "compare": "numeric"}],
        "optimizer": {"lr": 1.0e-3},
    }
    assert resolve(parse_recipe(given_values)) == parse_recipe(given_values)


def test_nothing_is_best_where_nothing_is_evaluated():
    assert resolve(parse_recipe({"evaluate": {"every": 0}})).checkpoint.best is None
    assert resolve(parse_recipe({})).checkpoint.best == "eval/accuracy"


def test_where_a_teacher_says_all_nobody_judges_unless_the_recipe_wants_it():
    taught = resolve(parse_recipe({"algorithm": {"name": "distill"}}))
    assert (taught.rewards, taught.evaluate.every, taught.checkpoint.best) == ((), 0, None)
    assert resolve(taught) == taught
    judged = resolve(parse_recipe({"algorithm": {"name": "distill"}, "rewards": [{"kind": "exact"}]}))
    assert (len(judged.rewards), judged.evaluate.every, judged.checkpoint.best) == (1, 10, "eval/accuracy")
    added = resolve(parse_recipe({"algorithm": {"name": "distill", "reward_weight": 0.5}}))
    assert [part.kind for part in added.rewards] == ["numeric"] and added.evaluate.every == 10
    assert resolve(parse_recipe({"algorithm": {"name": "distill"}, "evaluate": {"every": 3}})).evaluate.every == 3


@pytest.mark.parametrize(
    ("model", "given", "rate"),
    [
        ({"adapter": None}, {}, 9.8e-7),
        ({}, {}, 7.8e-6),
        ({}, {"lr": "auto"}, 7.8e-6),
        ({"adapter": None}, {"lr": 2e-4}, 2e-4),
        ({"name": "scratch", "adapter": None, "scratch": {"width": 80}}, {}, 5e-5),
    ],
)
def test_resolve_makes_an_open_rate_fall_with_the_hidden_size(model, given, rate):
    found = resolve(parse_recipe({"model": model, "optimizer": given}), lambda section: section.width or 4096)
    assert found.optimizer.lr == rate
    assert found.optimizer.warmup == (0 if given == {"lr": 2e-4} else 5)
    assert resolve(found) == found


@pytest.mark.parametrize(
    ("width", "lora", "from_rows", "rate"),
    [
        (576, True, False, 2.1e-5),  # 5e-4 / 24
        (4096, True, False, 7.8e-6),  # 5e-4 / 64
        (576, True, True, 1.7e-4),  # 4e-3 / 24
        (4096, True, True, 6.3e-5),  # 4e-3 / 64
        (576, False, False, 6.9e-6),  # 0.004 / 576
        (4096, False, False, 9.8e-7),  # 0.004 / 4096
        (4096, False, True, 2e-6),  # 0.008 / 4096
    ],
)
def test_default_rate_falls_with_the_hidden_size_or_its_root_for_lora(width, lora, from_rows, rate):
    assert default_rate(width, lora=lora, from_rows=from_rows) == rate


def test_resolve_gives_lora_that_learns_from_rows_a_higher_rate():
    def rates(recipe):
        found = resolve(parse_recipe(recipe), lambda section: 4096)
        critic = found.roles.critic
        return found.optimizer.lr, critic and critic.optimizer.lr

    critic = {"name": "org/critic", "optimizer": {}}
    assert rates({"algorithm": {"name": "sft"}}) == (6.3e-5, None)
    assert rates({"algorithm": {"name": "ppo"}, "roles": {"critic": {**critic, "adapter": {}}}}) == (7.8e-6, 6.3e-5)
    assert rates({"algorithm": {"name": "ppo"}, "roles": {"critic": critic}}) == (7.8e-6, 2e-6)


def test_resolve_leaves_an_open_rate_where_the_hidden_size_is_not_known():
    assert resolve(parse_recipe({"model": {"name": "org/name"}})).optimizer.lr == "auto"


def test_resolve_keeps_a_warmup_below_the_updates_of_a_short_run():
    short = resolve(parse_recipe({"model": {"name": "scratch"}, "run": {"steps": 2}}))
    assert short.optimizer.warmup == 1
    told = resolve(parse_recipe({"model": {"name": "scratch"}, "optimizer": {"warmup": 7}}))
    assert told.optimizer.warmup == 7


@pytest.mark.parametrize(
    ("recipe", "read", "value"),
    [
        ({"task": {"source": {"name": "reverse", "length": [2, 2]}}}, lambda r: r.task.source.count, 100),
        ({"task": {"source": {"name": "copy", "alphabet": "ab"}}}, lambda r: r.task.source.count, 56),
        ({"task": {"source": {"name": "latest", "kinds": 13}}}, lambda r: r.task.source.letters, 4),
        ({"task": {"holdout": {"prompts": 0}}}, lambda r: (r.evaluate.every, r.checkpoint.best), (0, None)),
        ({"batch": {"lengths": {"prompt": 9}}}, lambda r: r.batch.lengths.response.cap, 24),
        (
            {"engine": {"max_new_tokens": 900}, "batch": {"lengths": {"response": {"mean": 200.0}}}},
            lambda r: r.batch.lengths.response.cap,
            900,
        ),
        (
            {"model": {"name": "scratch", "scratch": {"context": 20}}},
            lambda r: r.engine.max_new_tokens,
            10,
        ),
    ],
)
def test_resolve_fits_a_default_to_what_was_written(recipe, read, value):
    found = resolve(parse_recipe(recipe))
    assert read(found) == value
    assert read(resolve(parse_recipe(yaml_io.read(dump(found), name="r")[0]))) == value


@pytest.mark.parametrize(
    ("recipe", "prompts", "held"),
    [
        ({}, 2000, 100),
        ({}, 200, 20),
        ({}, 5, 1),
        ({}, 1, 0),
        ({"evaluate": {"prompts": 300}}, 2000, 300),
        ({"evaluate": {"prompts": 60}}, 400, 60),
        ({"evaluate": {"prompts": 300, "every": 0}}, 2000, 300),
        ({"task": {"holdout": {"prompts": 40}}}, 50, 40),
    ],
)
def test_recipe_holds_out_at_most_a_tenth_unless_told(recipe, prompts, held):
    assert resolve(parse_recipe(recipe)).held_out(prompts) == held
