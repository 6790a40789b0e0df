"""Every recipe that is shipped has nothing wrong with it; those of studies may need what is not available yet."""

import importlib
import json
import re
from pathlib import Path

import pytest

from stretto import hub
from stretto.api.recipes import PROBES, recipe_to_plan
from stretto.checks.recipe import examine
from stretto.errors import Problem
from stretto.models import source as locate
from stretto.placement.cluster import parse_cluster
from stretto.planner.forecast import setting_of

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
SHIPPED = sorted(RECIPES.glob("*.yaml"))
STUDIES = sorted((RECIPES / "studies").glob("*.yaml"))
LATER = "# Needs what is not available yet: "


def name_of(path):
    return path.stem


def problems(path, changes=()):
    """Everything wrong with a recipe, but for the table of V* that `stretto value` makes of it."""
    recipe, found = examine(path, changes, root=path.parent, probes=PROBES)
    assert recipe is not None
    table = [problem for problem in found if problem.field == "algorithm.vstar.table"]
    assert len(table) == recipe.algorithm.name.startswith("astar")
    return [problem for problem in found if problem not in table]


@pytest.fixture
def online(tmp_path, monkeypatch):
    """A machine that may ask the hub, which does not answer."""

    def no_answer(what, name, *, field, instead):
        raise hub.HubUnreachable(Problem(field=field, reason="the hub cannot be reached", fix="connect this machine"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locate, "offline", lambda: False)
    monkeypatch.setattr(hub, "ask", no_answer)


def test_there_are_recipes():
    assert SHIPPED and STUDIES


RUNS = {
    "tiny-teacher": "LlamaForCausalLM",
    "tiny-sft": "LlamaForCausalLM",
    "tiny-reward-model": "LlamaForSequenceClassification",
    "smollm2-sft": "LlamaForCausalLM",
    "smollm2-reward-model": "LlamaForSequenceClassification",
}
"""Runs whose checkpoints, or what was merged of them, later recipes of a chain begin with -> what these are."""


def made_before(folder, text):
    """Stands in for the checkpoints that a recipe names, and the file that a page makes of a data set."""
    if "gsm8k.jsonl" in text:
        rows = (f'{{"question": "What is {number} + 1?", "answer": "{number + 1}"}}' for number in range(300))
        (folder / "gsm8k.jsonl").write_text("\n".join(rows))
    for run, kind in RUNS.items():
        for name in re.findall(rf"runs/{run}/(?:checkpoints|merged)/step-\d+", text):
            (folder / name).mkdir(parents=True, exist_ok=True)
            config = {"model_type": "llama", "architectures": [kind], "max_position_embeddings": 512}
            config |= {"id2label": {"0": "LABEL_0"}}
            (folder / name / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_a_shipped_recipe_has_nothing_wrong_with_it(path, online, tmp_path):
    made_before(tmp_path, path.read_text())
    assert [str(problem) for problem in problems(path)] == []


def test_the_rule_of_plain_answers_prefers_what_its_pairs_prefer_and_finds_nothing_in_silence(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    rule = importlib.import_module("plain_answers")
    asked = {row["prompt"]: {"reference": row["answer"]} for row in rule.prompts({"count": 600})}
    pairs = rule.pairs({"count": 600, "unfinished": 0.2})
    better, worse = (
        [rule.score(row[key], asked[row["prompt"]], {}) for row in pairs] for key in ("chosen", "rejected")
    )
    assert all(good > bad for good, bad in zip(better, worse, strict=True))
    assert 90 < worse.count(0.0) < 150 and 0.0 not in better
    assert not any(rule.score(said, row, {}) for said in ("", "I hope that this helps!") for row in asked.values())
    shown = rule.demonstrations({"count": 600, "fillers": 3})
    assert all(rule.right(row["completion"], asked[row["prompt"]], {}) for row in shown)
    assert {sum(filler in row["completion"] for filler in rule.FILLERS) for row in shown} == {0, 1, 2, 3}
    plain = rule.demonstrations({"count": 600})
    assert [row["completion"] for row in plain] == [prompt["reference"] for prompt in asked.values()]


@pytest.mark.parametrize("path", STUDIES, ids=name_of)
def test_a_study_is_sound_or_says_in_a_line_what_it_waits_for(path, online):
    found = problems(path)
    later = ("not available yet", "only planned with")
    assert [problem for problem in found if not any(words in problem.reason for words in later)] == []
    said = [line for line in path.read_text().splitlines() if line.startswith(LATER)]
    assert len(said) == bool(found)


def test_the_first_page_shows_the_demo_that_make_runs():
    made = re.search(r"stretto train recipes/(\S+)\.yaml run\.steps=(\d+)", (ROOT / "Makefile").read_text())
    shown = re.search("<!-- demo output -->(.*)<!-- end of demo", (ROOT / "README.md").read_text(), re.DOTALL)
    recipe, steps = made[1], int(made[2])
    for said in (f"step 0 to {steps}\n", f"runs/{recipe}-001/checkpoints/step-{steps:06}\n", f"of {steps} steps)"):
        assert said in shown[1]


@pytest.mark.parametrize("path", STUDIES, ids=name_of)
def test_a_study_is_planned_as_it_stands_and_with_lengths_of_its_task(path, online):
    recipe = recipe_to_plan(path)
    workload = setting_of(recipe, path.parent, parse_cluster("64xH100")).workload
    assert workload.roles
    if recipe.task.source.kind == "arc":
        assert recipe.batch.lengths.prompt > 1000, "grids, and not a sentence"


@pytest.mark.slow
def test_studies_that_can_run_may_have_more_gpus(online):
    able = [path for path in STUDIES if not problems(path)]
    assert len(able) >= 2
    for path in able:
        for cluster in ("2xH100", "4xH100"):
            assert not problems(path, [f"placement.cluster={cluster}"])
