"""Tiny models with decided opinions, and requests to ask of them: what the tests of this room share."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig

from stretto.engines.base import Request
from stretto.models import attention
from stretto.models.load import Policy, load
from stretto.models.scratch import character_tokenizer
from stretto.models.source import ModelFiles
from stretto.recipe.schema import Adapter, ModelSection, Scratch

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def opinionated(network, *, seed=1):
    """Random weights large enough that the next token is neither certain nor a matter of indifference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim == 2:
                # A larger adapter would make attention so sharp that rounding moves a token now and then.
                scale = 1.5 if "embed" in name else 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale / weight.shape[1] ** 0.25)


@pytest.fixture(scope="session")
def tokenizer():
    return character_tokenizer(CHARACTERS)


def scratch_policy(adapter=None):
    section = Scratch(layers=2, width=16, heads=2, characters=CHARACTERS, context=256)
    model = ModelSection(name="scratch", scratch=section, dtype="float32", adapter=adapter)
    files = ModelFiles(kind="scratch", name="scratch", folder=None, file=None)
    policy = load(model, files, seed=0, device=torch.device("cpu"))
    opinionated(policy.network)
    return policy


def policy_of(config, tokenizer):
    network = AutoModelForCausalLM.from_config(config)
    opinionated(network)
    network.set_attn_implementation(attention.NAME)
    network.config.use_cache = False
    return Policy(network=network.train(), tokenizer=tokenizer)


@pytest.fixture(scope="session", params=["llama", "lora", "grouped", "sliding", "narrow values"])
def policy(request, tokenizer):
    """A scratch decoder, the same with an adapter, grouped queries, a sliding window of five tokens, and values
    that are narrower than keys."""
    shared = {**SIZES, "vocab_size": len(tokenizer), "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    match request.param:
        case "llama":
            return scratch_policy()
        case "lora":
            return scratch_policy(Adapter(rank=2, alpha=4.0))
        case "grouped":
            return policy_of(LlamaConfig(**shared, num_key_value_heads=2), tokenizer)
        case "sliding":
            return policy_of(MistralConfig(**shared, num_key_value_heads=1, sliding_window=5), tokenizer)
        case "narrow values":
            sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
            experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
            return policy_of(
                DeepseekV3Config(**shared, **sizes, **experts, moe_intermediate_size=8, first_k_dense_replace=1),
                tokenizer,
            )


@pytest.fixture(scope="session")
def plain_policy():
    """The scratch decoder alone, for what does not depend on the kind of model."""
    return scratch_policy()


@pytest.fixture
def requests_for(tokenizer):
    """Makes requests with different contexts, limits, temperatures and stop tokens; some begin alike."""

    def make(count, *, seed=0, longest=40, new=24):
        chance = np.random.default_rng(seed)
        shared = chance.integers(5, len(tokenizer), size=20)
        found = []
        for index in range(count):
            own = chance.integers(5, len(tokenizer), size=int(chance.integers(1, longest)))
            stop = [frozenset({0}), frozenset({0, 7, 9, 30}), frozenset({11}), frozenset()][index % 4]
            found.append(
                Request(
                    key=int(chance.integers(0, 1 << 64, dtype=np.uint64)),
                    tokens=np.concatenate([shared, own]) if index % 3 == 0 else own,
                    max_new_tokens=int(chance.integers(1, new)),
                    stop=stop,
                    temperature=[1.0, 0.7, 1.0, 0.0, 1.3][index % 5],
                )
            )
        return found

    return make
