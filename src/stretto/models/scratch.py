"""A tiny decoder and a character tokenizer made from a few numbers in the recipe: nothing to download.

The decoder is a Llama, so what is saved loads with transformers alone. Only its norms differ while it trains here:
they keep the type of their input, where the stock ones compute in fp32, so that in fp64 the whole model really is
fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stretto.errors import RecipeError
from stretto.recipe.schema import SCRATCH_TEMPLATE, Scratch

USER, ASSISTANT, SYSTEM, END, UNKNOWN = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|unknown|>"
SPECIAL = (END, USER, ASSISTANT, SYSTEM, UNKNOWN)


class ExactNorm(nn.Module):
    """Root-mean-square norm in the type of its input."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.weight = stock.weight
        self.epsilon = stock.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden / rms(hidden) * weight."""
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon))


def keep_norms_exact(network: nn.Module) -> None:
    """Replaces every root-mean-square norm by one that keeps the type of its input; names and weights stay."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, ExactNorm(child))


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character, in a form that transformers saves and loads."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *sorted(set(characters))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = SCRATCH_TEMPLATE
    return fast


def configuration(section: Scratch) -> LlamaConfig:
    """The decoder's sizes in transformers' words."""
    if section.width % section.heads:
        raise RecipeError.of(
            "model.scratch.width",
            f"{section.width} is not a multiple of heads ({section.heads})",
            f"use a multiple of {section.heads}",
        )
    return LlamaConfig(
        vocab_size=len(SPECIAL) + len(set(section.characters)),
        hidden_size=section.width,
        intermediate_size=4 * section.width,
        num_hidden_layers=section.layers,
        num_attention_heads=section.heads,
        num_key_value_heads=section.heads,
        max_position_embeddings=section.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def fresh_network(section: Scratch, *, seed: int) -> LlamaForCausalLM:
    """Random weights that depend on the seed alone, and leave torch's global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = LlamaForCausalLM(configuration(section))
    return network
