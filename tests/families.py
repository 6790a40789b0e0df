"""Tiny decoders of several families, each with a twin that is transformers' and PEFT's alone: nothing of it is ours.

What the twin computes is the plain padded batch: a row for each conversation, an attention mask, the model's own
attention, every logit.
"""

import copy
import warnings
from functools import cache

import numpy as np
import torch
from peft import get_peft_model
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stretto.models.lora import add_adapter
from stretto.models.lora_targets import targets_of
from stretto.models.scratch import character_tokenizer
from stretto.recipe.schema import Adapter
from tiny import VOCABULARY, finished, policy_from

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True),
    "qwen2 with a window in one layer": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3 with wide heads": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral with a window": lambda: MistralConfig(**(SIZES | {"num_key_value_heads": 1}), sliding_window=8),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=8),
    "gemma3 with windows": lambda: Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3 with experts": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "deepseek v3 with narrow values": lambda: DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}),
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gpt2, which learns its positions": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=0
    ),
}

LORA = Adapter(rank=2, alpha=4.0)

SHARPER = 8
"""Weights are so many times larger than fresh ones: or attention would be nearly even, whoever sees whom."""


class TypedNorm(nn.Module):
    """Root-mean-square norm that keeps the type of its input, for families that store the weight or the weight - 1."""

    def __init__(self, stock):
        super().__init__()
        self.weight = stock.weight
        self.epsilon = getattr(stock, "variance_epsilon", None) or stock.eps
        self.shift = 1.0 if type(stock).__name__.startswith("Gemma") else 0.0

    def forward(self, hidden):
        return (self.shift + self.weight) * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon)


class InDouble(TorchFunctionMode):
    """What a module would turn into fp32 becomes fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


def in_double(forward):
    """The same forward under `InDouble`."""

    def called(*args, **kwargs):
        with InDouble():
            return forward(*args, **kwargs)

    return called


def keep_double(network):
    """Makes norms, and the routers of experts, compute in fp64, where the stock ones turn to fp32 on the way."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, TypedNorm(child))
            elif type(child).__name__.endswith("Router"):
                child.forward = in_double(child.forward)


@cache
def twins(family, *, adapter=False, dtype=torch.float64):
    """A policy as a training has it, and the same weights in a stock model. In fp64 both keep to it."""
    policy = policy_from(FAMILIES[family](), dtype=dtype)
    config = copy.deepcopy(FAMILIES[family]())
    stock = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()
    if adapter:
        policy.adapted = add_adapter(policy.network, LORA, seed=0)
        adapt(stock)
    if dtype == torch.float64:
        keep_double(policy.network)
        keep_double(stock)
    sharpen(policy.network)
    stock.load_state_dict(policy.network.state_dict())
    return policy, stock


def adapt(network):
    """PEFT's own layers with the same adapter as `LORA`, in the type of the network."""
    targets = targets_of(LORA.targets, network, network.get_output_embeddings())
    config = targets.config(LORA.rank, LORA.alpha, "CAUSAL_LM")
    config.target_parameters = targets.parameters or None  # as it is written down
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(network, config, autocast_adapter_dtype=False)
    network.to(network.dtype)


@torch.no_grad()
def sharpen(network):
    """Larger matrices; adapters that are not 0, which would hide half of their gradient."""
    noise = torch.Generator().manual_seed(0)
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.3, generator=noise)
        elif weight.dim() > 1 and "lora_" not in name:
            weight.mul_(SHARPER)


def padded_step(network, algorithm, samples, *, temperature):
    """Loss and gradients of a step as one padded batch; pads are random tokens, which would show if they counted."""
    talks = [sample.conversation for sample in samples]
    longest = max(len(talk.tokens) for talk in talks)
    tokens = torch.randint(0, VOCABULARY, (len(talks), longest), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(tokens)
    for row, talk in enumerate(talks):
        tokens[row, : len(talk.tokens)] = torch.as_tensor(talk.tokens)
        mask[row, : len(talk.tokens)] = 1
    logits = network(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    logprobs = (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    said = [logprobs[row, np.flatnonzero(talk.trained) - 1] for row, talk in enumerate(talks)]
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    return finished(torch.cat(said), trained, algorithm, samples)


def mixture_in(folder):
    """A tiny mixture as its files, for a recipe to name."""
    tokenizer = character_tokenizer("01=")
    config = Qwen3MoeConfig(
        **(SIZES | {"vocab_size": len(tokenizer)}),
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
