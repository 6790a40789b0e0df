"""The training half of a step: who is in which update follows from keys, and several updates make one line."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.recipe.schema import BatchSection, Recipe
from stretto.runtime.minibatches import merged, minibatches
from stretto.types import Conversation, Sample


def sample(prompt, attempt, index=0):
    conversation = Conversation(
        tokens=np.array([1, 2]), trained=np.array([False, True]), logprobs=np.zeros(2), stop="stop", version=0
    )
    return Sample(key=(prompt, 0, attempt, index), conversation=conversation, advantage=np.ones(1), leads=index == 0)


SAMPLES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 2)), max_size=20, unique=True
).map(lambda keys: [sample(*key) for key in keys])


def recipe(updates, *, seed=0, epochs=1):
    return Recipe(seed=seed, batch=BatchSection(updates=updates, epochs=epochs))


@given(samples=SAMPLES, updates=st.integers(1, 6), seed=st.integers(0, 3), order=st.randoms(use_true_random=False))
def test_updates_share_the_trajectories_whatever_order_they_came_in(samples, updates, seed, order):
    parts = minibatches(samples, recipe(updates, seed=seed), step=1)
    assert sorted(s.key for part in parts for s in part) == sorted(s.key for s in samples)
    homes = {}
    for index, part in enumerate(parts):
        for each in part:
            assert homes.setdefault(each.key[:3], index) == index, "a trajectory was torn apart"
    sizes = [len({s.key[:3] for s in part}) for part in parts]
    assert max(sizes) - min(sizes) <= 1 or updates == 1
    assert len(parts) == max(1, min(updates, len(homes)))
    shuffled = list(samples)
    order.shuffle(shuffled)
    places = {sample.key: place for place, sample in enumerate(samples)}
    for part in parts:
        assert [places[s.key] for s in part] == sorted(places[s.key] for s in part), "siblings stay side by side"
    again = minibatches(shuffled, recipe(updates, seed=seed), step=1)
    assert [{s.key for s in part} for part in again] == [{s.key for s in part} for part in parts]


def test_another_step_and_another_seed_share_them_differently():
    samples = [sample("p", attempt) for attempt in range(12)]

    def shares(seed, step):
        return [frozenset(s.key for s in part) for part in minibatches(samples, recipe(3, seed=seed), step=step)]

    assert len({tuple(shares(seed, step)) for seed in (0, 1) for step in (1, 2)}) == 4


@pytest.mark.parametrize("updates", [1, 3])
def test_each_epoch_has_all_of_them_in_other_updates(updates):
    samples = [sample("p", attempt) for attempt in range(12)]
    parts = [frozenset(s.key for s in part) for part in minibatches(samples, recipe(updates, epochs=2), step=1)]
    first, second = parts[:updates], parts[updates:]
    assert first == [frozenset(s.key for s in part) for part in minibatches(samples, recipe(updates), step=1)]
    assert frozenset.union(*first) == frozenset.union(*second) == {s.key for s in samples}
    assert (first == second) == (updates == 1)
    assert minibatches([], recipe(updates, epochs=2), step=1) == [[]]


def report(tokens, **more):
    return {"tokens/trained": tokens, "tokens/shared": 1.0, "updates/skipped": 0.0, "learning_rate": 0.1, **more}


def test_several_updates_are_one_line():
    line = merged(
        [
            report(10.0, loss=1.0, **{"engine_trainer/largest": 0.5, "learning_rate": 0.1}),
            report(30.0, loss=2.0, **{"engine_trainer/largest": 0.2, "learning_rate": 0.3}),
        ]
    )
    assert line == pytest.approx(
        {
            "tokens/trained": 40.0,
            "tokens/shared": 2.0,
            "updates/skipped": 0.0,
            "learning_rate": 0.3,
            "loss": 1.75,
            "engine_trainer/largest": 0.5,
        }
    )


def skipped(tokens):
    nan = {"loss": math.nan, "grad_norm": math.nan, "engine_trainer/largest": math.nan}
    return {"tokens/trained": tokens, "tokens/shared": 1.0, "updates/skipped": 1.0, **nan}


@pytest.mark.parametrize("first", [True, False])
def test_an_update_that_was_skipped_is_counted_and_spoils_no_average(first):
    applied = report(10.0, loss=1.0, grad_norm=2.0, **{"engine_trainer/largest": 0.5})
    other = report(30.0, loss=2.0, grad_norm=4.0, **{"engine_trainer/largest": 0.2, "learning_rate": 0.3})
    line = merged([skipped(5.0), applied, other] if first else [applied, other, skipped(5.0)])
    assert line == pytest.approx(
        {
            "tokens/trained": 45.0,
            "tokens/shared": 3.0,
            "updates/skipped": 1.0,
            "learning_rate": 0.3,
            "loss": 1.75,
            "grad_norm": 3.5,
            "engine_trainer/largest": 0.5,
        }
    )


def test_where_every_update_was_skipped_the_line_says_so():
    line = merged([skipped(5.0), skipped(7.0)])
    assert (line["updates/skipped"], line["tokens/trained"]) == (2.0, 12.0)
    assert math.isnan(line["loss"])
    assert "learning_rate" not in line


def test_one_update_is_its_own_line_and_none_that_trained_anything_is_finite():
    assert merged([report(10.0, loss=1.5)]) == report(10.0, loss=1.5)
    assert merged([report(0.0, loss=0.0), report(0.0, loss=0.0)])["loss"] == 0.0
