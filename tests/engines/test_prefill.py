"""Contexts get into the cache as they are, and each is computed once."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alone import assert_alone, drained
from stretto.engines.base import Request
from stretto.engines.native import admission
from stretto.engines.native.cache import KeyValueCache
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.prefill import CacheWrites
from stretto.kernels.cuda.decode_graphs import RecordedSteps
from stretto.types import Weights

CPU = torch.device("cpu")
A, B = np.arange(5, 30), np.arange(8, 38)


class Counting(TorchDispatchMode):
    """Counts operations, each of which is a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += 1
        return function(*arguments, **(keywords or {}))


def filled(held, *, slots=8, tokens=20):
    """A cache with so much of a random row, the row's keys and values, and the operations of the second layer."""
    cache = KeyValueCache()
    cache.reserve(slots=slots, tokens=64)
    key, value = torch.randn(1, 2, tokens, 4), torch.randn(1, 2, tokens, 3)
    fill, counting = CacheWrites.of(cache, held, CPU), Counting()
    for layer in (0, 1):
        cache.at(layer, key, value)
    fill.take(0, key, value)
    with counting:
        fill.take(1, key, value)
    return cache, key, value, counting.count


def test_each_slot_gets_its_tokens_in_their_order():
    held = {5: np.array([3, 4, 7]), 0: np.array([3, 19]), 2: np.array([0])}
    cache, key, value, _ = filled(held)
    for states, new in ((cache.keys, key), (cache.values, value)):
        expected = torch.zeros_like(states[1])
        for slot, sources in held.items():
            expected[slot, :, : len(sources)] = new[0][:, sources]
        assert states[0].equal(expected) and states[1].equal(expected)


def test_a_layer_takes_as_many_operations_for_many_slots_as_for_one():
    one, many = ({slot: np.arange(slot, slot + 3) for slot in range(count)} for count in (1, 8))
    assert filled(one)[3] == filled(many)[3]


def asked(context, *keys, new=12):
    return [Request(key=key, tokens=context, max_new_tokens=new, stop=frozenset(), temperature=1.0) for key in keys]


@pytest.fixture
def computed(policy, monkeypatch):
    """The sizes of all rows that are computed and longer than a decode step's."""
    monkeypatch.setattr(admission, "WORTH_SHARING", 1)
    sizes = []

    def note(module, arguments):
        if arguments[0].numel() > 20:
            sizes.append(arguments[0].numel())

    handle = policy.network.get_input_embeddings().register_forward_pre_hook(note)
    yield sizes
    handle.remove()


def test_a_group_that_enters_in_parts_has_its_prompt_computed_once(policy, computed):
    requests = [*asked(A, 1, 2, new=3), *asked(A, 3, new=9), *asked(A, 4, 5, 6, 7)]
    engine = NativeEngine(policy, slots=3, speculate=False)
    engine.submit(requests)
    done = drained(engine)
    assert computed == [len(A)]
    assert_alone(policy, requests, done)


def test_who_comes_while_a_context_is_continued_joins_it(policy, computed):
    engine = NativeEngine(policy, speculate=False)
    engine.submit(asked(A, 1, 2))
    done = {each.key: each for each in engine.step(0.0)}
    engine.submit([*asked(A, 3), *asked(B, 4, 5)])
    done |= {each.key: each for each in engine.step(0.0)}
    assert (engine.used_prefixes, engine.batch.prefixes.tolist()) == (2, [0, 0, 0, 1, 1])
    done |= drained(engine)
    assert computed == [len(A), len(B)]
    assert_alone(policy, [*asked(A, 1, 2, 3), *asked(B, 4, 5)], done)


def test_a_shared_prefix_that_moved_is_joined_where_it_is_now(policy, computed):
    engine = NativeEngine(policy, slots=6, speculate=False)
    engine.submit([*asked(A, 1, 2, 3), *asked(B, 4, 5, 6)])
    engine.step(0.0)
    before = computed.copy()
    engine.abort([1, 2, 3])
    engine.submit([*asked(B, 7), *asked(A, 8)])
    engine.step(0.0)
    assert engine.batch.prefixes.tolist() == [0, 0, 0, 0, -1], "B's, A having gone"
    assert computed[len(before) :] == [len(A)]
    assert_alone(policy, [*asked(B, 4, 5, 6, 7), *asked(A, 8)], drained(engine))


def test_a_context_that_nobody_continues_any_more_is_computed_again(policy, computed):
    engine = NativeEngine(policy, speculate=False)
    engine.submit(asked(A, 1, 2, new=3))
    drained(engine)
    engine.submit(asked(A, 3, 4))
    drained(engine)
    assert computed == [len(A), len(A)]


def test_nobody_joins_what_other_weights_have_computed(policy, computed):
    engine = NativeEngine(policy, speculate=False)
    engine.submit(asked(A, 1, 2))
    engine.step(0.0)
    engine.receive(Weights(version=1, manifest={}, where="shared"))
    engine.submit(asked(A, 3, 4))
    drained(engine)
    assert computed == [len(A), len(A)]


def test_a_group_enters_where_one_of_another_has_left(policy, computed):
    """Its first answer brings a prefix that the others join, and needs no room for the context in its own place."""
    engine = NativeEngine(policy, speculate=False)
    engine.kv_tokens = 2 * 128 + 3 * 64
    first, second = (np.arange(count) % 30 + 5 for count in (100, 120))
    requests = [*asked(first, 1, new=2), *asked(first, 2, 3, new=8), *asked(second, 4, 5, 6, new=8)]
    engine.submit(requests)
    while not (done := engine.step(0.0)):
        pass
    engine._admit()
    assert [completion.key for completion in done] == [1]
    assert [request.key for request in engine.active] == [3, 2, 4]
    assert_alone(policy, requests, {each.key: each for each in done} | drained(engine))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("context", [A, np.arange(400) % 30 + 5])
def test_as_many_are_let_in_at_once_as_plans_count_with(policy, context, recorded):
    steps = RecordedSteps(policy, most=2000, tape=None) if recorded else None
    engine = NativeEngine(policy, speculate=False, steps=steps)
    about = {"samples": 4, "prompt": len(context), "most": 100, "recorded": recorded}
    for engine.kv_tokens in (300, 1600, 2900):
        engine.submit(
            [asked((context + group) % 35 + 5, 4 * group + i, new=100)[0] for group in range(9) for i in range(4)]
        )
        engine._admit()
        assert len(engine.active) == admission.most_at_once(engine.kv_tokens, **about)
        engine.close()


def test_who_joins_needs_no_room_for_the_context(policy, computed):
    """The cache holds the prefix and three answers, but no second copy of the context."""
    engine = NativeEngine(policy, speculate=False)
    requests = asked(np.arange(100) % 30 + 5, 1, 2, 3, new=20)
    engine.kv_tokens = 128 + 3 * 64
    engine.submit(requests[:2])
    done = {each.key: each for each in engine.step(0.0)}
    engine.submit(requests[2:])
    done |= {each.key: each for each in engine.step(0.0)}
    assert len(engine.active) == 3
    assert_alone(policy, requests, done | drained(engine))
