"""A model of a known shape with random weights: what size costs can be measured without downloading anything.

What such a model says is noise, but it is as long and as expensive to compute as anything a trained one says. The
tokenizer has one token per character and is far smaller than the vocabulary, so most of what is sampled has no text.
"""

from __future__ import annotations

import string

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from stretto.bench.cases import plain_shape
from stretto.models.load import Policy
from stretto.models.scratch import character_tokenizer
from stretto.planner.cost.shapes import ModelShape

CONTEXT = 32_768
"""Longest sequence."""


def configuration(shape: ModelShape) -> PretrainedConfig:
    """Its sizes in transformers' words: a Qwen where the name says so, otherwise a Llama."""
    kinds = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
    kind = next((made for begin, made in kinds.items() if shape.name.startswith(begin)), LlamaConfig)
    return kind(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def random_policy(name: str, *, dtype: torch.dtype, device: torch.device, seed: int) -> Policy:
    """Weights drawn on the device; torch's random state stays as it was."""
    config = configuration(plain_shape(name))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return Policy(network=network, tokenizer=character_tokenizer(string.printable))
