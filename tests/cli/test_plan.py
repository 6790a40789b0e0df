"""`stretto plan`: what people and programs get, and what it says to questions that have no answer."""

import json
import subprocess
import sys

import pytest

from stretto.bench import measure
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.runtime import precision

SEVEN = ["model.shape=qwen2.5-7b", "model.adapter=null", "engine.max_new_tokens=1024"]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("batch: {prompts: 16, samples: 8}\n")
    return "r.yaml"


def failed(capsys):
    out, error = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in error
    return error


def test_people_get_a_table_reasons_memory_and_lanes(recipe, capsys):
    assert main(["plan", recipe, *SEVEN, "--cluster", "8xH100", "placement.price_per_gpu_hour=2"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    alike = "interleave I1, interleave I2 are no choice: "
    for word in ("flatten", "separate", "elastic", "cost/step", "idle", alike, "GB in the phase", "data sheets"):
        assert word in out
    assert "localhost/gpu:0 |g" in out
    assert "can be executed today" in out
    assert "lengths are assumed" in out


def test_programs_get_one_document(recipe, capsys):
    assert main(["plan", recipe, *SEVEN, "--cluster", "8xH100", "--json", "placement.price_per_gpu_hour=2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"plans", "rejected"} <= told.keys()
    best = told["plans"][0]
    wanted = {"strategy", "fits", "seconds", "idle", "memory_gb", "tokens_per_second", "cost_per_step", "cells", "why"}
    assert wanted <= best.keys()
    assert best["cost_per_step"] == pytest.approx(8 * 2 * best["seconds"]["step"] / 3600)
    assert len(best["memory_gb"]) == 8
    assert max(device["peak"] for device in best["memory_gb"].values()) > 0
    assert all(0 <= device["peak"] <= 80 for device in best["memory_gb"].values())
    assert {cell["role"] for cell in best["cells"]} == {"generate", "train"}
    assert {entry["strategy"] for entry in told["rejected"]} == {"interleave I1", "interleave I2"}


def test_dapo_is_told_with_its_rounds_and_updates(recipe, tmp_path, capsys):
    asked = ["plan", recipe, *SEVEN, "--cluster", "8xH100", "--strategy", "flatten", "algorithm.name=dapo"]
    assert main([*asked, "batch.updates=2", "--json", "--timeline", "t.json"]) == 0
    told = json.loads(capsys.readouterr().out)
    plan = told["plans"][0]
    assert (plan["rounds"] > 1, plan["launched"] > 16, plan["updates"]) == (True, True, 2)
    assert plan["seconds"]["old"] > 0
    assert "50% of the groups" in told["assumed"][1]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    begun = {event["ts"] for event in events if event["name"] == "publish"}
    assert {event["name"] for event in events} == {"generate", "old", "train", "publish"} and len(begun) == 2
    assert main([*asked, "batch.updates=2"]) == 0
    out = capsys.readouterr().out
    assert f"of {plan['launched']} groups in {plan['rounds']} rounds, 2 updates" in out and "o old" in out


def test_what_runs_today_comes_first_and_what_waits_says_for_what(capsys):
    asked = ["plan", "--model", "gemma3-27b", "--cluster", "16xH100"]  # of which devices cannot share matrices
    assert main([*asked, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    runs = [plan["runs_today"] for plan in plans]
    assert runs == sorted(runs, reverse=True) and {True, False} == set(runs)
    for kind in (True, False):
        seconds = [plan["seconds"]["step"] for plan in plans if plan["runs_today"] is kind]
        assert seconds == sorted(seconds)
        assert all((plan["waits_for"] == []) is kind for plan in plans if plan["runs_today"] is kind)
    assert main(asked) == 0
    out = capsys.readouterr().out
    first = plans[0]["strategy"]
    assert f"{first} is the best that can be executed today" in out
    rows = out.splitlines()
    head = next(number for number, line in enumerate(rows) if line.startswith("strategy "))
    assert rows[head].split()[1:3] == ["runs", "today"] and rows[head + 1].startswith(first)
    assert rows[head + 1].removeprefix(first).split()[0] == "yes"
    waiting = next(plan for plan in plans if not plan["runs_today"])
    assert f"it waits for {', '.join(waiting['waits_for'])}" in out


def test_where_nothing_can_be_executed_that_is_said(recipe, capsys):
    assert main(["plan", recipe, *SEVEN, "--cluster", "8xH100", "model.dtype=float16"]) == 0
    assert "no plan can be executed yet; the best waits for" in capsys.readouterr().out


def test_a_model_and_devices_are_enough_to_plan(recipe, capsys):
    assert main(["plan", "--model", "qwen2.5-7b", "--cluster", "8xH100", "--lora", "16"]) == 0
    out = capsys.readouterr().out
    assert "qwen2.5-7b, 7.6" in out and "training LoRA of rank 16, on 8 x H100" in out
    assert "a step: 64 prompts x 8 samples" in out
    assert main(["plan", "--model", "qwen2.5-0.5b", "batch.prompts=4", "--cluster", "4090"]) == 0
    out = capsys.readouterr().out
    assert "training all weights, on 1 x RTX4090" in out and "a step: 4 prompts" in out
    for wrong, words in (
        (["--cluster", "8xH100"], "RECIPE: is missing"),
        (["r.yaml", "--model", "qwen2.5-7b"], "--model: has no effect with a recipe"),
        (["r.yaml", "--lora", "8"], "--lora: has no effect without --model"),
        (["--model", "qwen9-1b", "--cluster", "H100"], "model.name"),
    ):
        assert main(["plan", *wrong]) == 2
        assert words in capsys.readouterr().err


def test_one_strategy_can_be_asked_for(recipe, capsys):
    assert main(["plan", recipe, *SEVEN, "--cluster", "8xH100", "--strategy", "separate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {plan["strategy"] for plan in told["plans"]} == {"separate"}
    assert told["rejected"] == []


def test_a_timeline_is_a_chrome_trace_of_what_is_simulated(recipe, tmp_path, capsys):
    assert main(["plan", recipe, "--cluster", "2xcpu", "--timeline", "t.json"]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} == {"generate", "train", "publish"}
    assert all(event["ph"] == "X" and event["args"]["simulated"] for event in events)
    capsys.readouterr()
    assert main(["plan", recipe, "--cluster", "2xcpu", "--timeline", "none/t.json"]) == 2
    assert "--timeline" in failed(capsys)


def test_the_recipes_own_strategy_is_marked(recipe, capsys):
    own = "placement={strategy: interleave, fractions: [1, 1, 0.25, 0.75]}"
    assert main(["plan", recipe, *SEVEN, "--cluster", "8xH100", "algorithm.kl.coef=0.1", own]) == 0
    marked = [line for line in capsys.readouterr().out.splitlines() if " * " in line]
    assert [line.split("  ")[0] for line in marked] == ["interleave (1, 1, 1/4, 3/4) *"]


def test_a_cluster_may_be_a_file_with_devices_of_its_own(recipe, tmp_path, capsys):
    text = "hosts: [{device: X, devices: 4}]\ndevices: {X: {flops: 4.0e14, memory_gb: 64, bandwidth: 2.0e12}}\n"
    (tmp_path / "c.yaml").write_text(text)
    assert main(["plan", recipe, *SEVEN, "--cluster", "c.yaml"]) == 0
    assert "on 4 x X" in capsys.readouterr().out
    (tmp_path / "c.yaml").write_text("hosts: []\n")
    for told in (["--cluster", "c.yaml"], ["placement.cluster=c.yaml"]):
        assert main(["plan", recipe, *SEVEN, *told]) == 2
        assert "c.yaml: hosts" in failed(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "8xH101"], ["placement.cluster", "H100", "cluster file"]),
        (["--cluster", "lots"], ["placement.cluster", "8xH100"]),
        (
            ["--cluster", "1x24GB"],
            ["4 cards: A10, L4, RTX3090, RTX4090", "1xA10", "--cluster list"],
        ),
        (["--cluster", "24 gb"], ["placement.cluster", "4 cards: A10, L4, RTX3090, RTX4090"]),
        (["--cluster", "2x4x80GB"], ["placement.cluster", "4 cards: A100, A800, H100, H800"]),
        (["--cluster", "8x100G"], ["placement.cluster", "no card that is known", "of 96 GB, are H20, GH200"]),
        ([], ["placement.cluster", "--cluster 8xH100"]),
        (["--cluster", "8xH100", "model.shape=lama-7b"], ["model.shape", "llama-7b", "layers: 32"]),
        (["--cluster", "8xH100", "--strategy", "flat"], ["--strategy", "flatten"]),
        (["--cluster", "8xH100", "--strategy", "interleave"], ["placement.strategy", "nothing to lay side by side"]),
        (["--cluster", "8xH100", "model.shape=null", "model.name=lama-7b"], ["llama-7b", "as model.shape={layers"]),
        (["--cluster", "8xH100", "--measure"], ["--measure", "this host has no localhost/gpu:"]),
        (["--cluster", "8xH100", "model.shapes=x"], ["model.shapes"]),
        (
            ["--cluster", "2xA10", "model.shape=llama-65b", "model.adapter=null"],
            ["nothing fits on 2 x A10", "optimizer", "GB too much", "xA10 would hold it"],
        ),
    ],
)
def test_a_question_without_an_answer_says_what_to_ask(recipe, capsys, arguments, words):
    assert main(["plan", recipe, *arguments]) == 2
    error = failed(capsys)
    for word in words:
        assert word in error


def test_cards_are_listed_alone_and_with_a_forecast_of_a_recipe(recipe, capsys):
    assert main(["plan", "--cluster", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["card", "GB"] and any(line.split()[:2] == ["L4", "24"] for line in lines)
    assert main(["plan", recipe, *SEVEN, "--cluster", "list", "--json"]) == 0
    cards = {card["name"]: card for card in json.loads(capsys.readouterr().out)["cards"]}
    assert cards["L4"]["forecast"] == "does not fit" and cards["B300"]["forecast"].endswith(" GB")
    sizes = [card["memory_gb"] for card in cards.values()]
    assert sizes == sorted(sizes) and "cpu" not in cards
    assert main(["plan", recipe, "model.shape=none", "--cluster", "list"]) == 2
    assert "model.shape" in failed(capsys), "what is wrong with the recipe is said once"


def test_a_card_is_chosen_by_its_memory_where_only_one_has_that(recipe, capsys):
    assert main(["plan", recipe, *SEVEN, "--cluster", "2x180GB"]) == 0
    assert "on 2 x B200" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "dtype"), [((), "float32"), (("model.dtype=bfloat16",), "bfloat16")])
def test_steps_are_measured_in_the_dtype_of_a_run_on_the_devices_that_were_named(
    recipe, monkeypatch, tmp_path, capsys, changes, dtype
):
    def stop(asked, *rest, **named):
        raise RecipeError.of("--measure", f"{asked.model.dtype} on {asked.placement.cluster}", "end here")

    monkeypatch.setattr(precision, "bf16_slowdown", lambda section: "slow" if section.cluster == "2xcpu" else None)
    monkeypatch.setattr(measure, "measure", stop)
    (tmp_path / recipe).write_text(
        "model: {name: scratch, adapter: null, scratch: {characters: '0123456789='}}\n"
        "task: {source: {kind: synthetic, name: reverse, length: [3, 4]}, prompt: '{text}='}\n"
        "rewards: [{name: accuracy, kind: exact}]\n"
    )
    assert main(["plan", recipe, "--cluster", "2xcpu", "--measure", *changes]) == 2
    assert f"{dtype} on 2xcpu" in failed(capsys)


def test_a_failure_is_a_document_too(recipe, capsys):
    assert main(["plan", recipe, "--cluster", "8xH101", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["plans"] is None
    assert told["problems"][0]["field"] == "placement.cluster"


def test_planning_loads_no_torch_and_no_arrays_and_a_document_no_screen(recipe):
    code = (
        "import sys; from stretto.cli.main import main; "
        "code = main(['plan', 'r.yaml', '--cluster', '8xH100', '--json']); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'ray', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
