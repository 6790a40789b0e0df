"""Decode steps of rounded sizes answer as steps that come as they are; what is recorded of them replays the same.

A CUDA graph needs a GPU, but not what makes one possible: fixed sizes, fixed addresses, no question to the host. Here
a tape made by torch's tracer stands in its place: it too holds the very tensors it met, and nothing else of the moment.
"""

import copy
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from alone import ROUNDING, Remembering, assert_alone, drained
from stretto.engines.base import Request
from stretto.engines.native import admission
from stretto.engines.native.admission import rounded
from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.engine import NativeEngine
from stretto.kernels.cpu import backward, rotation
from stretto.kernels.cpu.packed_linear import PackedSteps
from stretto.kernels.cuda.decode_graphs import LastingCache, RecordedSteps, steps_for
from stretto.kernels.cuda.graph_cache import Recordings, difference
from stretto.types import Weights
from tiers import slow_but
from tiny import scratch_policy

MOST = 1 << 20


class Traced:
    """A tape: every operation of the function on the tensors it was made with, in order."""

    def __init__(self, function, inputs, shared):
        self.inputs = [tensor.clone() for tensor in inputs]
        self.module = make_fx(function)(*self.inputs)
        self.played = 0
        shared.setdefault("tapes", []).append(self)

    def __call__(self, inputs):
        self.played += 1
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        return tuple(output.clone() for output in self.module(*self.inputs))


@pytest.fixture(autouse=True)
def operations_of_torch(monkeypatch):
    """What kernels in C compute on a CPU, a tracer does not see."""
    for module in (backward, rotation):
        monkeypatch.setattr(module, "layer_kernels", lambda dtype: None)


def tapes_of(engine):
    """What it recorded since it last had to forget."""
    return list(engine.steps.recordings.shared.get("tapes", []))


def engine_of(policy, *, tape=None, most=MOST, **keywords):
    return NativeEngine(policy, steps=RecordedSteps(policy, most=most, tape=tape), **keywords)


def alike(answers, others):
    assert answers.keys() == others.keys()
    for key, answer in answers.items():
        assert answer.tokens.tolist() == others[key].tokens.tolist()
        np.testing.assert_allclose(answer.logprobs, others[key].logprobs, rtol=0, atol=ROUNDING)


def group(size, *, context=40, new=12, first=1):
    """A group of requests with one context, enough for a prefix."""
    tokens = np.random.default_rng(first).integers(5, 40, context)
    return [
        Request(key=first + index, tokens=tokens, max_new_tokens=new, stop=frozenset({6}), temperature=1.0)
        for index in range(size)
    ]


def test_sizes_are_rounded_to_two_for_each_doubling():
    assert [rounded(count) for count in range(14)] == [0, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert {rounded(count) for count in range(65, 129)} == {96, 128}
    assert [rounded(tokens, 64) for tokens in (1, 64, 65, 200, 260, 400)] == [64, 64, 128, 256, 384, 512]


@pytest.mark.parametrize("slots", [None, 3])
def test_steps_of_rounded_sizes_answer_as_each_request_alone(policy, requests_for, slots):
    requests = requests_for(14)
    engine = engine_of(policy, slots=slots)
    engine.submit(requests)
    assert_alone(policy, requests, drained(engine))


@pytest.mark.parametrize("worth", slow_but(1, of=[1, 10**9]))
def test_groups_of_any_size_answer_the_same_as_in_steps_that_come_as_they_are(policy, monkeypatch, worth):
    monkeypatch.setattr(admission, "WORTH_SHARING", worth)
    requests = [*group(5), *group(1, first=10), *group(2, first=20, context=70), *group(3, first=30, new=5)]
    usual, engine = NativeEngine(policy), engine_of(policy)
    usual.drafts, engine.drafts = Remembering(), Remembering()
    for _ in range(2):  # the second time with drafts from the first
        answers = []
        for each in (usual, engine):
            each.submit(requests)
            answers.append(drained(each))
        alike(*answers)
    assert (engine.prefixes.slots > 0) == (worth == 1)


@pytest.mark.slow
def test_a_tape_plays_what_the_steps_would_compute(plain_policy):
    """Lengths, tokens, keys and members change from step to step; the tape must not hold on to those it met."""
    usual, engine = NativeEngine(plain_policy), engine_of(plain_policy, tape=Traced)
    for first in (1, 50):
        requests = [*group(4, first=first, new=8), *group(2, first=first + 10, context=50), *group(1, first=first + 20)]
        answers = []
        for each in (usual, engine):
            each.submit(requests)
            answers.append(drained(each))
        alike(*answers)
    tapes = tapes_of(engine)
    assert len(tapes) > 3
    assert sum(tape.played for tape in tapes) > 2 * len(tapes)


@pytest.mark.slow
def test_a_tape_follows_weights_that_are_updated_in_place(plain_policy):
    policy = copy.deepcopy(plain_policy)
    engine, requests = engine_of(policy, tape=Traced, speculate=False), group(2, new=6)
    for _ in range(2):
        engine.submit(requests)
        drained(engine)
    tapes, played = tapes_of(engine), sum(tape.played for tape in tapes_of(engine))
    with torch.no_grad():
        for weight in policy.trained().values():
            weight.mul_(1.3)
    engine.receive(Weights(version=1, manifest={}, where="shared"))
    engine.submit(requests)
    assert_alone(policy, requests, drained(engine))
    assert tapes_of(engine)[: len(tapes)] == tapes
    assert sum(tape.played for tape in tapes) > played


@pytest.mark.slow
def test_what_moves_or_grows_is_recorded_again(plain_policy):
    policy = copy.deepcopy(plain_policy)
    engine, usual = engine_of(policy, tape=Traced, speculate=False), NativeEngine(policy)

    def tapes_after(requests):
        for each in (usual, engine):
            each.submit(requests)
        alike(drained(usual), drained(engine))
        return tapes_of(engine)

    usual_group, longer = group(2, new=4), group(2, new=4, context=100)
    tapes_after(usual_group)
    first = tapes_after(usual_group)
    assert first and tapes_after(usual_group)[: len(first)] == first, "the same sizes are replayed"
    assert not set(tapes_after(longer)) & set(first), "a longer context needs a larger cache"
    first = tapes_after(longer)
    for weight in policy.network.parameters():
        weight.data = weight.data.clone()
    engine.receive(Weights(version=1, manifest={}, where="shared"))
    assert not set(tapes_after(longer)) & set(first), "weights are elsewhere"
    engine.sleep(keep=True)
    assert not engine.cache.keys
    assert not tapes_of(engine)
    engine.wake()
    tapes_after(usual_group)


def test_both_caches_keep_to_their_bound_when_prefixes_come_after_a_round_without(plain_policy, monkeypatch):
    monkeypatch.setattr(admission, "WORTH_SHARING", 512)
    engine = engine_of(plain_policy, most=16 * 64, speculate=False)
    engine.kv_tokens = 16 * 64
    engine.submit([request for first in range(1, 17) for request in group(1, first=first, new=4)])
    drained(engine)
    assert engine.cache.held == (16, 64)
    requests = group(8, context=100, new=4)
    engine.submit(requests)
    done = {each.key: each for each in engine.step(0.0)}
    held = [slots * tokens for slots, tokens in (engine.cache.held, engine.prefixes.held)]
    assert held[1] > 0 and sum(held) <= 16 * 64
    assert_alone(plain_policy, requests, done | drained(engine))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lora"], indirect=True)
def test_what_was_recorded_with_an_adapter_is_not_played_without_it(policy):
    usual, engine = NativeEngine(policy, speculate=False), engine_of(policy, tape=Traced, speculate=False)
    answers = []
    for switched in (nullcontext, policy.without_adapter, nullcontext):
        with switched():
            for each in (usual, engine):
                each.submit(group(2))
            answers.append(drained(usual))
            alike(answers[-1], drained(engine))
    assert tapes_of(engine)
    assert answers[0][1].tokens.tolist() != answers[1][1].tokens.tolist()


def test_the_sizes_of_a_batch_do_not_depend_on_larger_groups_before_it(policy, monkeypatch):
    monkeypatch.setattr(admission, "WORTH_SHARING", 1)
    fresh, used = (engine_of(policy, speculate=False) for _ in range(2))
    used.submit(group(8, first=50))
    drained(used)
    used.steps.recordings.forget()
    for engine in (fresh, used):
        engine.submit(group(2))
        drained(engine)
    assert fresh.prefixes.slots
    assert used.steps.recordings.made.keys() == fresh.steps.recordings.made.keys()


def test_a_size_is_recorded_when_it_is_first_met_and_the_recording_gets_what_is_new():
    recordings, seen = Recordings(Traced), []

    def double(tensor):
        seen.append(tensor)
        return (tensor * 2,)

    for value in (1.0, 2.0, 3.0):
        (result,) = recordings.run("a size", double, [torch.tensor([value])])
        assert result.tolist() == [2 * value]
    assert len(seen) == 2, "once as it came, to compare, and once for the tape"


def test_a_recording_that_gives_other_numbers_is_not_used_and_that_is_said_once():
    class Stale(Traced):
        def __call__(self, inputs):
            return tuple(output + 1 for output in super().__call__(inputs))

    recordings = Recordings(Stale)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [
            recordings.run("a size", lambda tensor: (tensor * 2,), [torch.tensor([value])])[0].item()
            for value in (1.0, 2.0, 3.0)
        ]
    assert results == [2.0, 4.0, 6.0]
    (warning,) = said
    assert "what is replayed is not what is computed: numbers differ by 0.5" in str(warning.message)


def test_a_token_that_was_drawn_at_a_near_tie_is_no_reason_to_stop_recording_and_many_others_are():
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0])
    tokens, flipped = torch.arange(8), logprobs.clone()
    flipped[0] = -9.0
    assert difference((tokens, logprobs), (tokens, logprobs)) == ""
    assert difference((tokens.masked_fill(tokens == 0, 9), flipped), (tokens, logprobs)) == ""
    assert "numbers differ" in difference((tokens, flipped), (tokens, logprobs))
    assert "of the tokens are others" in difference((tokens.flip(0), logprobs.flip(0)), (tokens, logprobs))
    assert "nan" in difference((logprobs / 0 * 0,), (logprobs,))
    assert difference((logprobs,), (logprobs * float("nan"),)) == "", (
        "weights that diverged are somebody else's to tell"
    )


def test_what_cannot_be_recorded_is_computed_and_that_is_said_once():
    recordings = Recordings(Traced)

    def asks_the_host(tensor):
        return (tensor * int(tensor.sum()),)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [recordings.run("a size", asks_the_host, [torch.tensor([2])])[0].tolist() for _ in range(4)]
    assert results == [[4]] * 4
    assert [str(warning.message).partition(":")[0] for warning in said] == [
        "decode steps are not recorded, and so slower"
    ]


class Listening(TorchDispatchMode):
    """Notes what would make a GPU wait for its host, or the host for its GPU."""

    ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique")

    def __init__(self):
        super().__init__()
        self.heard = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function)
        if any(asked in name for asked in self.ASKS):
            self.heard.add(name)
        if "index" in name and any(t is not None and t.dtype == torch.bool for t in _indices(arguments)):
            self.heard.add(f"{name} of a mask")
        if "where" in name and any(t.dim() == 0 for t in arguments[1:]):  # on a GPU a number is first copied there
            self.heard.add(f"{name} of a number")
        return function(*arguments, **(keywords or {}))


def _indices(arguments):
    return [t for part in arguments if isinstance(part, list) for t in part if isinstance(t, torch.Tensor)]


def test_nothing_that_is_recorded_asks_the_host(policy, requests_for):
    listening = Listening()

    class Heard(Traced):
        def __init__(self, function, inputs, shared):
            self.function = function

        def __call__(self, inputs):
            with listening:
                return self.function(*inputs)

    engine = engine_of(policy, tape=Heard)
    engine.submit([*requests_for(5), *group(3)])
    drained(engine)
    assert listening.heard == set()
    with listening:
        numbers = torch.arange(3)
        assert [int(numbers[0]), numbers.nonzero(), torch.tensor([1]), numbers[numbers > 1]]
        torch.where(numbers > 1, 1.0, torch.ones(3))
    assert len(listening.heard) == 5, "what would make a GPU wait is heard"


def test_a_step_in_which_nothing_ends_asks_for_nothing_but_its_one_list(plain_policy):
    """Each question lets the host wait for the device; of lists, which `Listening` does not hear, there is one."""
    engine, listening = engine_of(plain_policy, speculate=False), Listening()
    engine.submit(group(4, new=20))
    engine.step(0.0)
    with listening:
        for _ in range(5):
            assert engine.step(0.0) == []
    assert listening.heard == set()


def test_on_a_cpu_steps_are_computed_as_they_come(plain_policy):
    exact = scratch_policy(dtype="float64")
    assert type(steps_for(exact, MOST)) is Steps
    assert type(NativeEngine(exact).steps) is Steps
    assert type(NativeEngine(plain_policy).steps) is PackedSteps


@pytest.mark.parametrize(("graphs", "steps"), [(False, Steps), (True, RecordedSteps)])
def test_on_a_gpu_steps_are_recorded_if_a_recipe_asks_for_it(plain_policy, monkeypatch, graphs, steps):
    monkeypatch.setattr(type(plain_policy), "device", torch.device("cuda"))
    assert type(steps_for(plain_policy, MOST, graphs=graphs)) is steps


def test_a_request_that_is_aborted_between_two_steps_leaves_the_others_alone(plain_policy):
    requests = group(5, new=30)
    engine = engine_of(plain_policy)
    engine.submit(requests)
    for _ in range(4):
        engine.step(0.0)
    engine.abort([requests[1].key])
    done = drained(engine)
    assert_alone(plain_policy, [request for request in requests if request.key in done], done)
    assert len(done) >= 3


class TestLastingCache:
    """Memory that stays where it is."""

    def filled(self, cache, *, slots, tokens, value):
        cache.reserve(slots=slots, tokens=tokens)
        keys, values = cache.at(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
        keys[:slots, :, :tokens] = value
        values[:slots, :, :tokens] = value
        return keys

    def test_a_smaller_round_uses_the_same_memory_and_finds_it_clean(self):
        cache = LastingCache(MOST)
        keys = self.filled(cache, slots=5, tokens=70, value=float("nan"))
        assert (cache.slots, cache.capacity, cache.generation) == (6, 128, 1)
        cache.clear()
        cache.reserve(slots=2, tokens=10)
        assert (cache.slots, cache.capacity, cache.generation) == (2, 64, 1)
        assert cache.at(0, keys, keys)[0] is keys
        assert keys.eq(0).all()

    def test_growing_keeps_what_is_in_use(self):
        cache = LastingCache(MOST)
        self.filled(cache, slots=2, tokens=64, value=3.0)
        cache.reserve(slots=4, tokens=100)
        assert cache.generation == 2
        assert cache.keys[0].shape == (4, 2, 128, 4)
        assert cache.keys[0][:2, :, :64].eq(3.0).all()

    def test_it_holds_no_more_than_it_may_beyond_what_is_needed(self):
        cache = LastingCache(16 * 64)
        self.filled(cache, slots=16, tokens=64, value=1.0)
        cache.clear()
        self.filled(cache, slots=1, tokens=1024, value=1.0)
        assert cache.keys[0].shape == (1, 2, 1024, 4)

    def test_two_under_one_bound_do_not_keep_what_exceeds_it(self):
        prefixes, own = LastingCache(16 * 64), LastingCache(16 * 64)
        prefixes.beside, own.beside = own, prefixes
        prefixes.reserve(slots=8, tokens=64)
        own.reserve(slots=8, tokens=64)
        assert prefixes.held[0] and own.held[0], "both are in use"
        for cache in (prefixes, own):
            cache.clear()
        own.reserve(slots=16, tokens=64)
        assert prefixes.held == (0, 0)

    def test_what_one_holds_and_does_not_use_is_given_back_though_it_is_in_use(self):
        prefixes, own = LastingCache(16 * 64), LastingCache(16 * 64)
        prefixes.beside, own.beside = own, prefixes
        self.filled(own, slots=16, tokens=64, value=1.0)
        own.clear()
        self.filled(own, slots=2, tokens=64, value=3.0)
        prefixes.reserve(slots=8, tokens=64)
        assert (own.held, prefixes.held) == ((2, 64), (8, 64))
        assert own.keys[0].shape == (2, 2, 64, 4) and own.keys[0].eq(3.0).all()

    def test_beside_one_that_is_in_use_none_is_held_larger_than_needed(self):
        prefixes, own = LastingCache(16 * 64), LastingCache(16 * 64)
        prefixes.beside, own.beside = own, prefixes
        own.reserve(slots=6, tokens=64)
        prefixes.reserve(slots=8, tokens=64)
        prefixes.clear()
        prefixes.reserve(slots=1, tokens=128)
        assert (own.held, prefixes.held) == ((6, 64), (1, 128)), "8 slots of 128 tokens would not fit"

    def test_giving_back_leaves_nothing(self):
        cache = LastingCache(MOST)
        self.filled(cache, slots=2, tokens=64, value=1.0)
        cache.release()
        assert (cache.keys, cache.values, cache.held, cache.slots) == ({}, {}, (0, 0), 0)
