"""Which prompts are held out, and in what order the others are drawn, whatever happens in between."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import CheckpointError, RecipeError
from stretto.recipe.schema import Holdout, Recipe, Source
from stretto.tasks.source import READERS, PromptSource, split, split_task
from stretto.types import Prompt


def some(count: int, start: int = 0) -> list[Prompt]:
    numbers = range(start, start + count)
    return [Prompt(id=f"n/{number}", messages=({"role": "user", "content": str(number)},)) for number in numbers]


def ids(prompts: Any) -> list[str]:
    return [prompt.id for prompt in prompts]


def drawn(source: PromptSource, n: int) -> list[tuple[str, int]]:
    return [(prompt.id, visit) for prompt, visit in source.take(n)]


def test_what_a_held_out_prompt_asks_is_not_trained_on_under_another_id() -> None:
    twins = [replace(prompt, id=f"twin/{prompt.id}") for prompt in some(20)]
    prompts = [*some(20), *twins]
    train, heldout = split(prompts, Holdout(prompts=10))
    assert not {prompt.messages[0]["content"] for prompt in train} & {p.messages[0]["content"] for p in heldout}
    assert len(heldout) == 10
    with pytest.raises(RecipeError, match="all 2 prompts ask what the 1 that are held out ask"):
        split([prompts[0], twins[0]], Holdout(prompts=1))


@pytest.mark.parametrize(("kind", "apart"), [("single_turn", True), ("tools", True), ("game", False)])
def test_rows_that_ask_the_same_are_held_out_together_where_the_messages_are_all_that_is_shown(kind, apart) -> None:
    rows = [replace(each, id=f"{each.id}-{tag}", tags={"source": tag}) for each in some(20) for tag in ("a", "b")]
    recipe = Recipe.model_validate({"environment": {"kind": kind}, "task": {"holdout": {"prompts": 5}}}, strict=False)
    train, heldout = split_task(recipe, rows)
    shared = {each.messages[0]["content"] for each in train} & {each.messages[0]["content"] for each in heldout}
    assert bool(shared) != apart


def test_held_out_prompts_are_the_same_in_any_order_of_the_data() -> None:
    prompts = some(50)
    train, heldout = split(prompts, Holdout(prompts=10))
    assert len(heldout) == 10
    assert sorted(ids(train) + ids(heldout)) == sorted(ids(prompts))
    assert split(prompts[::-1], Holdout(prompts=10)) == (train, heldout)
    assert ids(split(prompts, Holdout(prompts=5))[1]) == ids(heldout)[:5]


def test_another_seed_holds_out_others() -> None:
    prompts = some(50)
    assert split(prompts, Holdout(prompts=10, seed=1))[1] != split(prompts, Holdout(prompts=10))[1]


def test_added_prompts_move_the_split_as_little_as_they_can() -> None:
    before = set(ids(split(some(200), Holdout(prompts=50))[1]))
    after = set(ids(split(some(220), Holdout(prompts=50))[1]))
    newcomers = after & set(ids(some(20, start=200)))
    assert len(before - after) == len(newcomers)
    assert len(newcomers) <= 20


def test_nothing_held_out_leaves_all() -> None:
    train, heldout = split(some(3), Holdout(prompts=0))
    assert (len(train), heldout) == (3, ())


@pytest.mark.parametrize("count", [5, 6])
def test_a_holdout_that_leaves_nothing_to_train_on_is_refused(count: int) -> None:
    with pytest.raises(RecipeError, match="leaves none to train on") as caught:
        split(some(5), Holdout(prompts=count))
    assert caught.value.problems[0].field == "task.holdout.prompts"
    assert "at most 4" in caught.value.problems[0].fix


def test_every_epoch_draws_each_prompt_once_in_an_order_of_its_own() -> None:
    source = PromptSource(some(20), seed=3)
    epochs = [drawn(source, 20) for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(id for id, _ in epoch) == sorted(ids(some(20)))
        assert {visit for _, visit in epoch} == {number}
    assert len({tuple(id for id, _ in epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_the_seed_and_not_on_the_order_of_the_data() -> None:
    first = drawn(PromptSource(some(20), seed=3), 50)
    assert drawn(PromptSource(some(20)[::-1], seed=3), 50) == first
    assert drawn(PromptSource(some(20), seed=4), 50) != first


def test_the_order_is_the_same_in_every_version() -> None:
    expected = [("n/2", 0), ("n/1", 0), ("n/0", 0), ("n/3", 0), ("n/2", 1), ("n/0", 1)]
    assert drawn(PromptSource(some(4), seed=0), 6) == expected


@settings(deadline=None)
@given(
    size=st.integers(1, 7),
    seed=st.integers(-3, 3),
    takes=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8),
)
def test_any_takes_with_restores_in_between_draw_one_sequence(
    size: int, seed: int, takes: list[tuple[int, bool]]
) -> None:
    source = PromptSource(some(size), seed=seed)
    pieces: list[tuple[str, int]] = []
    for n, stop in takes:
        if stop:
            saved = json.loads(json.dumps(source.state()))
            source.take(3)
            source = PromptSource(some(size)[::-1], seed=seed)
            source.restore(saved)
        pieces += drawn(source, n)
    assert pieces == drawn(PromptSource(some(size), seed=seed), len(pieces))


def test_a_source_can_be_put_back_to_where_it_was() -> None:
    source = PromptSource(some(5), seed=0)
    source.take(4)
    state = source.state()
    later = drawn(source, 9)
    source.restore(state)
    assert drawn(source, 9) == later


@pytest.mark.parametrize("other", [PromptSource(some(6), seed=0), PromptSource(some(5), seed=1)])
def test_a_state_of_other_prompts_or_another_seed_is_refused(other: PromptSource) -> None:
    with pytest.raises(CheckpointError, match="other prompts or another seed"):
        PromptSource(some(5), seed=0).restore(other.state())


@pytest.mark.parametrize("change", [{"drawn": -1}, {"drawn": "3"}, {"drawn": None}, {"fingerprint": None}])
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    source = PromptSource(some(5), seed=0)
    with pytest.raises(CheckpointError):
        source.restore({**source.state(), **change})
    with pytest.raises(CheckpointError):
        source.restore({})


def test_a_source_without_prompts_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptSource([], seed=0)


def test_every_source_has_a_reader() -> None:
    assert set(Source.records()) == READERS.keys()
