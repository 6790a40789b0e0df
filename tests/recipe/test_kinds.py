"""Sections of several kinds: each has its own keys, and a recipe that mixes kinds up is told what belongs where."""

import pickle
from pathlib import Path

import pytest

from stretto.algorithms.catalog import CATALOG
from stretto.api.recipes import PROBES
from stretto.checks.recipe import examine
from stretto.environments import resolve
from stretto.errors import RecipeError
from stretto.recipe.load import load_recipe, parse_recipe
from stretto.recipe.schema import (
    AlgorithmSection,
    EngineSection,
    EnvironmentSection,
    NumericReward,
    Recipe,
    RegexReward,
    RewardPart,
    Source,
    choices_in,
)
from stretto.recipe.schema_text import defaults_of

SECTIONS = {
    "task.source": Source,
    "environment": EnvironmentSection,
    "rewards.0": RewardPart,
    "algorithm": AlgorithmSection,
    "engine": EngineSection,
}
"""Dotted name -> the section with kinds that stands there."""
OWN = "mine:f"
REQUIRED = {
    "path": "x",
    "pattern": "x",
    "name": "chain_sum",
    "target": 10,
    "taskset": "games",
    "command": ("agent",),
    "url": "http://x",
}
"""Keys that some kinds cannot do without."""


def named(record):
    """The keys of one kind that it cannot do without."""
    told = {key: value if (value := record.values(key)[0]) != "module:name" else OWN for key in record.label()}
    return told | {
        key: REQUIRED[key] for key, field in record.model_fields.items() if field.is_required() and key not in told
    }


def at(path, section):
    """The data of a recipe that has this section and nothing else."""
    data = section
    for key in reversed(path.split(".")):
        data = [data] if key == "0" else {key: data}
    return data


def refusals(data):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data)
    return {problem.field: problem for problem in caught.value.problems}


KINDS = [(path, record) for path, union in SECTIONS.items() for record in union.records()]


@pytest.mark.parametrize(("path", "record"), KINDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_kind_is_made_by_its_keys_and_survives_the_way_to_a_worker(path, record):
    (section,) = (found for name, found in choices_in(parse_recipe(at(path, named(record)))) if name == path)
    assert type(section) is record
    assert record.union()(**named(record)) == section == pickle.loads(pickle.dumps(section))
    assert load_recipe(at(path, section)) == parse_recipe(at(path, named(record)))


@pytest.mark.parametrize(("path", "record"), KINDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_key_of_another_kind_is_refused_with_the_kind_that_it_belongs_to(path, record):
    union = SECTIONS[path]
    foreign = defaults_of(union).keys() - record.model_fields.keys()
    for key in foreign:
        problem = refusals(at(path, named(record) | {key: [["no default"]]}))[f"{path}.{key}"]
        owners = [owner for owner in union.records() if key in owner.model_fields]
        names = problem.reason.partition("; it belongs to ")[2]
        assert "has no effect on" in problem.reason
        assert any(owner.values(owner.label()[-1])[0] in names for owner in owners)
        assert "module:name" not in names or all("module:name" in owner.values(owner.label()[-1]) for owner in owners)


def test_a_key_of_another_kind_says_what_to_write():
    (problem,) = refusals({"rewards": [{"pattern": "x"}]}).values()
    assert str(problem.reason) == "has no effect on kind numeric; it belongs to regex, reasoning_gym"
    assert problem.fix == "take it out, or use kind: regex"
    (problem,) = refusals({"task": {"source": {"kind": "jsonl", "path": "x", "max": 3}}}).values()
    assert problem.fix == "take it out, or use kind: synthetic, name: addition"
    (problem,) = refusals({"engine": {"url": "http://x"}}).values()
    assert problem.reason.endswith("it belongs to vllm, sglang")


@pytest.mark.parametrize(
    ("path", "section", "fix"),
    [
        ("rewards.0.kind", {"kind": "regx", "pattern": "x"}, "did you mean 'regex'?"),
        ("task.source.kind", {"kind": "jsnol", "path": "x"}, "did you mean 'jsonl'?"),
        ("task.source.name", {"name": "revers", "length": [1, 2]}, "did you mean 'reverse'?"),
        ("environment.kind", {"kind": "singel_turn"}, "did you mean 'single_turn'?"),
        ("algorithm.name", {"name": "rlo"}, "did you mean 'rloo'?"),
        ("engine.kind", {"kind": "natve", "graphs": True}, "did you mean 'native'?"),
        ("engine.kind", {"kind": 3}, "use one of native, vllm, sglang, module:name"),
        ("algorithm.name", {"name": None}, "use one of grpo, "),
        ("rewards.0.kind", {"kind": "magic"}, "use one of numeric, exact, regex, "),
    ],
)
def test_an_unknown_kind_is_one_problem_that_names_the_nearest(path, section, fix):
    (problem,) = refusals(at(path.rpartition(".")[0], section)).values()
    assert problem.field == path
    assert fix in problem.fix


def test_all_mistakes_in_a_list_of_kinds_come_at_once():
    rewards = [
        {"kind": "regx", "pattern": "("},
        {"name": "b", "kind": "regex"},
        {"name": "c", "kind": "exact", "deadline": 9},
        {"name": "d", "kind": "regex", "pattern": "("},
        {"name": "e", "kind": "code", "tests": "no such column"},
    ]
    _, found = examine({"rewards": rewards}, root=Path.cwd(), probes=PROBES)
    fields = [problem.field for problem in found if problem.field.startswith("rewards")]
    assert fields == [
        "rewards.0.kind",
        "rewards.1.pattern",
        "rewards.2.deadline",
        "rewards.3.pattern",
        "rewards.4.tests",
    ]


@pytest.mark.parametrize(
    "data",
    [
        {"rewards": [{"name": "accuracy", "kind": "numeric", "pick": "last", "weight": 1.0, "deadline": 5}]},
        {"rewards": [{"kind": "exact", "pattern": None, "compare": None, "longest": None, "buffer": None}]},
        {"engine": {"kind": "native", "python": None, "url": None}},
        {"environment": {"kind": "single_turn", "hosts": "auto"}},
        {"algorithm": {"name": "astar_po", "clip": None, "constant": None, "gae": None}},
        {"task": {"source": {"kind": "jsonl", "path": "x", "name": "addition", "config": {}, "length": [3, 5]}}},
    ],
)
def test_keys_of_other_kinds_that_ask_for_nothing_are_accepted(data):
    """Recipes that were written down by earlier versions list them, and so do people who copy the page."""
    section = next(iter(data))
    kept = getattr(parse_recipe(data), section)
    assert kept == getattr(Recipe(**parse_recipe(data).model_dump()), section)


def test_a_null_that_is_no_key_of_any_kind_is_still_a_slip():
    (problem,) = refusals({"rewards": [{"patern": None}]}).values()
    assert problem.field == "rewards.0.patern"


def test_python_makes_the_kind_that_its_keys_name():
    part = RewardPart(kind="regex", pattern="x")
    assert type(part) is RegexReward
    assert part == RegexReward(pattern="x")
    assert RewardPart() == NumericReward()
    recipe = Recipe(rewards=(part, NumericReward(name="b")))
    assert load_recipe(recipe) == recipe, "also where Python left the kind to the class"
    with pytest.raises(ValueError, match="there is no kind 'regx': use one of numeric, exact, regex"):
        RewardPart(kind="regx")
    with pytest.raises(ValueError, match="pattern"):
        RewardPart(kind="numeric", pattern="x")


def test_the_kinds_are_those_that_the_rooms_have():
    assert {name for record in AlgorithmSection.records() for name in record.values("name")} == {
        *CATALOG,
        "module:name",
    }
    for record in EnvironmentSection.records():
        if ":" not in record.values("kind")[0]:
            assert callable(resolve(record(**named(record))))
