"""No key of a recipe is without effect: each is read by a run, or refused where it is not the default."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from running import Quiet, recipe_in
from stretto.algorithms.catalog import CATALOG
from stretto.checks.rules.not_available import ONLY
from stretto.recipe.schema import Recipe, Section
from stretto.recipe.schema.base import Choice
from stretto.runtime import session
from stretto.runtime.value import value
from tiny import SAMPLING

SOURCES = Path(__file__).parents[2] / "src" / "stretto"

ROWS = {"task__prompt": None, "rewards": [], "engine": {}, "batch": {"prompts": 2}}
"""What recipes leave out that learn from rows."""

COURSES = [
    {"log": ["tensorboard"], "algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "run__steps": 2},
    {"model__adapter": {"rank": 2}, "batch__updates": 2, "evaluate__pass_k": 2},
    {"rewards": [{"kind": "regex", "pattern": "([01]+)"}]},
    {
        "algorithm": {"name": "ppo", "kl": {"coef": 0.1, "where": "reward", "adaptive": {}}},
        "roles": {"critic": {"name": "scratch", "adapter": {"rank": 2}}, "reward_model": {"name": "scratch"}},
        "rewards": [{"kind": "numeric"}, {"name": "quality", "kind": "model"}],
    },
    {
        "task__source": {"kind": "synthetic", "name": "addition"},
        "task__prompt": "{a}+{b}=",
        "model__scratch": {"layers": 1, "width": 16, "heads": 2, "characters": "0123456789+=", "warmup_steps": 1},
    },
    {"task__examples": [{"prompt": "1=", "answer": "1"}]},
    {"batch__lengths": {"prompt": 5, "response": {"mean": 2, "cap": 3}}},
    {"batch__lengths": {"from_run": "earlier"}},
    {"task__source": {"kind": "jsonl", "path": "data.jsonl"}, "task__prompt": None},
    {"task__source": {"kind": "hf", "path": "data.jsonl"}, "task__prompt": None},
    *(
        {"algorithm": {"name": name}, "evaluate__every": 0}
        for name in SAMPLING
        if "values" not in CATALOG[name].needs and not CATALOG[name].taught
    ),
    ROWS | {"algorithm": {"name": "sft"}, "task__source": {"kind": "jsonl", "path": "data.jsonl"}},
    ROWS
    | {
        "algorithm": {"name": "reward_model", "centring": 0.1},
        "task__source": {"kind": "jsonl", "path": "pairs.jsonl", "ranking": {"best": 0.5, "margins": True}},
    },
]
"""What the tiny recipe is changed to, so that every part of a run that reads keys is in one of them."""

EXPLAINED = {
    "guards.non_finite": "read when an update is not finite; tested with the loop",
    "guards.reward_error_share": "read when a reward fails; tested with the loop",
    "guards.stop_on": "read when a guard warns; tested with the guards",
    "model.adapter.kind": "has one value",
    "batch.max_rounds": "refused, or read by algorithms that drop groups",
    "roles.critic.adapter.kind": "has one value",
    "roles.teacher.prompt": "read where there is a teacher; tested with distillation",
    "roles.reference": "refused, but for the reference as it was before training",
}
"""Keys that these runs do not read, and why that is right."""


def keys(section, prefix=""):
    """(dotted name, section, key) of every key of a section and of those below it."""
    for key, info in section.model_fields.items():
        yield f"{prefix}{key}", section, key
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                for record in kind.records() if issubclass(kind, Choice) else (kind,):
                    yield from keys(record, f"{prefix}{key}.")


@pytest.fixture
def read(tmp_path, monkeypatch):
    """(section, key) of everything that the runs of all courses look at."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(number), "prompt": f"{number:b}=", "answer": f"{number:b}"} for number in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ranked = [{"id": row["id"], "prompt": row["prompt"], "answers": ["0", "1"], "scores": [0, 1]} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ranked))
    (tmp_path / "earlier" / "samples").mkdir(parents=True)
    (tmp_path / "earlier" / "samples" / "step-000001.jsonl").write_text('{"conversations": [{"trained": [0, 1]}]}')
    recipes = [
        recipe_in(tmp_path, **{"run__steps": 1, "run__folder": str(tmp_path / f"run{number}"), **course})
        for number, course in enumerate(COURSES)
    ]
    plain = Section.__getattribute__
    found = set()

    def noted(self, name):
        if name in type(self).model_fields:
            found.add((type(self), "itself"))
            found.update((kind, name) for kind in type(self).__mro__ if name in getattr(kind, "model_fields", ()))
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", noted)
    for recipe in recipes:
        recipe = recipe.model_copy(update={"guards": recipe.guards.model_copy(update={"reward_error_share": 1.0})})
        if "vstar" in CATALOG[recipe.algorithm.name].needs:
            value(recipe, root=tmp_path, progress=Quiet())
        session.start(recipe, name="tiny", root=tmp_path, progress=Quiet())
    monkeypatch.undo()
    return found


@pytest.mark.slow
def test_every_key_of_a_recipe_is_read_by_a_run_or_refused(read):
    """What nobody looks at cannot have an effect, so a value other than the default must be a problem."""
    refused = {row.field for row in ONLY} | {"roles.reference.name", "roles.reference.shape", "model.shape"}
    played = [each for each in keys(Recipe) if not issubclass(each[1], Choice) or (each[1], "itself") in read]
    unread = {name for name, section, key in played if not {(kind, key) for kind in section.__mro__} & read}
    unread -= {name for name in unread for field in refused if name == field or name.startswith(f"{field}.")}
    assert sorted(unread - EXPLAINED.keys()) == []


def test_every_key_of_a_kind_that_these_runs_do_not_have_is_read_somewhere():
    """Kinds of rewards, sources and environments have tests of their own; here no key of theirs was forgotten."""
    sources = "\n".join(path.read_text("utf-8") for path in SOURCES.rglob("*.py") if "schema" not in path.parts)
    of_kinds = {(name, key) for name, section, key in keys(Recipe) if issubclass(section, Choice)}
    assert [name for name, key in sorted(of_kinds) if not re.search(rf"\.{key}\b", sources)] == []
