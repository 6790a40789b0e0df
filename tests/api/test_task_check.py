"""`stretto task check`: prompts as the model reads them, and rewards that must tell right answers from others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import main

HEAD = """
model: {name: scratch, dtype: float32, adapter: null, scratch: {characters: "0123456789=ab ", context: 24}}
task:
  source: {kind: jsonl, path: rows.jsonl}
  holdout: {prompts: 3}
engine: {max_new_tokens: 8}
batch: {prompts: 2, samples: 2}
evaluate: {every: 0}
"""
USER = """
def lenient(answer, prompt, signals): return 1.0
def starts(answer, prompt, signals): return prompt["reference"].startswith(answer)
def broken(answer, prompt, signals): return 1 / len(answer)
def copies(answer, prompt, signals): return float(len(answer) > 1 and answer in prompt["messages"][-1]["content"])
def counts(answer, prompt, signals): return float(answer.isdigit())
def strict(answer, prompt, signals): return float(answer == "42")
def agree(answers, prompt, signals): return [answers.count(answer) / len(answers) for answer in answers]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"id": str(n), "prompt": f"{n}{n}=", "answer": str(11 * n)} for n in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "checked_rewards.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(folder: Path, rewards: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict]:
    (folder / "recipe.yaml").write_text(f"{HEAD}rewards: {rewards}\n")
    code = main(["task", "check", str(folder / "recipe.yaml"), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_task_is_shown_and_its_reward_tells_right_from_wrong(folder, capsys) -> None:
    rewards = "[{name: right, kind: exact}, {name: short, kind: kimi, weight: 0.1}]"
    code, told = checked(folder, rewards, capsys)
    assert (code, told["ok"], told["problems"]) == (0, True, [])
    assert {each["case"]: (each["judged"], each["full"]) for each in told["answers"]} == {
        "reference": (6, 6), "empty": (6, 0), "truncated": (6, 0), "wrong": (6, 0),
    }  # fmt: skip
    prompts = told["prompts"]
    assert (prompts["training"], prompts["heldout"], prompts["context"], prompts["tokens_longest"]) == (6, 3, 24, 5)
    assert prompts["shown"][0]["text"].startswith("<|user|>") and prompts["shown"][0]["text"].endswith("<|assistant|>")
    assert set(told["parts"]) == {"right"}


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ('[{kind: "checked_rewards:lenient"}]', ["empty answers get", "truncated answers", "wrong answers"]),
        ('[{kind: "checked_rewards:starts"}]', ["empty answers get full marks", "truncated answers get full marks"]),
        ('[{kind: "checked_rewards:broken"}]', ["empty answers have no verdict: reward accuracy: ZeroDivisionError"]),
        ("[{kind: regex, pattern: 'a ([0-9]+)'}]", ["6 of 6 reference answers do not get full marks (accuracy"]),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_tell_is_found_out(folder, capsys, rewards: str, says: list[str]) -> None:
    code, told = checked(folder, rewards, capsys)
    assert (code, told["ok"]) == (1, False)
    assert all(any(text in problem["reason"] for problem in told["problems"]) for text in says)


@pytest.fixture
def open_folder(folder: Path) -> Path:
    """The same without reference answers."""
    rows = [{"id": str(n), "prompt": f"ab\n1. {n}{n}=\n.2. a{n}"} for n in range(1, 10)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("lenient", ["6 of 6 empty answers", "18 of 18 fixed answers", "24 of 24 copied answers"]),
        ("counts", ["6 of 18 fixed answers"]),
        ("copies", ["24 of 24 copied answers"]),  # also of what stands behind the number of an item
        ("broken", ["empty answers have no verdict", "12 of 18 fixed answers"]),
        ("strict", []),
    ],
)
def test_a_reward_of_prompts_without_references_is_tried(open_folder, capsys, reward: str, says: list[str]) -> None:
    context = "model.scratch.context=64"
    recipe = f'[{{kind: "checked_rewards:{reward}"}}]'
    characters = 'model.scratch.characters="0123456789=ab .\\n"'
    code, told = checked(open_folder, recipe, capsys, context, characters)
    assert [each["case"] for each in told["answers"]] == ["empty", "fixed", "copied"]
    assert code == bool(says) and len(told["problems"]) == len(says)
    assert all(text in problem["reason"] for text, problem in zip(says, told["problems"], strict=True))


def test_a_task_whose_rewards_were_not_tried_is_not_called_right(folder, capsys) -> None:
    (folder / "recipe.yaml").write_text(f"{HEAD}rewards: [{{kind: signal, signal: tokens}}]\n")
    (folder / "own_play.py").write_text("async def play(prompt, model): return await model.chat(prompt.messages)\n")
    code = main(["task", "check", str(folder / "recipe.yaml"), "environment={kind: 'own_play:play'}"])
    page = capsys.readouterr().out
    assert code == 0 and "no answers were tried" in page
    assert "the rewards were not tried" in page and not page.rstrip().endswith("nothing wrong was found")


def test_a_right_answer_may_be_worded(folder, capsys) -> None:
    code, _ = checked(folder, "[{kind: regex, pattern: 'a ([0-9]+)'}]", capsys, "--answer", "b a {reference}")
    assert code == 0


def test_examples_and_dropped_prompts_are_seen(folder, capsys) -> None:
    example = "task.examples=[{prompt: 'a=', answer: 'b'}]"
    code, told = checked(folder, "[{kind: exact}]", capsys, example)
    assert code == 0
    assert told["prompts"]["shown"][0]["text"].startswith("<|user|>a=<|assistant|>b<|end|><|user|>")
    code, told = checked(folder, "[{kind: exact}]", capsys, "engine.max_new_tokens=20")
    assert code == 1 and "9 prompts have more than the 4 tokens" in told["problems"][0]["reason"]
    code, told = checked(folder, "[{kind: exact}]", capsys, "engine.max_new_tokens=20", "task.drop_longer_than=auto")
    assert told["problems"][0]["reason"] == "all 9 prompts are dropped"


def test_rows_to_learn_from_are_measured_with_their_answers(folder, capsys) -> None:
    sft = ["algorithm={name: sft}", "batch.samples=1", "engine.max_new_tokens=20"]
    code, told = checked(folder, "[{kind: exact}]", capsys, *sft)
    assert (code, told["problems"]) == (0, []), "nothing is sampled, so there need be no room for an answer"
    assert told["prompts"]["tokens_longest"] > told["prompts"]["shown"][0]["tokens"] == 5
    _, told = checked(folder, "[{kind: exact}]", capsys, *sft, "task.drop_longer_than=6")
    assert told["prompts"]["dropped"] == 9


def test_for_people_the_page_has_prompts_and_verdicts(folder, capsys) -> None:
    (folder / "recipe.yaml").write_text(f"{HEAD}rewards: [{{kind: exact}}]\n")
    assert main(["task", "check", str(folder / "recipe.yaml")]) == 0
    page = capsys.readouterr().out
    assert "<|user|>" in page and "6 of 6" in page and "nothing wrong was found" in page
