"""Top-p, top-k and stop texts: what is drawn, what travels with it, and that the trainer normalizes over the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from stretto.algorithms.base import build
from stretto.algorithms.kl import k3
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.truncation import NOBODY, Truncation
from stretto.recipe.schema import AlgorithmSection, Optimizer
from stretto.training.optimizer import MasterAdamW
from stretto.training.trainer import Trainer
from stretto.types import Conversation, KeptTokens
from tiny import scratch_policy

CUTS = [Truncation(top_p=0.8), Truncation(top_k=3), Truncation(top_p=0.9, top_k=4)]


def answered(policy, requests, **how):
    engine = NativeEngine(policy, **how)
    engine.submit(requests)
    done = {}
    while found := engine.step(60.0):
        done |= {completion.key: completion for completion in found}
    assert not engine.kept.rows
    return [done[request.key] for request in requests]


def conversations(requests, done, *, kept=True):
    made = []
    for request, completion in zip(requests, done, strict=True):
        tokens = np.concatenate([request.tokens, completion.tokens])
        trained = np.arange(len(tokens)) >= len(request.tokens)
        logprobs = np.concatenate([np.zeros(len(request.tokens)), completion.logprobs])
        made.append(
            Conversation(
                tokens=tokens, trained=trained, logprobs=logprobs, stop="stop", version=0,
                kept=completion.kept if kept else None,
            )
        )  # fmt: skip
    return made


def scored(policy, talks, temperature):
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=0.0), updates=1)
    algorithm = build(AlgorithmSection(name="rloo", clip=(0.2, 0.2)))
    trainer = Trainer(
        policy, algorithm, optimizer, token_budget=200, temperature=temperature, clip=None, checkpointing=False
    )
    try:
        return np.concatenate(trainer.score(talks))
    finally:
        trainer.close()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_agree_over_what_was_kept_and_not_without(plain_policy, requests_for, cut, temperature):
    requests = [replace(request, temperature=temperature) for request in requests_for(24)]
    done = answered(plain_policy, requests, truncation=cut)
    engines = np.concatenate([completion.logprobs for completion in done])
    trainers = scored(plain_policy, conversations(requests, done), temperature)
    assert k3(trainers, engines).mean() <= 1e-6
    np.testing.assert_allclose(trainers, engines, atol=1e-4)
    apart = scored(plain_policy, conversations(requests, done, kept=False), temperature)
    assert k3(apart, engines).mean() > 1e-5


@pytest.mark.parametrize("cut", CUTS)
def test_company_slots_and_drafts_change_no_answer(plain_policy, requests_for, cut):
    requests = requests_for(12)
    together = answered(plain_policy, requests, truncation=cut, speculate=True)
    others = [answered(plain_policy, [request], truncation=cut, speculate=False)[0] for request in requests]
    for one, other in zip(together, others, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.kept.counts.tolist() == other.kept.counts.tolist()


@pytest.mark.parametrize("cut", CUTS)
def test_every_token_is_one_of_those_that_were_kept_and_these_are_as_many_as_needed(plain_policy, requests_for, cut):
    for completion in answered(plain_policy, requests_for(8), truncation=cut):
        counts, ids = completion.kept.counts, completion.kept.ids
        assert len(counts) == len(completion.tokens) and counts.sum() == len(ids)
        rows = np.split(ids, np.cumsum(counts)[:-1])
        assert all(
            token in row and len(set(row)) == len(row) for token, row in zip(completion.tokens, rows, strict=True)
        )
        assert counts.max() <= (cut.top_k or 1024)


def test_a_nucleus_ends_with_the_token_that_fills_it():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]]).log()
    ids, values = Truncation(top_p=0.8).kept(logits)
    assert ids.tolist()[1] == [0, NOBODY, NOBODY, NOBODY] and ids[0, :2].tolist() == [0, 1]
    assert Truncation(top_p=0.81).kept(logits)[0][0].tolist() == [0, 1, 2, NOBODY]
    assert Truncation(top_p=0.81, top_k=2).kept(logits)[0][0].tolist() == [0, 1]
    assert values[1].exp().tolist() == pytest.approx([0.97, 0, 0, 0])


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.5, 4), (0.8, 2), (0.9, 3), (0.95, 20), (0.3, 1), (1.0, 5), (0.9, 1000)]
)
def test_top_k_with_top_p_keeps_the_tokens_that_transformers_keeps(top_p, top_k):
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(0)) * 2
    ids, values = Truncation(top_p=top_p, top_k=top_k).kept(logits)
    stock = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits))
    assert [set(row[row != NOBODY].tolist()) for row in ids] == [
        set(row.isfinite().nonzero()[:, 0].tolist()) for row in stock
    ]
    assert torch.equal(values.isfinite(), ids != NOBODY)


def test_top_k_alone_keeps_as_many_tokens_as_it_says_where_one_is_nearly_certain():
    logits = torch.tensor([[60.0, 1.0, 0.0, -1.0], [0.0, 17.0, 16.0, -20.0]])
    assert Truncation(top_k=3).kept(logits)[0].tolist() == [[0, 1, 2], [1, 2, 0]]


def test_draws_follow_what_is_left_and_greedy_takes_the_likeliest():
    shares, count = torch.tensor([0.4, 0.3, 0.2, 0.1]), 6000
    keys = torch.arange(count) * 7919 + 3
    tokens, logprobs, _ = Truncation(top_k=3).draw(
        shares.log().expand(count, -1),
        keys=keys,
        positions=torch.zeros(count, dtype=torch.long),
        temperatures=torch.ones(count, dtype=torch.float64),
    )
    found = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(found, torch.tensor([4 / 9, 3 / 9, 2 / 9, 0.0]), atol=0.03, rtol=0)
    torch.testing.assert_close(logprobs.exp(), (shares[tokens] / 0.9).double(), atol=1e-5, rtol=1e-5)
    greedy, *_ = Truncation(top_p=0.9).draw(
        shares.log()[None].expand(5, -1), keys=keys[:5], positions=torch.zeros(5, dtype=torch.long),
        temperatures=torch.zeros(5, dtype=torch.float64),
    )  # fmt: skip
    assert greedy.tolist() == [0] * 5


def test_samples_with_and_without_kept_tokens_share_no_row():
    policy = scratch_policy(dtype="float64")
    tokens, trained = np.array([5, 6, 7]), np.array([False, True, True])
    plain = Conversation(tokens=tokens, trained=trained, logprobs=np.zeros(3), stop="stop", version=0)
    kept = KeptTokens(counts=np.array([2, 1], dtype=np.int32), ids=np.array([6, 9, 7], dtype=np.int32))
    with pytest.raises(ValueError, match="give all or none"):
        scored(policy, [plain, replace(plain, kept=kept)], 1.0)
    logprobs = scored(policy, [replace(plain, kept=kept)], 1.0)
    assert logprobs[0] < 0 and logprobs[1] == 0  # drawn from one token alone


def texts_of(policy, requests, **how):
    return ["".join(policy.tokenizer.convert_ids_to_tokens(d.tokens)) for d in answered(policy, requests, **how)]


@pytest.mark.parametrize("speculate", [True, False])
def test_a_stop_text_ends_the_answer_with_its_last_token_and_changes_nothing_before(
    plain_policy, requests_for, speculate
):
    requests = [replace(each, stop=frozenset(), max_new_tokens=24) for each in requests_for(16)]
    free = answered(plain_policy, requests, speculate=speculate)
    cut = 0
    for request, completion in zip(requests, free, strict=True):
        text = plain_policy.tokenizer.decode(completion.tokens[4:7], skip_special_tokens=False)
        stopping = replace(request, stop_texts=("never said", text))
        others = [each for each in requests if each is not request][:3]
        done, *_ = answered(plain_policy, [stopping, *others], speculate=speculate)
        said = plain_policy.tokenizer.decode(done.tokens, skip_special_tokens=False)
        assert done.tokens.tolist() == completion.tokens[: len(done.tokens)].tolist()
        np.testing.assert_allclose(done.logprobs, completion.logprobs[: len(done.tokens)], atol=1e-5)
        assert done.stop == "stop" and text in said
        before = plain_policy.tokenizer.decode(done.tokens[:-1], skip_special_tokens=False)
        assert text not in before
        cut += len(done.tokens) < len(completion.tokens)
    assert cut > 8


def test_a_stop_text_that_began_on_another_cell_is_seen(plain_policy, requests_for):
    request = replace(requests_for(1)[0], stop=frozenset(), max_new_tokens=12)
    whole = answered(plain_policy, [request])[0].tokens
    text = plain_policy.tokenizer.decode(whole[4:7], skip_special_tokens=False)
    stopped = answered(plain_policy, [replace(request, stop_texts=(text,))])[0].tokens
    cut = len(stopped) - 1
    moved = replace(
        request, tokens=np.concatenate([request.tokens, whole[:cut]]), begun=cut, max_new_tokens=12 - cut,
        stop_texts=(text,),
    )  # fmt: skip
    rest = answered(plain_policy, [moved])[0]
    assert [*whole[:cut], *rest.tokens] == stopped.tolist() and rest.stop == "stop"
