"""Runs of many turns and conversations from recipes: on two cells as on one, and resumed in the middle, to the bit."""

import asyncio
from contextlib import suppress

import pytest

from crewed import alone, distance, together
from running import assert_same_run, lines, metrics, recipe_in, resume, start
from tiers import slow_but

SCRATCH = {"layers": 1, "width": 16, "heads": 2, "warmup_steps": 3}
MEMORY = {
    "model__scratch": {**SCRATCH, "characters": "abcd0123456789, -", "context": 16},
    "task": {
        "source": {"kind": "synthetic", "name": "lookup", "pairs": 4, "keys": 3, "count": 30},
        "prompt": "{key}",
        "holdout": {"prompts": 4},
    },
    "environment": {
        "kind": "memory",
        "chunk": 4,
        "memory_tokens": 2,
        "empty": "-",
        "update": "{question}{memory}{chunk}",
        "answer": "{question}{memory}",
    },
    "algorithm": {"name": "multi_conv", "average": "trajectory"},
    "rewards": [{"name": "accuracy", "kind": "numeric", "pick": "first"}],
}
GAME = {
    "model__scratch": {**SCRATCH, "characters": "0123<>=?", "context": 32},
    "task": {
        "source": {"kind": "synthetic", "name": "number", "range": [0, 3], "count": 30},
        "prompt": "?",
        "holdout": {"prompts": 4},
    },
    "environment": {
        **{"kind": "game", "game": "number", "range": [0, 3], "turns": 3},
        **{"higher": ">", "lower": "<", "right": "=", "invalid": "?"},
    },
    "algorithm": {"name": "rloo", "credit": "turn"},
    "rewards": [{"name": "won", "kind": "signal", "signal": "won"}],
}
TOOLS = {
    "model__scratch": {
        **SCRATCH,
        **{"characters": "0123456789+=calutor()", "context": 64},
        "demonstration": ["calculator({a}+{b})", "{answer}"],
    },
    "task__source": {"kind": "synthetic", "name": "addition", "max": 4},
    "task__prompt": "{a}+{b}=",
    "environment": {"kind": "tools", "turns": 2},
    "engine__max_new_tokens": 16,
}
KINDS = {"memory": MEMORY, "game": GAME, "tools": TOOLS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("memory", "separate"), ("game", "flatten"), pytest.param("memory", "elastic", marks=pytest.mark.slow)],
)
def test_two_cells_end_with_the_weights_of_one(kind, strategy, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", optimizer__lr=1e-4, **KINDS[kind])
    single, reports = asyncio.run(alone(recipe, tmp_path))
    weights, crewed, _ = asyncio.run(together(recipe, tmp_path, strategy))
    assert distance(single, weights) < 1e-10
    for name in ("loss", "grad_norm", "tokens/trained"):
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("kind", slow_but("memory", of=["memory", "game", "tools"]))
def test_a_run_that_died_in_the_middle_is_the_same_run_after_a_resume(kind, tmp_path):
    def die(name, *told):
        if (name, told[0]) == ("step", 3):
            raise Killed

    (tmp_path / "whole").mkdir()
    whole = start(tmp_path / "whole", run__steps=4, **KINDS[kind]).folder
    with suppress(Killed):
        start(tmp_path, at=die, run__steps=4, **KINDS[kind])
    (run,) = tmp_path.glob("run*")
    assert [line["step"] for line in lines(run / "metrics.jsonl")][-1] < 4
    resume(run)
    assert_same_run(run, whole, step=4)
    assert all(line["kl/engine_trainer"] < 1e-8 for line in metrics(run)[1:])
    row = lines(run / "samples" / "step-000004.jsonl")[0]
    assert len(row["conversations"]) == (5 if kind == "memory" else 1)
