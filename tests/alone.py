"""What an engine must answer: the same as plain transformers would to every request by itself."""

import copy

import numpy as np
import torch
from transformers import LlamaConfig

from rounding import forward_sums, rounding
from stretto.engines.native.sampling import draw, signed
from stretto.engines.native.speculative import NgramDrafts

PATIENCE = 60.0
DECODER = LlamaConfig(hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
"""As large as the policies that are asked, or larger."""
ROUNDING = 20 * rounding(torch.float32, *forward_sums(DECODER, 150))
"""Between two ways to compute a log-probability in fp32: logits lie within 20 of one another; about 1e-3."""


def peer_of(policy):
    """The same weights with transformers' own attention."""
    peer = copy.deepcopy(policy.network).eval()
    peer.set_attn_implementation("sdpa")
    return peer


@torch.no_grad()
def alone(peer, request):
    """The answer without cache, batch or prefill: every token from transformers' forward over the whole context."""
    tokens, answer, logprobs, stop = request.tokens.tolist(), [], [], "length"
    while len(answer) < request.max_new_tokens and stop == "length":
        token, logprob = draw(
            peer(torch.tensor([tokens]), use_cache=False).logits[:, -1],
            keys=torch.tensor([signed(request.key)]),
            positions=torch.tensor([len(answer)]),
            temperatures=torch.tensor([request.temperature], dtype=torch.float64),
        )
        tokens.append(int(token))
        answer.append(int(token))
        logprobs.append(float(logprob))
        stop = "stop" if int(token) in request.stop else "length"
    return answer, logprobs, stop


def drained(engine):
    """Everything that is left to complete, by key."""
    done = {}
    while completions := engine.step(PATIENCE):
        for completion in completions:
            assert completion.key not in done, "a request was completed twice"
            done[completion.key] = completion
    assert not engine.waiting
    assert not engine.active
    return done


def assert_alone(policy, requests, done):
    assert sorted(done) == sorted(request.key for request in requests)
    peer = peer_of(policy)
    for request in requests:
        answer, logprobs, stop = alone(peer, request)
        completion = done[request.key]
        assert (completion.tokens.tolist(), completion.stop) == (answer, stop)
        np.testing.assert_allclose(completion.logprobs, logprobs, rtol=0, atol=ROUNDING)


class Remembering(NgramDrafts):
    """Knows in every round what it learned in those before."""

    def restart(self):
        known = dict(self.known)
        super().restart()
        self.known |= known
