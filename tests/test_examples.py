"""Every example runs, does what its first lines say, and leaves a run behind."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from running import lines
from stretto.cli.main import main
from stretto.recipe.load import load_recipe
from stretto.tasks.source import load_prompts

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
LETTERS = EXAMPLES / "own_reward" / "letters.yaml"
TINY = [
    "model.scratch.width=16",
    "model.scratch.heads=2",
    "model.scratch.warmup_steps=1",
    "batch.prompts=2",
    "batch.samples=4",
    "engine.max_new_tokens=4",
    "guards.min_disk_gb=0",
    "evaluate.every=0",
    "log=[]",
    "run.steps=2",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs are written into a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(folder):
    return [row for path in sorted((folder / "samples").glob("step-*")) for row in lines(path)]


def test_the_reward_of_ones_own_gives_partial_credit():
    close = runpy.run_path(str(EXAMPLES / "own_reward" / "rewards.py"))["close"]
    asked = {"id": "c4", "messages": [], "reference": "cccc", "tags": {"letter": "c", "times": 4}}
    assert close("cccc", asked, {}) == 1.0
    assert close("ccc", asked, {}) == 0.75
    assert close("cccd", asked, {}) == 0.5
    assert close("", asked, {}) == 0.0
    assert close("d" * 20, asked, {}) == 0.0


def test_every_prompt_of_the_reward_example_has_full_marks_for_its_reference():
    close = runpy.run_path(str(EXAMPLES / "own_reward" / "rewards.py"))["close"]
    prompts = load_prompts(load_recipe(LETTERS).task, LETTERS.parent)
    assert len(prompts) == 80
    assert {close(prompt.reference, {"tags": prompt.tags}, {}) for prompt in prompts} == {1.0}


def test_the_reward_example_trains_and_judges_by_the_users_function(elsewhere):
    assert main(["train", str(LETTERS), *TINY]) == 0
    rows = rows_of(elsewhere / "runs" / "letters-001")
    assert len(rows) == 16
    assert all(row["failure"] is None and set(row["reward"]["parts"]) == {"right", "close"} for row in rows)


def test_the_scripted_engine_says_what_the_script_says_and_prints_the_verdicts(elsewhere, capsys):
    example = runpy.run_path(str(EXAMPLES / "scripted_engine.py"), run_name="example")
    example["main"](["guards.min_disk_gb=0"])
    rows = rows_of(elsewhere / "runs" / "scripted-001")
    for row in rows:
        letter, times = row["messages"][0]["content"][:2]
        assert set(row["answer"]) <= {letter}
        assert abs(len(row["answer"]) - int(times)) <= 1
        assert row["reward"]["parts"]["right"] == (len(row["answer"]) == int(times))
    assert len({row["answer"] for row in rows}) > 2
    printed = [line for line in capsys.readouterr().out.splitlines() if "asked for" in line]
    assert len(printed) == 8


@pytest.mark.slow
def test_the_sweep_prints_a_row_for_each_learning_rate(elsewhere, capsys):
    runpy.run_path(str(EXAMPLES / "sweep.py"))["main"]([*TINY, "evaluate.prompts=4", "evaluate.every=1"])
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[:4]]
    assert head[:3] == ["run", "steps", "accuracy"]
    (folder,) = (elsewhere / "runs").iterdir()
    for rate, row in zip((5e-4, 2e-3, 8e-3), rows, strict=True):
        assert row[0] == f"lr={rate}"
        assert f"lr: {rate}" in (folder / row[0] / "recipe.yaml").read_text()
        assert 0 <= float(row[2]) <= 1


def test_the_example_of_parts_of_ones_own_trains_with_all_of_them(elsewhere):
    recipe = str(EXAMPLES / "own_parts" / "game.yaml")
    # The log of this example is one of its parts.
    assert main(["train", recipe, *(change for change in TINY if change != "log=[]")]) == 0
    folder = elsewhere / "runs" / "game-001"
    rows = rows_of(folder)
    for row in rows:
        assert row["reward"]["parts"].keys() == {"early"}
        group = [other for other in rows if (other["step"], other["prompt"]) == (row["step"], row["prompt"])]
        mean = sum(other["reward"]["value"] for other in group) / len(group)
        for conversation in row["conversations"]:
            trained = zip(conversation["advantages"], conversation["trained"], strict=True)
            assert {advantage for advantage, is_trained in trained if is_trained} == {
                round(row["reward"]["value"] - mean, 6)
            }
    assert any(sum(conversation["trained"]) > 4 for row in rows for conversation in row["conversations"]), "two turns"
    assert [line.split()[0] for line in (folder / "rewards.txt").read_text().splitlines()] == ["1", "2"]


def test_every_example_is_listed(elsewhere):
    page = (EXAMPLES / "README.md").read_text()
    there = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert {name for name in there if f"({name}" not in page} == set()


def test_the_data_of_the_reward_example_is_plain_json():
    for line in (LETTERS.parent / "prompts.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["answer"] == row["letter"] * row["times"]


@pytest.mark.slow
def test_a_game_of_textarena_is_trained_on_for_three_steps(elsewhere):
    assert main(["train", str(EXAMPLES / "textarena" / "guess.yaml"), "guards.min_disk_gb=0", "log=[]"]) == 0
    rows = rows_of(elsewhere / "runs" / "guess-001")
    assert len(rows) == 3 * 16 and all(row["failure"] is None and row["used"] for row in rows)
    for row in rows:
        (talk,) = row["conversations"]
        assert len(talk["tokens"]) == len(talk["trained"]) == len(talk["logprobs"])
        assert all((logprob < 0) == trained for logprob, trained in zip(talk["logprobs"], talk["trained"], strict=True))
    assert any(row["conversations"][0]["text"].count("<|assistant|>") > 1 for row in rows), "several turns"


def cells_of_the_notebook():
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_is_one_without_outputs():
    document = json.loads(NOTEBOOK.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_every_link_of_the_notebook_leads_somewhere():
    text = "".join(
        line for cell in cells_of_the_notebook() if cell["cell_type"] == "markdown" for line in cell["source"]
    )
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((EXAMPLES / link).exists() for link in links)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom_learns_and_draws(elsewhere):
    """Its cells in a fresh process, as a kernel would run them; the last one's value is the picture."""
    cells = ["".join(cell["source"]) for cell in cells_of_the_notebook() if cell["cell_type"] == "code"]
    script = elsewhere / "cells.py"
    runner = "import json, pathlib\nnames = {'__name__': '__main__'}\n"
    runner += "*cells, last = json.loads(pathlib.Path('cells.json').read_text())\n"
    runner += "for number, cell in enumerate(cells):\n    exec(compile(cell, f'cell {number}', 'exec'), names)\n"
    runner += "body, value = last.rsplit('\\n', 1)\nexec(body, names)\n"
    runner += "pathlib.Path('picture.svg').write_text(eval(value, names)._repr_svg_())\n"
    (elsewhere / "cells.json").write_text(json.dumps(cells))
    script.write_text(runner)
    path = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src")}
    done = subprocess.run([sys.executable, str(script)], cwd=elsewhere, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "optimizer.lr" in done.stdout and "batch.samples: 1 is too few" in done.stdout
    assert float(done.stdout.partition("held-out accuracy ")[2].split(",")[0]) > 0.1
    assert (elsewhere / "picture.svg").read_text().count("<polyline") == 2
