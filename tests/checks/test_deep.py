"""The second tier of checks: what only tokenizer, prompts and layers can tell, all of it at once."""

import json

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from running import RECIPE, data_with, recipe_in, start
from stretto.checks.deep import deep_problems
from stretto.models.scratch import character_tokenizer
from stretto.runtime.fitting import fitting
from stretto.tasks.source import load_prompts


def problems_of(folder, **changes):
    return {problem.field: problem for problem in deep_problems(recipe_in(folder, **changes), folder)}


def asking(folder, rows, **more):
    """A task that reads these rows."""
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"source": {"kind": "jsonl", "path": "data.jsonl", "name": None}, "holdout": {"prompts": 1}, **more}


SHOPS = '''
class Shop:
    def price(self, thing: str) -> str:
        """Says what a thing costs.

        Args:
            thing: Its name.
        """

class Bakery(Shop):
    """Inherits its tool, so its file does not say that there is one."""

class Silent(Shop):
    def price(self, thing): ...
'''


def row(text, answer="1"):
    return {"prompt": text, "answer": answer}


def test_a_recipe_that_works_has_no_problems(tmp_path):
    assert problems_of(tmp_path) == {}
    assert problems_of(tmp_path, model__adapter={"kind": "lora", "rank": 2, "alpha": 4.0}) == {}


def test_prompts_that_leave_no_room_for_an_answer_are_named(tmp_path):
    task = asking(tmp_path, [row("0"), row("1" * 26), row("1" * 27), row("0" * 40)])
    found = problems_of(tmp_path, task=task, evaluate__prompts=1)
    assert found.keys() == {"task"}
    assert "2 prompts leave no room for 4 new tokens in a context of 32" in found["task"].reason
    assert "(29 tokens)" in found["task"].reason
    assert "(42 tokens)" in found["task"].reason


def test_a_row_far_down_without_an_answer_is_named(tmp_path):
    task = asking(tmp_path, [*(row(f"{number:b}=") for number in range(30)), {"prompt": "11111111="}])
    found = problems_of(tmp_path, task=task, evaluate__prompts=1)
    assert found.keys() == {"rewards.0.kind"}
    assert "('11111111=') has none" in found["rewards.0.kind"].reason


def test_rows_far_down_that_a_teacher_cannot_be_asked_are_named(tmp_path):
    """The first rows are fine, so that it is not the first tier that sees it."""
    rows = [row(f"{number:b}=") | {"hint": "1"} for number in range(20)]
    taught = {"algorithm": {"name": "distill"}, "roles__teacher": {"name": "scratch", "prompt": "{prompt}{hint}="}}
    assert problems_of(tmp_path, task=asking(tmp_path, rows), evaluate__prompts=1, **taught) == {}
    lacking = [*rows, row("000="), row("001=")]
    found = problems_of(tmp_path, task=asking(tmp_path, lacking), evaluate__prompts=1, **taught)
    assert found.keys() == {"roles.teacher.prompt"}
    assert "has no column 'hint', and 1 more cannot be asked" in found["roles.teacher.prompt"].reason
    long = [*rows, *(row(f"{count:05b}=") | {"hint": "1" * count} for count in (19, 20, 99))]
    found = problems_of(tmp_path, task=asking(tmp_path, long), evaluate__prompts=1, **taught)
    assert "2 prompts leave no room for 4 new tokens in a context of 32" in found["roles.teacher.prompt"].reason
    dropping = asking(tmp_path, long, drop_longer_than="auto")
    recipe = recipe_in(tmp_path, task=dropping, evaluate__prompts=1, **taught)
    assert deep_problems(recipe, tmp_path) == []
    prompts = load_prompts(recipe.task, tmp_path)
    tokenizer = character_tokenizer(recipe.model.scratch.characters)
    assert len(fitting(recipe, prompts, tokenizer, 32)) == len(prompts) - 2


@pytest.mark.parametrize("bad", [row("2"), row("1", "2")], ids=["in a prompt", "in an answer"])
def test_characters_that_the_tokenizer_lacks_are_a_problem_wherever_they_are(tmp_path, bad):
    task = asking(tmp_path, [row(f"{number:b}=") for number in range(30)] + [bad])
    found = problems_of(tmp_path, task=task, evaluate__prompts=1)
    assert found.keys() == {"model.scratch.characters"}
    assert found["model.scratch.characters"].reason.startswith("1 prompt")


def test_lora_targets_that_match_nothing_are_named_one_by_one(tmp_path):
    adapter = {"kind": "lora", "rank": 2, "alpha": 4.0, "targets": ["q_proj", "query", "lm"]}
    found = deep_problems(recipe_in(tmp_path, model__adapter=adapter), tmp_path)
    assert [problem.field for problem in found] == ["model.adapter.targets"] * 2
    assert ["'query'" in found[0].reason, "'lm'" in found[1].reason] == [True, True]
    assert "q_proj" in found[0].fix


def test_all_problems_of_the_tier_come_at_once(tmp_path):
    found = problems_of(
        tmp_path,
        task=asking(tmp_path, [row(f"{number:b}=") for number in range(9)] + [row("1" * 40), row("x")]),
        model__adapter={"kind": "lora", "rank": 2, "alpha": 4.0, "targets": ["query"]},
        evaluate__prompts=1,
    )
    assert found.keys() == {"task", "model.scratch.characters", "model.adapter.targets"}


def test_devices_that_cannot_share_the_heads_of_a_model_do_not_generate_together(tmp_path):
    names = [f"localhost/cpu:{index}" for index in range(4)]
    lane = {"role": "generate", "devices": names[:3], "mesh": {"tp": 3}}
    cells = [lane, {"role": "train", "devices": names[3:]}]
    placement = {"cluster": "4xcpu", "strategy": "separate", "cells": cells}
    (problem,) = deep_problems(recipe_in(tmp_path, placement=placement), tmp_path)
    assert problem.field == "placement.cells" and "tp 3 does not divide the model's 2 heads" in problem.reason


def test_a_gpu_that_is_not_there_cannot_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = problems_of(tmp_path, placement__cluster="1xgpu")
    assert found.keys() == {"placement.cluster"}
    assert problems_of(tmp_path, placement__cluster="1xcpu") == {}


@pytest.fixture(scope="module")
def folder_model(tmp_path_factory):
    """A model in a folder, as transformers saves it."""
    return start(tmp_path_factory.mktemp("made"), run__steps=1, evaluate__every=0).model


def test_a_model_in_a_folder_is_described_without_its_weights(folder_model, tmp_path):
    for file in folder_model.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_text(file.read_text())
    model = {"name": str(tmp_path), "dtype": "float32", "adapter": None}
    assert problems_of(tmp_path, model=model) == {}
    long = data_with(task__prompt="{text}" + "1" * 30)["task"]
    assert problems_of(tmp_path, model=model, task=long).keys() == {"task"}


def test_answers_that_nothing_ends_are_not_imitated(folder_model, tmp_path):
    for file in folder_model.iterdir():
        if file.suffix == ".json":
            found = json.loads(file.read_text())
            # Where nothing is said, a Llama has an end of its own.
            nothing = {key: None for key in ("eos_token", "eos_token_id") if key in found}
            (tmp_path / file.name).write_text(json.dumps(found | nothing))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] + '=' }}{% endfor %}")
    model = {"name": str(tmp_path), "dtype": "float32", "adapter": None}
    sft = {"algorithm": {"name": "sft"}, "rewards": [], "batch": {"prompts": 2}, "engine": {}}
    found = problems_of(tmp_path, model=model, **sft)
    assert found.keys() == {"model.name"} and "never to stop" in found["model.name"].reason
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert problems_of(tmp_path, model=model, **sft) == {}


def test_a_folder_whose_tokenizer_cannot_be_read_is_a_problem_of_the_model(folder_model, tmp_path):
    for file in folder_model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text("{" if file.name == "tokenizer.json" else file.read_text())
    found = problems_of(tmp_path, model={"name": str(tmp_path), "dtype": "float32", "adapter": None})
    assert found.keys() == {"model.name"}


def test_a_template_that_cannot_render_a_prompt_is_a_problem_of_the_task(folder_model, tmp_path):
    for file in folder_model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text(file.read_text())
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}{{ 1 }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    model = {"name": str(tmp_path), "dtype": "float32", "adapter": None}
    assert problems_of(tmp_path, model=model) == {}
    found = problems_of(tmp_path, model=model, task={**RECIPE["task"], "system": "be brief"})
    assert found.keys() == {"task"}
    assert "no system messages" in found["task"].reason
    found = problems_of(tmp_path, model=model, environment={"kind": "tools"})
    assert "takes no calls of tools" in found["model.name"].reason
    (tmp_path / "shops.py").write_text(SHOPS)
    found = problems_of(tmp_path, model=model, environment={"kind": "shops:Bakery"})
    assert "takes no calls of tools" in found["model.name"].reason
    found = problems_of(tmp_path, model=model, environment={"kind": "shops:Silent"})
    assert "Silent.price is no tool" in found["environment.kind"].reason
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert problems_of(tmp_path, model=model, environment={"kind": "tools"}) == {}


def test_a_template_that_writes_half_a_surrogate_pair_is_told_in_words(folder_model, tmp_path):
    for file in folder_model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ '\\ud800' }}")
    found = problems_of(tmp_path, model={"name": str(tmp_path), "dtype": "float32", "adapter": None})
    assert found.keys() == {"task"} and "half of a surrogate pair" in found["task"].reason


def test_what_an_environment_shows_has_to_fit_and_to_be_spelt(tmp_path):
    task = asking(tmp_path, [row(text) | {"document": "0" * 70} for text in ("0", "1", "00")])
    memory = {"kind": "memory", "chunk": 64, "empty": "-", "update": "{memory}{chunk}", "answer": "{memory}"}
    found = problems_of(tmp_path, task=task, environment=memory, evaluate__prompts=1)
    assert found.keys() == {"environment.chunk", "model.scratch.characters"}
    assert "tokens for a piece of its text, in a context of 32" in found["environment.chunk"].reason
    assert "does not have '-', which environment memory shows" in found["model.scratch.characters"].reason
    source = {"kind": "synthetic", "name": "number", "range": [0, 1], "count": 14}
    game = {"kind": "game", "range": [0, 1], "higher": "0", "lower": "1", "invalid": "?"}
    task = {"source": source, "prompt": "=", "holdout": {"prompts": 4}}
    found = problems_of(tmp_path, task=task, environment=game)
    assert "does not have '?'" in found["model.scratch.characters"].reason


@pytest.mark.parametrize("length", [31, 100_000])
def test_a_reference_answer_that_does_not_fit_is_not_imitated(tmp_path, length):
    rows = [row(f"{number:b}=") for number in range(30)] + [row("1=", "1" * length)]
    task = asking(tmp_path, rows, prompt="{prompt}")
    scratch = RECIPE["model"]["scratch"]
    found = problems_of(tmp_path, task=task, evaluate__prompts=1)
    assert found.keys() == {"model.scratch.warmup_steps"}
    assert (
        "1 prompts leave no room in a context of 32 for the reference answers"
        in found["model.scratch.warmup_steps"].reason
    )
    unwarmed = {**RECIPE["model"], "scratch": {**scratch, "warmup_steps": 0}}
    assert problems_of(tmp_path, task=task, evaluate__prompts=1, model=unwarmed) == {}


def test_a_text_that_is_surely_too_long_is_not_tokenised(tmp_path, monkeypatch):
    long = "1" * 1_900_000
    task = asking(tmp_path, [row("0"), row(long), row("1", long)])
    encoded = []
    encode = PreTrainedTokenizerFast.encode
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "encode",
        lambda self, text, **more: encoded.append(len(text)) or encode(self, text, **more),
    )
    found = problems_of(tmp_path, task=task, evaluate__prompts=1)
    assert found.keys() == {"task", "model.scratch.warmup_steps"}
    assert "(1900021 characters)" in found["task"].reason
    assert max(encoded) < 100


def test_a_cell_that_cannot_share_the_matrices_of_a_model_is_a_problem(tmp_path):
    devices = [f"localhost/cpu:{index}" for index in range(4)]
    for mesh, told in (({"tp": 2}, None), ({"tp": 4}, "2 heads"), ({"ep": 2}, "no experts that could be spread")):
        cells = [
            {"role": "generate", "devices": devices[:1]},
            {"role": "train", "devices": devices, "mesh": mesh},
        ]
        found = problems_of(tmp_path, placement={"cells": cells, "cluster": "4xcpu"})
        assert found.keys() == ({"placement.cells"} if told else set())
        assert told is None or told in found["placement.cells"].reason
    bits = {"model__quantize": "int8", "model__adapter": {"kind": "lora", "rank": 2, "alpha": 4.0}}
    cells[1]["mesh"] = {"tp": 2}
    assert problems_of(tmp_path, placement={"cells": cells, "cluster": "4xcpu"}, **bits) == {}
