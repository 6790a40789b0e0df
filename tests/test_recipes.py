"""Every recipe that is shipped has nothing wrong with it; those of studies may need what is not available yet."""

import json
import re
from pathlib import Path

import pytest

from stretto.api.recipes import PROBES
from stretto.checks.recipe import examine
from stretto.errors import Problem
from stretto.models import source as locate
from stretto.tasks import hf

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
SHIPPED = sorted(RECIPES.glob("*.yaml"))
STUDIES = sorted((RECIPES / "studies").glob("*.yaml"))
LATER = "# Needs what is not available yet: "


def name_of(path):
    return path.stem


def problems(path, changes=()):
    recipe, found = examine(path, changes, root=path.parent, probes=PROBES)
    assert recipe is not None
    return found


@pytest.fixture
def online(tmp_path, monkeypatch):
    """A machine that may ask the hub, which does not answer."""

    def no_answer(name, field):
        raise hf._Unreachable(Problem(field=field, reason="the hub cannot be reached", fix="connect this machine"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locate, "offline", lambda: False)
    monkeypatch.setattr(hf, "_ask_hub", no_answer)


def test_there_are_recipes():
    assert SHIPPED and STUDIES


RUNS = {
    "tiny-teacher": "LlamaForCausalLM",
    "tiny-sft": "LlamaForCausalLM",
    "tiny-reward-model": "LlamaForSequenceClassification",
}
"""Runs whose checkpoints later recipes of a chain begin with -> what these are."""


def made_before(folder, text):
    """Stands in for the checkpoints that a recipe names."""
    for run, kind in RUNS.items():
        for name in re.findall(rf"runs/{run}/checkpoints/step-\d+", text):
            (folder / name).mkdir(parents=True, exist_ok=True)
            config = {"model_type": "llama", "architectures": [kind], "max_position_embeddings": 512}
            config |= {"id2label": {"0": "LABEL_0"}}
            (folder / name / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_a_shipped_recipe_has_nothing_wrong_with_it(path, online, tmp_path):
    made_before(tmp_path, path.read_text())
    rows = (f'{{"question": "What is {number} + 1?", "answer": "{number + 1}"}}' for number in range(300))
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))  # what its page makes of the data set
    assert [str(problem) for problem in problems(path)] == []


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


@pytest.mark.slow
def test_studies_that_can_run_may_have_more_gpus(online):
    able = [path for path in STUDIES if not problems(path)]
    assert len(able) >= 2
    for path in able:
        for cluster in ("2xH100", "4xH100"):
            assert not problems(path, [f"placement.cluster={cluster}"])
