"""Runs made sick on purpose are told so in the right words, each line once; a healthy run is told nothing."""

import shutil
import sys
from pathlib import Path

import pytest

from running import END, SYSTEM, Quiet, lines, recipe_in
from stretto.runtime import session
from tiers import slow_but

NEVER = {"name": "format", "kind": "regex", "pattern": "x(1)"}
RIGHT = {"name": "accuracy", "kind": "exact"}
BASE = {
    "model__scratch": {"layers": 1, "width": 32, "heads": 2, "characters": "01=", "context": 64,
                       "warmup_steps": 80, "warmup_lr": 0.01},
    "rewards": [RIGHT], "engine__max_new_tokens": 6, "evaluate__every": 0, "checkpoint__every": 100, "run__steps": 8,
    "batch__prompts": 6, "batch__samples": 8, "optimizer__lr": 0.0005,
}  # fmt: skip
"""A model that is half right."""
SICK = {
    "nothing is ever right": (
        {"rewards": [NEVER | {"name": "accuracy"}]},
        "no group taught anything for 3 steps: no answer was right",
    ),
    "answers are cut off": (
        {"engine__max_new_tokens": 2, "optimizer__lr": 0.0},
        "of answers hit engine.max_new_tokens=2: raise it",
    ),
    "a part is never earned": (
        {"rewards": [RIGHT, NEVER]},
        "format was never earned in 240 answers",
    ),
    "length is rewarded": (
        {
            "rewards": [RIGHT | {"weight": 0.1}, {"name": "thorough", "kind": "mine:thorough"}],
            "engine__max_new_tokens": 24, "optimizer__lr": 0.004, "run__steps": 18,
        },
        "the reward is hacked by length",
    ),
    "the learning rate is too high": (
        {"optimizer__lr": 1.0, "optimizer__clip": None},
        "optimizer.lr=1 is probably too high",
    ),
    "the template is wrong": (
        {"model__name": "warmed", "model__scratch": None, "optimizer__lr": 0.0},
        "the chat template does not suit the model",
    ),
}  # fmt: skip
HEALTHY = {
    "model__scratch": BASE["model__scratch"] | {"warmup_steps": 40}, "optimizer__lr": 0.002, "batch__prompts": 12,
    "run__steps": 20,
}  # fmt: skip
"""One that learns."""


def notes_of(folder, changes):
    """What a run is told besides its folder, and the run."""
    folder = Path(folder)
    (folder / "mine.py").write_text("def thorough(answer, prompt, signals):\n    return len(answer) / 12\n")
    if changes.get("model__name") == "warmed":  # a model that ends its turns with another token than files and template
        first = recipe_in(folder, run__folder=str(folder / "first"), **(BASE | {"run__steps": 1}))
        made = session.start(first, name="first", root=folder, progress=Quiet())
        shutil.copytree(made.model, folder / "warmed")
        for path in (folder / "warmed").glob("*.json"):
            path.write_text(path.read_text().replace('"eos_token": "<|end|>"', '"eos_token": "<|system|>"'))
            path.write_text(path.read_text().replace(f'"eos_token_id": {END}', f'"eos_token_id": {SYSTEM}'))
        template = folder / "warmed" / "chat_template.jinja"
        template.write_text(template.read_text().replace("<|end|>", "<|system|>"))
    progress = Quiet()
    recipe = recipe_in(folder, run__folder=str(folder / "run"), **(BASE | changes))
    finished = session.start(recipe, name="sick", root=folder, progress=progress)
    return [note for note in progress.notes().splitlines() if note.startswith("step ")], finished.folder


@pytest.mark.parametrize("name", slow_but("answers are cut off", "nothing is ever right", of=list(SICK)))
def test_a_sick_run_is_told_what_is_wrong(tmp_path, name):
    changes, words = SICK[name]
    notes, folder = notes_of(tmp_path, changes)
    assert sum(words in note for note in notes) == 1, notes
    others = [note for note in notes if words not in note]
    assert all(name == "length is rewarded" and "hit engine.max_new_tokens" in note for note in others), notes
    event = next(row for row in lines(folder / "events.jsonl") if row["kind"] == "diagnosis")
    assert f"step {event['step']}: {event['text']}" == notes[0]
    sys.modules.pop("mine", None)


@pytest.mark.slow
def test_a_healthy_run_is_told_nothing(tmp_path):
    notes, folder = notes_of(tmp_path, HEALTHY)
    assert notes == []
    rewards = [row["reward/mean"] for row in lines(folder / "metrics.jsonl")]
    assert sum(rewards[-5:]) > sum(rewards[:5])
