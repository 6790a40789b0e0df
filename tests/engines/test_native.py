"""The native engine answers every request as if it were alone, with the trainer's own probabilities."""

import copy
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
import torch

from alone import PATIENCE, ROUNDING, alone, assert_alone, drained, peer_of
from stretto.algorithms.base import build
from stretto.algorithms.kl import k3
from stretto.engines.base import Request
from stretto.engines.native import admission
from stretto.engines.native.engine import NativeEngine
from stretto.errors import EngineError
from stretto.recipe.schema import AlgorithmSection, Optimizer
from stretto.training.optimizer import MasterAdamW
from stretto.training.trainer import Trainer
from stretto.types import Conversation, Weights
from tiers import slow_but


def test_answers_are_those_of_each_request_alone(policy, requests_for):
    requests = requests_for(20)
    engine = NativeEngine(policy)
    engine.submit(requests)
    done = drained(engine)
    assert_alone(policy, requests, done)
    assert {completion.stop for completion in done.values()} == {"stop", "length"}
    for request in requests:
        completion = done[request.key]
        inside = completion.tokens[:-1] if completion.stop == "stop" else completion.tokens
        assert not set(inside.tolist()) & request.stop
        assert completion.stop != "stop" or completion.tokens[-1] in request.stop


def test_decode_steps_are_timed_by_how_many_answers_they_serve(plain_policy, requests_for):
    engine = NativeEngine(plain_policy, speculate=False)
    engine.submit(requests_for(12))
    engine.step(0.0)
    first = len(engine.active)  # served by the step that also makes copies of the weights, which is not counted
    done = drained(engine)
    steps, answers, squares, seconds, products = engine.times.take()
    assert answers == sum(len(completion.tokens) - 1 for completion in done.values()) - first
    assert steps >= max(len(completion.tokens) for completion in done.values()) - 2
    assert squares >= answers**2 / steps and 0 < seconds < products
    assert set(engine.times.take()) == {0.0}


@pytest.mark.parametrize("slots", [1, 3, 7, None])
def test_neither_slots_nor_order_nor_company_change_an_answer(plain_policy, requests_for, slots):
    requests = requests_for(16)
    first = NativeEngine(plain_policy)
    first.submit(requests)
    expected = drained(first)
    engine = NativeEngine(plain_policy, slots=slots)
    order = np.random.default_rng(1).permutation(16)
    engine.submit([requests[index] for index in order[:9]])
    done = {completion.key: completion for completion in engine.step(PATIENCE)}
    assert slots is None or len(engine.active) <= slots
    engine.submit([requests[index] for index in order[9:]])
    done |= drained(engine)
    for key, completion in expected.items():
        assert done[key].tokens.tolist() == completion.tokens.tolist()
        np.testing.assert_allclose(done[key].logprobs, completion.logprobs, rtol=0, atol=ROUNDING)


def test_requests_that_share_all_or_part_of_their_context_are_answered_as_alone(plain_policy):
    context = np.arange(5, 40)
    contexts = [context, context, context[:20], np.append(context, 9), context[:1], context]
    requests = [
        Request(key=index, tokens=tokens, max_new_tokens=6, stop=frozenset({0}), temperature=1.0)
        for index, tokens in enumerate(contexts)
    ]
    engine = NativeEngine(plain_policy)
    engine.submit(requests)
    done = drained(engine)
    assert_alone(plain_policy, requests, done)
    answers = {tuple(done[key].tokens.tolist()) for key in (0, 1, 5)}
    assert len(answers) > 1, "equal contexts under different keys drew the same"


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("worth", slow_but(1, of=[1, 10**9]))
def test_a_group_reads_its_prompt_from_one_place_and_answers_as_alone(policy, monkeypatch, slots, worth):
    """Groups of several sizes beside requests of their own, entering together and as others end."""
    monkeypatch.setattr(admission, "WORTH_SHARING", worth)
    chance = np.random.default_rng(3)
    contexts = [chance.integers(5, 40, size) for size in (31, 7, 12)]
    asked = [contexts[0]] * 4 + [contexts[1]] * 2 + [np.arange(5, 30)] + [contexts[2]] * 3 + [contexts[0][:9]]
    requests = [
        Request(key=key + 1, tokens=tokens, max_new_tokens=3 + key % 5, stop=frozenset({6}), temperature=1.0)
        for key, tokens in enumerate(asked)
    ]
    engine = NativeEngine(policy, slots=slots)
    engine.submit(requests)
    done = {completion.key: completion for completion in engine.step(PATIENCE)}
    assert engine.used_prefixes == (0 if worth > 1 else 3 if slots is None else 1)
    done |= drained(engine)
    assert_alone(policy, requests, done)
    assert engine.used_prefixes == 0


def test_waiting_requests_enter_in_order_as_others_end(plain_policy):
    requests = [
        Request(key=key, tokens=np.array([6, 7]), max_new_tokens=length, stop=frozenset(), temperature=1.0)
        for key, length in enumerate([3, 5, 1, 1, 4])
    ]
    engine = NativeEngine(plain_policy, slots=2)
    engine.submit(requests)
    ends = []
    while completions := engine.step(PATIENCE):
        ends.append(sorted(completion.key for completion in completions))
    assert ends == [[0], [2], [1, 3], [4]]


def test_a_request_in_progress_goes_on_when_the_budget_of_seconds_is_used(plain_policy, requests_for):
    requests = requests_for(6)
    engine = NativeEngine(plain_policy)
    engine.submit(requests)
    done = {}
    for _ in range(200):
        done |= {completion.key: completion for completion in engine.step(0.0)}
    assert_alone(plain_policy, requests, done)
    assert engine.step(0.0) == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers(policy, requests_for, temperature):
    requests = [replace(request, temperature=temperature) for request in requests_for(16)]
    engine = NativeEngine(policy)
    engine.submit(requests)
    done = drained(engine)
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=0.0), updates=1)
    trainer = Trainer(
        policy,
        build(AlgorithmSection(name="rloo", clip=(0.2, 0.2))),
        optimizer,
        token_budget=200,
        temperature=temperature,
        clip=None,
        checkpointing=False,
    )
    conversations = [conversation(request, done[request.key]) for request in requests]
    try:
        scores = trainer.score(conversations)
    finally:
        trainer.close()
    engines = np.concatenate([done[request.key].logprobs for request in requests])
    trainers = np.concatenate(scores)
    np.testing.assert_allclose(engines, trainers, rtol=0, atol=ROUNDING)
    assert k3(trainers, engines).mean() <= 1e-6


def conversation(request, completion):
    tokens = np.concatenate([request.tokens, completion.tokens])
    trained = np.arange(len(tokens)) >= len(request.tokens)
    logprobs = np.zeros(len(tokens))
    logprobs[trained] = completion.logprobs
    return Conversation(tokens=tokens, trained=trained, logprobs=logprobs, stop=completion.stop, version=0)


def test_greedy_answers_are_those_of_transformers(policy, requests_for):
    peer = peer_of(policy)
    requests = [replace(request, temperature=0.0) for request in requests_for(10)]
    engine = NativeEngine(policy)
    engine.submit(requests)
    done = drained(engine)
    for request in requests:
        context = torch.as_tensor(request.tokens)[None]
        generated = peer.generate(
            context,
            attention_mask=torch.ones_like(context),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=sorted(request.stop) or None,
            pad_token_id=0,
        )
        assert done[request.key].tokens.tolist() == generated[0, len(request.tokens) :].tolist()


def test_an_adapter_changes_the_answers(policy, requests_for):
    if policy.adapted is None:
        assert not any("lora_" in name for name in policy.trained())
        return
    requests = [replace(request, temperature=0.0) for request in requests_for(6)]
    engine = NativeEngine(policy)
    engine.submit(requests)
    with_adapter = drained(engine)
    with policy.without_adapter():
        engine.submit(requests)
        without = drained(engine)
    assert any(with_adapter[key].tokens.tolist() != without[key].tokens.tolist() for key in without)


def test_aborting_returns_what_is_there_and_leaves_the_others_alone(plain_policy):
    requests = [
        Request(key=key, tokens=np.array([6, 7, 8 + key]), max_new_tokens=12, stop=frozenset(), temperature=1.0)
        for key in range(6)
    ]
    engine = NativeEngine(plain_policy, slots=4)
    engine.submit(requests)
    for _ in range(3):
        assert engine.step(0.0) == []
    partial = {completion.key: completion for completion in engine.abort([0, 2, 5, 99])}
    assert sorted(partial) == [0, 2, 5]
    assert {completion.stop for completion in partial.values()} == {"abort"}
    peer = peer_of(plain_policy)
    for key, length in ((0, 3), (2, 3), (5, 0)):
        answer, logprobs, _ = alone(peer, requests[key])
        assert partial[key].tokens.tolist() == answer[:length]
        np.testing.assert_allclose(partial[key].logprobs, logprobs[:length], rtol=0, atol=ROUNDING)
    assert_alone(plain_policy, [requests[1], requests[3], requests[4]], drained(engine))
    assert engine.abort([1, 2, 3]) == []


def no_memory(*arguments, **keywords):
    """Where memory is out."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("place", ["cache.reserve", "policy.network.model.forward", "steps.draw", "steps.forward"])
def test_memory_that_runs_out_is_an_error_that_says_what_to_lower(plain_policy, requests_for, monkeypatch, place):
    engine = NativeEngine(plain_policy)
    monkeypatch.setattr(attrgetter(place.rpartition(".")[0])(engine), place.rpartition(".")[2], no_memory)
    engine.submit(requests_for(3))
    with pytest.raises(EngineError, match=r"^engine.memory_share: .* lower it .* engine.max_new_tokens or batch."):
        engine.step(PATIENCE)


def test_the_error_holds_nothing_of_the_step_that_found_no_memory(plain_policy, requests_for, monkeypatch):
    engine = NativeEngine(plain_policy)
    monkeypatch.setattr(engine.steps, "forward", no_memory)
    engine.submit(requests_for(3))
    with pytest.raises(EngineError) as caught:
        engine.step(PATIENCE)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


def test_after_memory_ran_out_what_was_under_way_can_be_taken_out_and_others_be_answered(plain_policy, requests_for):
    engine, (first, *others) = NativeEngine(plain_policy), requests_for(6)
    engine.submit([replace(first, max_new_tokens=5, stop=frozenset())])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineError):
        patch.setattr(engine.steps, "forward", no_memory)
        engine.step(PATIENCE)
    assert [completion.key for completion in engine.abort([first.key])] == [first.key]
    engine.submit(others)
    assert_alone(plain_policy, others, drained(engine))


def test_an_engine_that_aborted_everything_has_nothing_to_do(plain_policy, requests_for):
    requests = requests_for(5)
    engine = NativeEngine(plain_policy)
    engine.submit(requests)
    engine.step(0.0)
    engine.abort([request.key for request in requests])
    assert engine.step(PATIENCE) == []
    assert engine.batch is None
    engine.submit(requests)
    assert_alone(plain_policy, requests, drained(engine))


def test_the_cache_grows_for_longer_requests_and_keeps_what_it_holds(plain_policy):
    short = Request(key=1, tokens=np.array([6, 7]), max_new_tokens=40, stop=frozenset(), temperature=1.0)
    long = Request(key=2, tokens=np.arange(140) % 30 + 5, max_new_tokens=30, stop=frozenset(), temperature=1.0)
    engine = NativeEngine(plain_policy)
    engine.submit([short])
    for _ in range(5):
        engine.step(0.0)
    before = engine.cache.capacity
    engine.submit([long])
    done = {each.key: each for each in engine.step(0.0)}
    assert engine.cache.capacity > before
    done |= drained(engine)
    assert_alone(plain_policy, [short, long], done)


def test_the_cache_never_takes_more_than_its_share_except_for_one_request_alone(plain_policy):
    many = [
        Request(key=key, tokens=np.array([6, 7, key + 8]), max_new_tokens=4, stop=frozenset(), temperature=1.0)
        for key in range(12)
    ]
    long = [
        Request(key=key, tokens=np.arange(150) % 30 + 5, max_new_tokens=key, stop=frozenset(), temperature=1.0)
        for key in (21, 22, 23)
    ]
    engine = NativeEngine(plain_policy)
    engine.kv_tokens = 10 * 64
    done = {}
    for requests in (many, long, many[:3] + long[:1] + many[3:]):
        engine.submit([replace(request, key=request.key + 100 * len(done)) for request in requests])
        while completions := engine.step(0.0) or (engine.active and [None]):
            assert engine.cache.slots * engine.cache.capacity <= engine.kv_tokens
            done |= {completion.key: completion for completion in completions if completion}
    assert len(done) == 12 + 3 + 13
    huge = Request(key=999, tokens=np.arange(200) % 30 + 5, max_new_tokens=2, stop=frozenset(), temperature=1.0)
    engine.kv_tokens = 64
    engine.submit([huge, *many[:2]])
    assert_alone(plain_policy, [huge, *many[:2]], drained(engine))


def test_what_is_admitted_together_does_not_depend_on_what_was_asked_before(plain_policy, requests_for):
    requests = requests_for(10)

    def course(engine):
        engine.kv_tokens = 5 * 64
        engine.submit(requests)
        sizes = []
        while completions := engine.step(0.0) or (engine.active and [None]):
            sizes.append((len(engine.active), len(completions)))
        return sizes

    used = NativeEngine(plain_policy)
    used.submit(requests_for(40, seed=5, longest=120))
    drained(used)
    assert course(used) == course(NativeEngine(plain_policy))


def test_the_share_of_memory_becomes_a_number_of_tokens(plain_policy):
    small, large = (NativeEngine(plain_policy, memory_share=share) for share in (0.1, 0.2))
    assert large.kv_tokens == pytest.approx(2 * small.kv_tokens, rel=1e-6)
    assert NativeEngine(plain_policy).kv_tokens > small.kv_tokens


def test_received_weights_are_the_trainers_and_name_the_version_of_what_follows(plain_policy, requests_for):
    engine = NativeEngine(plain_policy)
    receipt = engine.receive(Weights(version=7, manifest={}, where="shared"))
    assert (receipt.version, receipt.shared) == (7, True)
    engine.submit(requests_for(2))
    assert {completion.version for completion in drained(engine).values()} == {7}
    with pytest.raises(ValueError, match="not weights at disk"):
        engine.receive(Weights(version=8, manifest={}, where="disk"))


def test_weights_that_moved_are_sampled_from_at_once(plain_policy, requests_for):
    policy = copy.deepcopy(plain_policy)
    engine = NativeEngine(policy)
    with torch.no_grad():
        for weight in policy.trained().values():
            weight.mul_(1.3)
    requests = requests_for(4)
    engine.submit(requests)
    assert_alone(policy, requests, drained(engine))


def test_an_answer_under_way_is_not_lost_to_sleep(plain_policy, requests_for):
    requests, engine = requests_for(3), NativeEngine(plain_policy)
    engine.submit(requests)
    done = engine.step(0.0)
    engine.sleep(keep=True)
    assert engine.active and engine.cache.keys
    engine.wake()
    assert_alone(plain_policy, requests, {completion.key: completion for completion in done} | drained(engine))


def test_sleeping_gives_the_memory_back_and_closing_forgets_everything(plain_policy, requests_for):
    requests = requests_for(3)
    engine = NativeEngine(plain_policy)
    engine.submit(requests)
    first = drained(engine)
    engine.sleep(keep=True)
    assert not engine.cache.keys
    engine.wake()
    engine.submit(requests)
    assert {key: c.tokens.tolist() for key, c in drained(engine).items()} == {
        key: c.tokens.tolist() for key, c in first.items()
    }
    engine.submit(requests)
    engine.step(0.0)
    engine.close()
    assert engine.step(PATIENCE) == []
