"""LoRA in the format everyone loads, kept apart from the weights it adapts.

Never merged: rounding a young adapter into bf16 weights loses most of its update. The reference policy is the same
model with the adapter switched off, so it costs no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from stretto.errors import Problem, RecipeError
from stretto.kernels.cpu.backward import take_over_adapters
from stretto.models.quantised import QuantisedExperts
from stretto.recipe.schema import Adapter


def linear_names(network: nn.Module, head: nn.Module | None) -> list[str]:
    """Last parts of the names of the linear layers, the head left out."""
    names = {
        name.rpartition(".")[2]
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(names)


def attention_names(network: nn.Module) -> list[str]:
    """Last parts of the names of the linear layers inside attention."""
    paths = [name.split(".") for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return sorted({path[-1] for path in paths if any("attn" in part or "attention" in part for part in path[:-1])})


def target_problems(targets: str | Iterable[str], network: nn.Module, head: nn.Module | None) -> list[Problem]:
    """A target that matches no layer would train nothing without a word, and so would the head.

    The head is left out because log-probabilities are taken from its weight, past any adapter around it.
    """
    if targets == "attention" and not attention_names(network):
        reason = "the model has no linear layers that are called attention"
        return [Problem(field="model.adapter.targets", reason=reason, fix="use all-linear, or name layers")]
    if isinstance(targets, str):
        return []
    known = linear_names(network, head)
    full = [name for name, module in network.named_modules() if isinstance(module, nn.Linear) and module is not head]
    return [
        Problem(
            field="model.adapter.targets",
            reason=f"{target!r} matches no linear layer of the model",
            fix=f"use all-linear, or some of {', '.join(known)}",
        )
        for target in targets
        if not any(name == target or name.endswith(f".{target}") for name in full)
    ]


def add_adapter(network: PreTrainedModel, section: Adapter, *, seed: int) -> Any:
    """Puts LoRA layers inside the network and returns PEFT's wrapper; the adapter computes in the network's type."""
    problems = target_problems(section.targets, network, network.get_output_embeddings())
    if problems:
        raise RecipeError(*problems)
    chosen = section.targets
    targets = attention_names(network) if chosen == "attention" else chosen if chosen == "all-linear" else list(chosen)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        adapted = get_peft_model(network, config, autocast_adapter_dtype=False)
    for name, weight in network.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(network.dtype)
    take_over_adapters(network)
    if chosen == "all-linear" and any(isinstance(module, QuantisedExperts) for module in network.modules()):
        warnings.warn("experts in few bits stay as they are; all other linear layers are adapted", stacklevel=2)
    return adapted
