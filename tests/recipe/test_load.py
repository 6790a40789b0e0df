"""Files and data into recipes: form only, every problem at once, in words that help."""

import json

import pytest

from stretto.errors import RecipeError
from stretto.recipe.load import load_recipe, parse_recipe, read_data
from stretto.recipe.schema import Recipe


def refusals(data):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data)
    return {problem.field: problem for problem in caught.value.problems}


def only(data):
    (problem,) = refusals(data).values()
    return problem


def test_a_recipe_that_says_nothing_is_the_default():
    assert parse_recipe({}) == Recipe()


def test_a_file_is_loaded(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("optimizer: {lr: 2e-4}\nalgorithm:\n  clip: [0.1, 0.3]\n", "utf-8")
    recipe = load_recipe(path)
    assert recipe.optimizer.lr == 2e-4
    assert recipe.algorithm.clip == (0.1, 0.3)


def test_a_cluster_file_beside_the_recipe_is_found_from_everywhere(tmp_path):
    (tmp_path / "mine.yaml").write_text("hosts: [{device: H100, devices: 2}]\n")
    path = tmp_path / "r.yaml"
    path.write_text("placement: {cluster: mine.yaml}\n")
    assert load_recipe(path).placement.cluster == str(tmp_path / "mine.yaml")
    assert load_recipe(path, ["placement.cluster=8xH100"]).placement.cluster == "8xH100"
    assert load_recipe(path, ["placement.cluster=none.yaml"]).placement.cluster == "none.yaml"
    (tmp_path / "auto").touch()
    assert load_recipe(path, ["placement.cluster=auto"]).placement.cluster == "auto"


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 3\n")
    assert load_recipe(path).seed == 3


def test_all_problems_come_at_once():
    found = refusals({"sead": 1, "batch": {"samples": "8", "sampels": 2}, "run": None, "engine": {"kind": "natve"}})
    assert list(found) == ["batch.samples", "batch.sampels", "engine.kind", "run", "sead"]


@pytest.mark.parametrize(
    ("data", "field", "fix"),
    [
        ({"sead": 1}, "sead", "did you mean `seed`?"),
        ({"batch": {"sampels": 1}}, "batch.sampels", "did you mean `batch.samples`?"),
        ({"lr": 1}, "lr", "did you mean `optimizer.lr`?"),
        ({"batch": {"lr": 1}}, "batch.lr", "did you mean `optimizer.lr`?"),
        ({"estimator": "k1"}, "estimator", "did you mean `algorithm.kl.estimator`?"),
        ({"algorithm": {"cap": 3.0}}, "algorithm.cap", "did you mean `algorithm.correction.cap`?"),
        ({"weight": 1}, "weight", "did you mean `rewards.0.weight`?"),
        ({"max_new_tokns": 1}, "max_new_tokns", "did you mean `engine.max_new_tokens`?"),
        (
            {"task": {"source": {"kind": "jsonl", "path": "x", "columns": {"promt": "x"}}}},
            "task.source.columns.promt",
            "`task.source.columns.prompt`",
        ),
        ({"rewards": [{"kin": "exact"}]}, "rewards.0.kin", "did you mean `rewards.0.kind`?"),
        ({"roles": {"reference": {"nam": "x"}}}, "roles.reference.nam", "did you mean `roles.reference.name`?"),
        ({"evaluate": {"xyz": 1}}, "evaluate.xyz", "the keys here are every, prompts, pass_k"),
        (
            {"model": {"shape": {"kv": 1, "layers": 1, "hidden": 1, "heads": 1, "ffn": 1, "vocab": 1}}},
            "model.shape.kv",
            "layers",
        ),
    ],
)
def test_an_unknown_key_is_sent_where_it_may_belong(data, field, fix):
    problem = only(data)
    assert problem.field == field
    assert "no such key" in problem.reason
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("data", "field", "reason"),
    [
        ({"seed": 1.5}, "seed", "got the number 1.5, expected int"),
        ({"seed": True}, "seed", "got true, expected int"),
        ({"batch": {"samples": 0}}, "batch.samples", "got the number 0, expected int >= 1"),
        ({"batch": {"samples": "many"}}, "batch.samples", "got the text 'many'"),
        ({"batch": {"samples": None}}, "batch.samples", "got null"),
        ({"batch": {"token_budget": 0.5}}, "batch.token_budget", "expected 'auto' or int >= 1"),
        ({"engine": {"top_p": 2}}, "engine.top_p", "expected float in (0, 1]"),
        ({"engine": {"memory_share": -1}}, "engine.memory_share", "expected 'auto' or float in [0, 1]"),
        ({"engine": {"speculate": 3}}, "engine.speculate", "expected 'auto' or true or false"),
        ({"engine": {"kind": "x"}}, "engine.kind", "there is no engine 'x'"),
        ({"engine": {"kind": 3}}, "engine.kind", "got the number 3"),
        ({"algorithm": {"clip": [0.2]}}, "algorithm.clip", "got a list of 1, expected list of 2"),
        ({"algorithm": {"clip": [0.1, 0.2, 0.3]}}, "algorithm.clip", "got a list of 3"),
        ({"algorithm": {"clip": [0.2, -1]}}, "algorithm.clip.1", "expected float >= 0"),
        ({"rewards": [3]}, "rewards.0", "expected section (name, kind"),
        ({"rewards": {"kind": "exact"}}, "rewards", "got a section, expected list"),
        ({"rewards": [{"name": "a b"}]}, "rewards.0.name", "expected string that matches ^[A-Za-z0-9_]+$"),
        (
            {"model": {"adapter": {"targets": 3}}},
            "model.adapter.targets",
            "expected 'all-linear' or 'attention' or list",
        ),
        ({"model": {"scratch": {"characters": ""}}}, "model.scratch.characters", "expected non-empty string"),
        (
            {"task": {"source": {"name": "sort", "alphabet": "a"}}},
            "task.source.alphabet",
            "string of at least 2 characters",
        ),
        ({"roles": {"reference": 3}}, "roles.reference", "expected 'adapter-off' or section (name, shape) or null"),
        ({"placement": {"cells": [1]}}, "placement.cells.0", "expected section"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr", "nan is not a finite number"),
        ({"deadlines": {"start": float("inf")}}, "deadlines.start", "inf is not a finite number"),
        ({"seed": 2**53 + 1}, "seed", "too large"),
        ({"task": {"prompt": "a\0"}}, "task.prompt", "no text"),
        ({"task": {"prompt": "\ud800"}}, "task.prompt", "no text"),
        ({"\ud800": 1}, "\ud800", "no text"),
        ({"batch": {"a\0": []}}, "batch.a\0", "no text"),
        ({"placement": {"cells": [{"a": [[[[[[[[[[[[1]]]]]]]]]]]]}]}}, "placement.cells", "nested too deeply"),
    ],
)
def test_a_value_that_does_not_fit_is_told_what_would(data, field, reason):
    problem = only(data)
    assert problem.field == field
    assert reason in problem.reason
    assert problem.fix


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ({"batch": {"samples": "8"}}, "write it without quotes: 8"),
        ({"log": "tensorboard"}, "write it as a list: [tensorboard]"),
        ({"engine": {"kind": "natve"}}, "did you mean 'native'?"),
        ({"model": {"dtype": "bflot16"}}, "did you mean 'bfloat16'?"),
        ({"batch": {"samples": 0}}, "leave it out for the default, 8"),
        ({"run": None}, "leave the key out to get its defaults"),
    ],
)
def test_the_fix_is_what_one_would_type(data, fix):
    assert fix in only(data).fix


@pytest.mark.parametrize("section", [name for name in Recipe.model_fields if name not in ("seed", "rewards", "log")])
def test_null_is_no_section(section):
    problem = only({section: None})
    assert problem.field == section
    assert "a section is needed" in problem.reason


def test_sections_that_may_be_null_may_be_null():
    recipe = parse_recipe({"model": {"adapter": None, "scratch": None}, "roles": {"reference": None}})
    assert recipe.model.adapter is None
    assert recipe.roles.reference is None


def test_a_section_that_lacks_keys_names_each():
    found = refusals({"model": {"shape": {"layers": 1}}})
    assert set(found) == {f"model.shape.{key}" for key in ("hidden", "heads", "ffn", "vocab")}
    assert "is missing" in found["model.shape.ffn"].reason


@pytest.mark.parametrize(
    ("data", "reason"), [(None, "is empty"), ([1], "a list of 1"), ("text", "the text 'text'"), (3, "3")]
)
def test_data_that_is_no_section_is_refused(data, reason):
    problem = only(data)
    assert problem.field == "recipe"
    assert reason in problem.reason


def test_what_can_be_read_is_kept_for_further_checks():
    reading = read_data({"seed": 5, "batch": {"samples": "x", "promts": 3}, "rewards": [{"kind": 3}, 7], "lr": 1})
    assert reading.recipe is not None
    assert reading.recipe.seed == 5
    assert reading.recipe.batch == Recipe().batch
    assert {"batch.samples", "batch.promts", "batch.prompts", "optimizer.lr", "rewards.0.kind"} <= reading.doubtful


def test_reading_leaves_the_data_alone():
    data = {"seed": "x", "batch": {"samples": 0}}
    before = json.dumps(data)
    read_data(data)
    assert json.dumps(data) == before


def test_errors_name_no_terms_of_pydantic():
    found = refusals(
        {
            "seed": "x",
            "model": {"shape": {}, "adapter": {"targets": [1]}},
            "roles": {"critic": 3},
            "batch": {"lengths": []},
        }
    )
    text = " ".join(str(problem) for problem in found.values()).lower()
    for word in ("pydantic", "input", "model_type", "tuple", "dict", "none", "str ", "bool", "literal"):
        assert word not in text


def broken_files(folder):
    (folder / "empty.yaml").write_text("")
    (folder / "comment.yaml").write_text("# nothing\n")
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    (folder / "large.yaml").write_text("# " + "x" * 300_000)
    (folder / "broken.yaml").write_text("a: [")
    (folder / "folder.yaml").mkdir()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty.yaml", "is empty"),
        ("comment.yaml", "is empty"),
        ("binary.yaml", "not text in UTF-8"),
        ("large.yaml", "larger than 64 KiB"),
        ("broken.yaml", "cannot be read as YAML"),
        ("folder.yaml", "is not a file"),
        ("absent.yaml", "there is no such file"),
        ("x" * 5000, "there is no such file"),
        ("nul\0", "there is no such file"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, name, reason):
    broken_files(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / name)
    (problem,) = caught.value.problems
    assert reason in problem.reason


def test_a_misspelt_file_gets_a_hint(tmp_path):
    (tmp_path / "reverse.yaml").write_text("seed: 1")
    with pytest.raises(RecipeError, match=r"did you mean .*reverse\.yaml"):
        load_recipe(tmp_path / "revers.yaml")


def test_keys_given_twice_and_wrong_values_come_together(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nseed: x\nbatch: {samples: 0}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["nonsense", "evaluate.every=x"])
    assert [problem.field for problem in caught.value.problems] == [
        "seed",
        "nonsense",
        "batch.samples",
        "evaluate.every",
    ]
