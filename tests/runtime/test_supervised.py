"""Runs that learn from rows: what is trained of them, that it works, on several devices too, and that it can stop."""

import asyncio
import copy
import json

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from crewed import distance, together
from running import END, RECIPE, Quiet, assert_same_run, lines, metrics, resume
from stretto.api.calls import sample
from stretto.api.recipes import PROBES
from stretto.checks.recipe import checked_recipe
from stretto.errors import RecipeError
from stretto.runtime import session
from stretto.runtime.build import build_runtime, load_task
from stretto.runtime.plans import make_plan
from stretto.runtime.questions import evaluate_run
from stretto.runtime.training_data import batch_of
from tiers import slow_but

SCRATCH = {"layers": 1, "width": 16, "heads": 2, "characters": "01=", "context": 64}
PLAIN = {key: RECIPE[key] for key in ("seed", "optimizer", "evaluate", "checkpoint", "guards", "log")} | {
    "model": {"name": "scratch", "scratch": SCRATCH, "dtype": "float32", "adapter": None},
    "batch": {"prompts": 4},
    "run": {"steps": 4},
}
SFT = PLAIN | {"task": {**RECIPE["task"], "source": dict(RECIPE["task"]["source"])}, "algorithm": {"name": "sft"}}
PAIRS = PLAIN | {
    "task": {"source": {"kind": "jsonl", "path": "pairs.jsonl"}, "holdout": {"prompts": 4}},
    "algorithm": {"name": "reward_model", "centring": 0.01},
}
LORA = {"kind": "lora", "rank": 2, "alpha": 4.0}


def rows_of_pairs(count=24):
    """The answer with more ones is better."""
    rng = np.random.default_rng(0)
    while count:
        better, worse = sorted(
            ("".join(rng.choice(list("01"), 4)) for _ in range(2)), key=lambda text: -text.count("1")
        )
        if better.count("1") > worse.count("1"):
            count -= 1
            yield {"id": count, "prompt": f"{count:b}=", "chosen": better, "rejected": worse}


def recipe_in(folder, data, **changes):
    """The recipe, checked and resolved as the command line would; the pairs stand beside it."""
    data = copy.deepcopy(data)
    for key, value in changes.items():
        *path, last = key.split("__")
        at = data
        for name in path:
            at = at[name]
        at[last] = value
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows_of_pairs()))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return checked_recipe(path, (), root=folder, probes=PROBES)


def start(folder, data, *, at=None, **changes):
    """Trains it in a new folder below `folder`."""
    changes["run"] = {
        "steps": 4,
        **changes.get("run", {}),
        "folder": str(folder / f"run{len(list(folder.glob('run*')))}"),
    }
    return session.start(recipe_in(folder, data, **changes), name="rows", root=folder, progress=Quiet(at))


def asked(folder, recipe, question):
    """What a question says of a runtime of the recipe."""

    async def ask():
        parts = await build_runtime(recipe, plan=make_plan(recipe), root=folder, folder=folder, note=print)
        try:
            return await question(parts)
        finally:
            await parts.close()

    return asyncio.run(ask())


def conversations(folder, recipe):
    """The conversations that the first step would learn from."""

    async def question(parts):
        batch = await batch_of(parts, parts.data)
        return [
            talk for group in batch.accepted for t in group.trajectories for talk in t.conversations
        ], parts.renderer

    return asked(folder, recipe, question)


CHAT = [
    {"role": "user", "content": "0="},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "01="},
    {"role": "assistant", "content": "10"},
]


def test_what_the_assistant_says_is_trained_with_the_end_of_each_turn(tmp_path):
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {
        "source": {"kind": "jsonl", "path": "chats.jsonl"},
        "holdout": {"prompts": 0},
        "examples": [{"prompt": "1=", "answer": "0"}],
    }
    recipe = recipe_in(tmp_path, SFT, task=task, evaluate={"every": 0}, batch={"prompts": 2})
    talks, renderer = conversations(tmp_path, recipe)
    (long,) = (talk for talk in talks if len(talk.tokens) == max(len(each.tokens) for each in talks))
    shown = [{"role": "user", "content": "1="}, {"role": "assistant", "content": "0"}, *CHAT]
    whole = renderer.tokenizer.apply_chat_template(shown, tokenize=False)
    assert renderer.all_text(long.tokens.tolist()) == whole
    assert renderer.all_text(long.tokens[long.trained].tolist()) == "1<|end|>10<|end|>", "and not the example's"
    assert long.tokens[-1] == END


def test_the_loss_is_that_of_transformers(tmp_path):
    finished = start(tmp_path, SFT, optimizer__lr=0.0, run={"steps": 1})
    recipe = recipe_in(tmp_path, SFT)
    network = AutoModelForCausalLM.from_pretrained(finished.model, dtype=torch.float64)
    heldout = load_task(recipe, tmp_path, None).heldout

    async def question(parts):
        return [talk for prompt in heldout for talk in await parts.data.conversations(parts, prompt)]

    losses, tokens = 0.0, 0
    for talk in asked(tmp_path, recipe, question):
        ids = torch.as_tensor(talk.tokens)[None]
        labels = torch.where(torch.as_tensor(talk.trained)[None], ids, -100)
        count = int(talk.trained.sum())
        losses += network(input_ids=ids, labels=labels).loss.item() * count
        tokens += count
    first, last = metrics(finished.folder)
    assert last["eval/loss"] == pytest.approx(losses / tokens, rel=1e-5)
    assert first["eval/loss"] == last["eval/loss"], "a learning rate of 0 changes nothing"
    assert last["eval/loss_low"] < last["eval/loss"] < last["eval/loss_high"]
    assert not any("kl/" in name or "reward/" in name for name in last)


def test_imitation_learns_and_its_answers_are_judged_where_there_are_rewards(tmp_path):
    rewards = [{"name": "accuracy", "kind": "exact"}]
    source = {"kind": "synthetic", "name": "copy", "length": [1, 6], "alphabet": "01", "count": 100}
    task = {"source": source, "prompt": "{text}=", "holdout": {"prompts": 20}}
    data = SFT | {"task": task, "rewards": rewards, "engine": {"max_new_tokens": 8}}
    steps = {"batch__prompts": 20, "evaluate": {"every": 60, "prompts": 20}, "checkpoint": {"every": 60}}
    finished = start(tmp_path, data, run={"steps": 60}, **steps)
    rows = metrics(finished.folder)
    assert rows[-1]["loss"] < rows[1]["loss"] / 2
    first, last = (row for row in rows if "eval/loss" in row)
    assert last["eval/loss"] < first["eval/loss"]
    assert {"eval/accuracy", "eval/low", "eval/high"} <= last.keys()
    assert not any((finished.folder / "samples").glob("step-*"))
    (answer,) = sample(finished.folder, ["01="], note=print)
    assert answer.failure is None and answer.tokens


@pytest.mark.slow
def test_a_reward_model_learns_a_rule_and_is_read_by_others(tmp_path):
    changes = {"batch__prompts": 20, "evaluate": {"every": 40, "prompts": 4}, "checkpoint": {"every": 40}}
    finished = start(tmp_path, PAIRS, run={"steps": 40}, **changes)
    rows = metrics(finished.folder)
    assert rows[0]["eval/accuracy"] == 0.5, "a head of zeros knows nothing"
    assert rows[-1]["pairs/accuracy"] > 0.9 and rows[-1]["eval/accuracy"] >= 0.75
    assert {"eval/brier", "eval/ece", "eval/ece_low", "eval/ece_high", "eval/loss"} <= rows[-1].keys()
    found = evaluate_run(finished.folder)
    assert found.accuracy == rows[-1]["eval/accuracy"]
    assert found.document()["brier"] == pytest.approx(rows[-1]["eval/brier"])
    with pytest.raises(RecipeError, match="a reward model answers nothing"):
        sample(finished.folder, ["01="], note=print)
    reads = {"name": str(finished.model)}
    follows = PLAIN | {
        "task": SFT["task"],
        "algorithm": {"name": "rloo"},
        "roles": {"reward_model": reads},
        "rewards": [{"name": "quality", "kind": "model"}],
        "evaluate": {"every": 0},
        "batch": {"prompts": 2, "samples": 4},
        "engine": {"max_new_tokens": 4},
    }
    run = start(tmp_path, follows, run={"steps": 1})
    (row,) = metrics(run.folder)
    assert row["reward/std"] > 0


KINDS = {
    "sft": (SFT, {}),
    "sft lora": (SFT, {"model__adapter": LORA}),
    "pairs": (PAIRS, {}),
    "pairs lora": (PAIRS, {"model__adapter": LORA}),
}


@pytest.mark.parametrize("kind", slow_but("sft", "pairs lora", of=KINDS))
def test_an_interrupted_run_goes_on_as_the_same_run(kind, tmp_path):
    data, changes = KINDS[kind]
    whole = start(tmp_path, data, **changes).folder

    class Killed(Exception):
        pass

    def die(name, *told):
        if (name, told[0]) == ("step", 2):
            raise Killed

    with pytest.raises(Killed):
        start(tmp_path, data, at=die, **changes)
    run = tmp_path / "run1"
    resume(run)
    assert_same_run(run, whole, step=4)
    assert sum("eval/loss" in row for row in lines(run / "metrics.jsonl")) == 3


@pytest.mark.parametrize("kind", slow_but("sft", "pairs lora", of=KINDS))
def test_two_devices_end_with_the_weights_of_one(kind, tmp_path):
    data, changes = KINDS[kind]
    recipe = recipe_in(tmp_path, data, **{"model__dtype": "float64", "optimizer__lr": 1e-4, **changes})
    single, reports, _ = asyncio.run(together(recipe, tmp_path, "flatten", devices=1))
    weights, crewed, _ = asyncio.run(together(recipe, tmp_path, "flatten", devices=2))
    assert distance(single, weights) < 1e-10
    assert [each["loss"] for each in crewed] == pytest.approx([each["loss"] for each in reports], rel=1e-9)


@pytest.mark.parametrize("data", [SFT, PAIRS], ids=["sft", "reward_model"])
def test_a_rehearsal_of_the_longest_row_leaves_no_trace(data, tmp_path):
    told = []
    plain, tried = (
        start(
            tmp_path, data, at=lambda name, *values: told.append(str(values)), guards__rehearsal=asked, run={"steps": 1}
        ).folder
        for asked in (False, True)
    )
    assert sum("rehearsal: " in each for each in told) == 1
    assert metrics(plain) == metrics(tried)
