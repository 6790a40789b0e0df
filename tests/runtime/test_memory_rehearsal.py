"""What is tried before the first step: it finds what fits, says what does not, and leaves no trace."""

import asyncio
import re

import pytest
import torch

from running import lines, metrics, samples, start, tensors
from stretto.engines.native.engine import NativeEngine
from stretto.errors import GuardError
from stretto.recipe.schema import Recipe
from stretto.runtime.memory_rehearsal import largest_by_doubling, largest_by_halving, smaller

TRIED = {"guards__rehearsal": True, "run__steps": 2}


def with_room_for(tokens):
    """An engine on a device that has the memory for rows of so many tokens; what is only scored needs less."""

    def engine(policy):
        def enter(layer, inputs):
            if torch.is_grad_enabled() and inputs[0].shape[1] > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        policy.network.get_decoder().layers[0].register_forward_pre_hook(enter)
        return NativeEngine(policy)

    return engine


def test_a_budget_that_does_not_fit_is_refused_with_one_that_does(tmp_path):
    with pytest.raises(GuardError, match="activations are too large") as refused:
        start(tmp_path, engine=with_room_for(50), batch__token_budget=96, **TRIED)
    assert "weights" in str(refused.value)
    assert not list(tmp_path.glob("run*/metrics.jsonl")) or not lines(*tmp_path.glob("run*/metrics.jsonl"))
    (fitting,) = re.findall(r"batch.token_budget: (\d+)", str(refused.value))
    assert 25 < int(fitting) <= 50
    folder = start(tmp_path, engine=with_room_for(50), batch__token_budget=int(fitting), **TRIED).folder
    assert len(lines(folder / "metrics.jsonl")) == 3


def test_a_budget_that_is_left_open_becomes_one_that_fits(tmp_path):
    told = []
    start(tmp_path, engine=with_room_for(50), at=lambda name, *values: told.append(str(values)), **TRIED)
    assert "tokens fit" in "".join(told)


def test_a_conversation_that_does_not_fit_alone_is_refused_with_what_is_too_large(tmp_path, monkeypatch):
    with pytest.raises(GuardError, match=r"nor does a single conversation .* its activations are too large") as refused:
        start(tmp_path, engine=with_room_for(3), **TRIED)
    assert "lower engine.max_new_tokens" in str(refused.value)
    monkeypatch.setattr("stretto.workers.rehearsal.memory_of", lambda device: 0)
    with pytest.raises(
        GuardError, match=r"the largest part is optimizer\n    fix: optimizer.name: adamw8bit"
    ) as refused:
        start(tmp_path, engine=with_room_for(3), **TRIED)
    assert "model.adapter" in str(refused.value)


ASKING = """
from stretto.types import Outcome

async def asking(prompt, model):
    return Outcome(answer=(await model.chat(list(prompt.messages))).text)
"""
"""An environment of which nobody knows how often it asks."""

PLAYED = {
    "model__scratch": {"layers": 1, "width": 16, "heads": 2, "warmup_steps": 1, "characters": "0123<>=?"},
    "model__scratch__context": 32,
    "task__source": {"kind": "synthetic", "name": "number", "range": [0, 3], "count": 30},
    "task__prompt": "?",
    "environment": {"kind": "game", "game": "number", "range": [0, 3], "turns": 2, "higher": ">", "lower": "<"},
    "environment__right": "=",
    "environment__invalid": "?",
    "rewards": [{"name": "won", "kind": "signal", "signal": "won"}],
    "engine__max_new_tokens": 2,
    "evaluate__every": 0,
}


def test_a_game_needs_no_room_for_a_conversation_that_it_cannot_have(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.runtime.rehearsed_rows.TOLD", 4)
    with pytest.raises(GuardError, match=r"activations are too large\n.*or environment.turns"):
        start(tmp_path, engine=with_room_for(10), **PLAYED, **TRIED)
    assert start(tmp_path, engine=with_room_for(20), **PLAYED, **TRIED, batch__token_budget=16).folder


def test_a_conversation_that_may_never_come_is_a_warning(tmp_path):
    told = []
    (tmp_path / "asked_env.py").write_text(ASKING)
    own = {"environment": {"kind": "asked_env:asking"}, "at": lambda name, *values: told.append(str(values))}
    start(tmp_path, engine=with_room_for(20), batch__token_budget=16, **own, **TRIED)
    assert "memory: conversations of up to" in "".join(told)


def test_what_makes_a_part_smaller_is_nothing_that_a_recipe_has():
    model = {"name": "a", "quantize": "nf4", "adapter": {"rank": 8}}
    recipe = Recipe.model_validate({"model": model, "task": {"prompt": "{a}"}, "optimizer": {"name": "adamw8bit"}})
    assert smaller("weights", recipe, "train") == "a smaller model"
    assert smaller("gradients", recipe, "train") == "a lower model.adapter.rank, or a smaller model"
    assert smaller("optimizer", recipe, "train") == "a lower model.adapter.rank, or a smaller model"


CRITIC = {
    "roles": {"critic": {"name": "scratch", "optimizer": {"name": "adamw16bit"}}},
    "algorithm__name": "ppo",
}


@pytest.mark.parametrize(
    "changes", [{}, {"optimizer__name": "adamw8bit"}, CRITIC], ids=["adamw", "adamw8bit", "critic"]
)
def test_a_rehearsal_leaves_no_trace(changes, tmp_path):
    told = []
    changes = {"at": lambda name, *values: told.append(str(values)), "run__steps": 2, **changes}
    plain, tried = (start(tmp_path, guards__rehearsal=asked, **changes).folder for asked in (False, True))
    assert sum("rehearsal: " in each for each in told) == 1
    assert metrics(plain) == metrics(tried)
    assert samples(plain) == samples(tried)
    one, other = (tensors(folder / "checkpoints" / "step-000002") for folder in (plain, tried))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.parametrize("most", range(12))
def test_the_largest_number_that_fits_is_found(most):
    tries = []

    async def fits(count):
        tries.append(count)
        return count <= most

    assert asyncio.run(largest_by_halving(fits, 10)) == min(most, 10)
    assert len(tries) <= 5
    tries.clear()
    found = asyncio.run(largest_by_doubling(fits, 10))
    assert found == next(each for each in (10, 8, 4, 2, 1, 0) if each <= most)
    assert not any(count > most for count in tries[:-1]), "nothing is tried after a failure"
