"""Runs whose answers are programs: they are run in the sandbox beside generation, and the model learns from them."""

import json

import pytest

from running import RECIPE, metrics, start


def course(folder, source, reward, characters, *, prompt, warmup):
    """The metrics of three steps with other questions and rewards; answers are short, and the model is tiny."""
    scratch = {"layers": 2, "width": 64, "characters": characters, "warmup_steps": warmup, "context": 512}
    changes = {
        "model__scratch": RECIPE["model"]["scratch"] | scratch | ({"warmup_lr": 3e-3} if warmup else {}),
        "task": {"source": source, "prompt": prompt, "holdout": {"prompts": 2}},
        "rewards": [reward],
        "engine__max_new_tokens": 20,
        "optimizer__lr": 1e-3,
        "evaluate__prompts": 2,
        "run__steps": 3,
    }
    rows = metrics(start(folder, **changes).folder)
    assert all(row.get("groups/infra", 0) == 0 for row in rows)
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


@pytest.mark.slow
def test_programs_that_pass_their_tests_are_rewarded(tmp_path):
    rows = [
        {"n": n, "answer": f"```\nprint({n})\n```", "tests": [{"input": "", "output": str(n)}]} for n in range(1, 10)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    reward = {"name": "passed", "kind": "code", "deadline": 2.0}
    rewards = course(tmp_path, source, reward, "`\nprint()123456789=", prompt="{n}=", warmup=150)
    assert len(rewards) == 3
    assert max(rewards) > 0


@pytest.mark.slow
def test_a_run_on_tasks_of_arc_goes_end_to_end(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for n in range(1, 9):
        pair = {"input": [[n, 0]], "output": [[0, n]]}
        (folder / f"task{n}.json").write_text(json.dumps({"train": [pair, pair], "test": [pair]}))
    source = {"kind": "arc", "path": str(folder), "augment": 1}
    reward = {"name": "grids", "kind": "arc", "deadline": 2.0}
    characters = "`\n :=()[]0123456789IOadefgimnoprstuNw"
    rewards = course(tmp_path, source, reward, characters, prompt="{examples}\n{inputs}\n", warmup=0)
    assert len(rewards) == 3
