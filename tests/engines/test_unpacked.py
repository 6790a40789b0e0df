"""The engine for models that keep their own attention: each request is answered as if it were alone."""

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Qwen3NextConfig

from alone import ROUNDING, drained
from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.sampling import draw_from, signed
from stretto.engines.native.unpacked import UnpackedEngine
from stretto.errors import RecipeError
from stretto.models.memory import recompute_activations
from stretto.models.unpacked import continued
from stretto.recipe.schema import EngineSection
from stretto.workers.models import native_engine
from tiny import VOCABULARY, keep_activations, policy_from

pytestmark = pytest.mark.filterwarnings("ignore:.*one by one")


@pytest.fixture(scope="module", params=["capped", "linear"])
def apart(request):
    """A model with capped scores, and one with a layer of linear attention."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    linear = {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0,
    }  # fmt: skip
    config = (
        Gemma2Config(**sizes, sliding_window=8) if request.param == "capped" else Qwen3NextConfig(**sizes, **linear)
    )
    policy = policy_from(config, dtype=torch.float32)
    with torch.no_grad():  # so that the next token is neither certain nor a matter of indifference
        for weight in policy.network.parameters():
            if weight.dim() == 2:
                weight.mul_(8)
    assert policy.apart
    return policy


def requests_for(*lengths, new=10, temperature=1.0):
    """Requests with contexts of these lengths; those of equal length are alike, as in a group."""
    return [
        Request(
            key=2**63 + index,
            tokens=np.random.default_rng(length).integers(5, VOCABULARY, length),
            max_new_tokens=new,
            stop=frozenset({1, 2}),
            temperature=temperature,
        )
        for index, length in enumerate(lengths)
    ]


@torch.no_grad()
def alone(policy, request):
    """Every token from a forward over the whole context."""
    tokens, answer, logprobs = request.tokens.tolist(), [], []
    while len(answer) < request.max_new_tokens and not (answer and answer[-1] in request.stop):
        hidden = policy.network.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
        token, logprob = draw_from(
            hidden[:, -1],
            policy.head(),
            keys=torch.tensor([signed(request.key)]),
            positions=torch.tensor([len(answer) + request.begun]),
            temperatures=torch.tensor([request.temperature], dtype=torch.float64),
        )
        tokens.append(int(token))
        answer.append(int(token))
        logprobs.append(float(logprob))
    return answer, logprobs


def assert_alone(policy, requests, done):
    assert sorted(done) == sorted(request.key for request in requests)
    for request in requests:
        answer, logprobs = alone(policy, request)
        assert done[request.key].tokens.tolist() == answer
        assert done[request.key].stop == ("stop" if answer[-1] in request.stop else "length")
        np.testing.assert_allclose(done[request.key].logprobs, logprobs, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_request_is_answered_as_if_it_were_alone(apart, slots, temperature):
    engine, requests = UnpackedEngine(apart, slots=slots), requests_for(9, 9, 4, 9, 17, 4, temperature=temperature)
    engine.submit(requests)
    assert_alone(apart, requests, drained(engine))


def test_a_request_goes_on_where_another_cell_has_left_it(apart):
    (whole,) = requests_for(9)
    answer, _ = alone(apart, whole)
    said = np.array(answer[:2])
    rest = Request(
        key=whole.key, tokens=np.concatenate([whole.tokens, said]), max_new_tokens=8, stop=whole.stop,
        temperature=whole.temperature, begun=2,
    )  # fmt: skip
    engine = UnpackedEngine(apart)
    engine.submit([rest])
    assert drained(engine)[whole.key].tokens.tolist() == answer[2:]


def test_what_is_aborted_leaves_the_others_alone(apart):
    engine, requests = UnpackedEngine(apart), requests_for(9, 9, 9, 4)
    engine.submit(requests)
    done = {completion.key: completion for completion in engine.step(0.0)}
    (gone,) = engine.abort([requests[1].key]) or [done[requests[1].key]]
    assert gone.tokens.tolist() == alone(apart, requests[1])[0][: len(gone.tokens)]
    done |= drained(engine)
    others = [request for request in requests if request.key != gone.key]
    assert_alone(apart, others, {key: completion for key, completion in done.items() if key != gone.key})


def test_a_cache_is_kept_where_training_recomputes(apart):
    engine, requests = UnpackedEngine(apart), requests_for(9, 9)
    recompute_activations(apart.network)
    try:
        engine.submit(requests)
        assert_alone(apart, requests, drained(engine))
    finally:
        keep_activations(apart.network)


def test_a_context_that_several_have_is_computed_once(apart, monkeypatch):
    asked = []

    def counted(network, tokens, past=None):
        asked.append(tuple(tokens.shape))
        return continued(network, tokens, past)

    monkeypatch.setattr("stretto.engines.native.unpacked.continued", counted)
    engine = UnpackedEngine(apart)
    engine.submit(requests_for(9, 9, 9, 9))
    drained(engine)
    assert asked[0] == (1, 9)
    assert asked[1][0] > 1


def test_the_engine_of_packed_rows_refuses_it(apart):
    with pytest.raises(RecipeError, match="cannot be given packed rows"):
        NativeEngine(apart)


def test_such_a_policy_gets_this_engine(apart, plain_policy):
    assert type(native_engine(apart, EngineSection())) is UnpackedEngine
    assert type(native_engine(plain_policy, EngineSection())) is not UnpackedEngine
